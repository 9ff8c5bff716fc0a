"""The start of small runs: imports, the first and the second `fit`, and `shoal fit` from a shell.

    python benchmarks/start.py -o docs/benchmarks/start-cpu.json
    python benchmarks/start.py --before OTHER    # in turns with a checkout of an older commit

Every measurement is a fresh process. CPU seconds depend little on other work of the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import DOCS, finish, say, title

FIT = """
import json, sys, time
def now(): return time.perf_counter(), time.process_time()
at = [now()]
import torch
at.append(now())
import shoal
shoal.fit, shoal.Ensemble
at.append(now())
from torch import nn
build = lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > 0).long()
for _ in range(2):
    ensemble = shoal.Ensemble.init(build, members=5, seed=0)
    shoal.fit(ensemble, (x, y), method=METHOD, steps=200, progress=False)
    at.append(now())
names = ["import torch", "import shoal", "first fit", "second fit"]
spent = {name: [b - a for a, b in zip(*pair)] for name, pair in zip(names, zip(at, at[1:]))}
loaded = [name for name in ("torch._dynamo", "sympy") if name in sys.modules]
print(json.dumps({"spent": spent, "loaded": loaded}))
"""


def in_process(arguments: list[str], tree: Path) -> tuple[str, list[float]]:
    """Output of a fresh Python, and its wall and CPU seconds."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    before, begun = os.times(), os.times().elapsed
    found = subprocess.run(
        [sys.executable, *arguments],
        env=environment, cwd=tree, check=True, capture_output=True, text=True,
    )  # fmt: skip
    after = os.times()
    cpu = after.children_user + after.children_system
    return found.stdout, [
        after.elapsed - begun,
        cpu - before.children_user - before.children_system,
    ]


def measured(method: str, tree: Path) -> dict[str, Any]:
    """Wall and CPU seconds of each phase, once."""
    text, whole = in_process(["-c", FIT.replace("METHOD", repr(method))], tree)
    result = json.loads(text.splitlines()[-1])
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "shoal", "fit", "toy-classification", f"method={method}", "members=5"]
        _, shell = in_process([*command, "steps=200", "-o", f"{folder}/run", "--quiet"], tree)
    spent = result["spent"] | {"whole script": whole, "shoal fit (shell)": shell}
    return {"spent": spent, "loaded": result["loaded"]}


def main() -> None:
    """Measure every method several times, and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="ensemble,f-kde")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="checkout of an older commit")
    parser.add_argument("-o", "--out")
    asked = parser.parse_args()
    value = title(torch.device("cpu")) | {"rounds": asked.rounds, "rows": []}
    trees = {"now": DOCS.parent.parent}
    if asked.before is not None:
        trees = {"before": asked.before.resolve(), **trees}
    for method in asked.methods.split(","):
        rounds = []
        for number in range(asked.rounds):
            rounds.append({name: measured(method, tree) for name, tree in trees.items()})
            say(f"{method}: round {number + 1} of {asked.rounds}")
        for name in trees:
            value["rows"] += rows_of(method, name, [found[name] for found in rounds])
    finish(value, "\n".join(map(line, value["rows"])), asked.out)


def rows_of(method: str, tree: str, rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median and least seconds of each phase."""
    rows = []
    for phase in rounds[0]["spent"]:
        wall, cpu = zip(*(found["spent"][phase] for found in rounds), strict=True)
        row = {"method": method, "tree": tree, "phase": phase, "loaded": rounds[0]["loaded"]}
        row |= {"seconds": statistics.median(wall), "cpu": statistics.median(cpu)}
        rows.append(row | {"every_cpu": list(cpu)})
    return rows


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    name = f"{row['method']:10} {row['tree']:7} {row['phase']:18}"
    least = min(row["every_cpu"])
    return f"{name} {row['seconds']:6.2f} s, {row['cpu']:5.2f} s CPU, least {least:.2f}"


if __name__ == "__main__":
    main()
