"""The longest step of a run that saves checkpoints while it trains.

    python benchmarks/save_pause.py
    python benchmarks/save_pause.py --before OTHER    # in turns with a checkout of an older commit

Every measurement is a fresh process: 8 members with Adam, whose state takes about 200 MB.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import say

RUN = """
import json, sys, time
import torch
import shoal
from torch import nn

torch.set_num_threads(1)
at = []

def schedule(step, steps):
    at.append(time.perf_counter())
    return 1.0

build = lambda: nn.Sequential(nn.Linear(64, 1400), nn.ReLU(), nn.Linear(1400, 1400), nn.ReLU(),
                              nn.Linear(1400, 10))
x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
ensemble = shoal.Ensemble.init(build, members=8, seed=0)
state = 3 * sum(w.numel() * 4 for w in ensemble.weights.values())
shoal.fit(ensemble, (x, torch.arange(512) % 10), method="ensemble", batch_size=16, steps=STEPS,
          schedule=schedule, out=sys.argv[1], save_every=EVERY, engine="vmap", progress=False)
print(json.dumps({"state": state, "steps": [b - a for a, b in zip(at, at[1:])]}))
"""


def measured(tree: Path, steps: int, every: float) -> dict:
    """Seconds of every step but the first ones, which prepare the run."""
    code = RUN.replace("STEPS", str(steps)).replace("EVERY", repr(every))
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(
            [sys.executable, "-c", code, f"{folder}/run"],
            env=environment, cwd=tree, check=True, capture_output=True, text=True,
        )  # fmt: skip
    table = json.loads(found.stdout)
    return {**table, "steps": table["steps"][5:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="checkout of an older commit")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between checkpoints")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    trees = {"now": Path(__file__).parents[1]}
    if asked.before:
        trees = {"before": asked.before.absolute(), **trees}
    for _ in range(asked.repeats):
        for name, tree in trees.items():
            found = measured(tree, asked.steps, asked.every)
            times = found["steps"]
            say(
                f"{name:7s} state {found['state'] / 1e6:.0f} MB, median step "
                f"{1e3 * statistics.median(times):.0f} ms, longest {1e3 * max(times):.0f} ms"
            )


if __name__ == "__main__":
    main()
