"""The start of small runs: imports, the first and the second `fit`, and `shoal fit` from a shell.

    python benchmarks/start.py -o docs/benchmarks/start-cpu.json
    python benchmarks/start.py --tree OTHER    # another checkout, such as an older commit

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
    parser.add_argument("--tree", type=Path, default=DOCS.parent.parent)
    parser.add_argument("-o", "--out")
    asked = parser.parse_args()
    value = title(torch.device("cpu")) | {"rounds": asked.rounds, "rows": []}
    lines = []
    for method in asked.methods.split(","):
        rounds = [measured(method, asked.tree.resolve()) for _ in range(asked.rounds)]
        say(f"{method}: measured")
        for phase in rounds[0]["spent"]:
            pairs = [found["spent"][phase] for found in rounds]
            wall, cpu = (statistics.median(each) for each in zip(*pairs, strict=True))
            least = min(cpu for _, cpu in pairs)
            row = {"method": method, "phase": phase, "seconds": wall, "cpu": cpu}
            value["rows"].append(row | {"least_cpu": least, "loaded": rounds[0]["loaded"]})
            lines.append(
                f"{method:10} {phase:18} {wall:6.2f} s {cpu:6.2f} s CPU, least {least:.2f}"
            )
    finish(value, "\n".join(lines), asked.out)


if __name__ == "__main__":
    main()
