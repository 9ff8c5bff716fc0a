"""`shoal.fit` on two to four processes with limited bandwidth: bytes and time of a step, predicted.

    python benchmarks/scaling_fit.py -o docs/benchmarks/scaling-fit.json      (root, Linux)
    python benchmarks/scaling_fit.py --overlap docs/benchmarks/scaling-fit.json

Each process has a network namespace (`namespaces.py`). The card's own counter gives the bytes of a
step. The time at a high bandwidth gives computing and latency on this machine, whose processes
share its cores. The model adds the traffic at a low bandwidth, and the measured time checks it.
The second form compares the model with one in which weights travel during both passes.
"""

import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import finish, parser, say, title
from namespaces import namespaces, refusal, run_in

import shoal
from shoal.core.display.text import table
from shoal.experiment.bench.scaling import Link, Workload, exchanges, step_time

WORK = Workload(members=12, weights=95_410, batch=128, outputs=10, inputs=784, seconds=0.0)
METHODS = {
    "ensemble": "plain",
    "f-kde": "function",
    "forde": "input-gradient",
    "kde": "weight",
    "svgd": "weight-stein",
}
FAST, SLOW = 10_000.0, 100.0
PROCESSES = (2, 3, 4)
SHORT = 3
"""Steps of the shorter of two runs, whose difference has no start and no end."""

REPEATS = 3
"""Runs of each length."""

TCP = 1448 / 1514
"""Data per byte on an Ethernet with frames of 1,514 bytes."""


def network() -> torch.nn.Module:
    """A perceptron on inputs of the size of MNIST."""
    layers = (torch.nn.Linear(784, 120), torch.nn.ReLU(), torch.nn.Linear(120, 10))
    return torch.nn.Sequential(*layers)


def trained(method: str, steps: int) -> tuple[float, int]:
    """Seconds and received bytes of a run."""
    x = torch.randn(512, 784, generator=torch.Generator().manual_seed(0))
    y = torch.arange(512) % 10
    ensemble = shoal.Ensemble.init(network, members=WORK.members, seed=0)
    dist.barrier()
    start, before = time.perf_counter(), _received()
    how = {"steps": steps, "batch_size": WORK.batch, "optimizer": "sgd", "lr": 0.001}
    shoal.fit(ensemble, (x, y), method=method, engine="vmap", progress=False, **how)
    return time.perf_counter() - start, _received() - before


def worker(steps: int) -> None:
    """One process: prints seconds and bytes per step by method."""
    dist.init_process_group("gloo")
    found = {}
    for method in METHODS:
        trained(method, SHORT)
        short, long = (
            [trained(method, count) for _ in range(REPEATS)] for count in (SHORT, SHORT + steps)
        )
        # Other work only adds time and bytes, so the least of each counts, not of differences.
        pairs = zip(*(map(min, zip(*runs, strict=True)) for runs in (short, long)), strict=True)
        found[method] = [(after - before) / steps for before, after in pairs]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def measure(steps: int) -> list[dict[str, Any]]:
    """A row for each method and number of processes."""
    rows = []
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    for processes in PROCESSES:
        told = {}
        for rate in (FAST, SLOW):
            say(f"{processes} processes, {rate:g} Mbit/s")
            with namespaces(processes, rate) as names:
                words = (os.path.abspath(__file__), "--worker", str(steps))
                told[rate] = json.loads(run_in(names, words, quiet, timeout=900))
        for method in METHODS:
            (fast, _), (slow, received) = told[FAST][method], told[SLOW][method]
            row = {"method": method, "processes": processes, "fast": fast, "slow": slow}
            rows.append(row | {"received": received} | _predicted(method, processes, fast))
    return rows


def _predicted(method: str, processes: int, fast: float) -> dict[str, float]:
    """Bytes, and the time at the low bandwidth from the time at the high one."""
    space = METHODS[method]
    slow, quick = (
        step_time(WORK, Link(rate * 125_000 * TCP, 0.0), processes, space).traffic
        for rate in (SLOW, FAST)
    )
    count = step_time(WORK, Link(1.0, 0.0), processes, space).traffic
    return {"predicted": fast + slow - quick, "predicted_bytes": count}


def overlapped(row: dict[str, Any], passes: float) -> float:
    """The time at the low bandwidth if weights travel to where they are compared during the passes.

    The first all-to-all takes a seconds and both passes c, so that max(c, a) = c + a - min(c, a)
    takes the place of c + a. The measured time at the high bandwidth has c and its own overlap.

    Args:
        row: a method that compares weights.
        passes: c, of the plain ensemble at the high bandwidth.
    """
    move, count = exchanges(WORK, row["processes"], METHODS[row["method"]])[0]
    slow, quick = (
        min(passes, move.cost(count, Link(rate * 125_000 * TCP, 0.0), WORK.size)[0])
        for rate in (SLOW, FAST)
    )
    return row["predicted"] - slow + quick


def compared(rows: list[dict[str, Any]]) -> str:
    """Measured over predicted times with and without overlap, and their mean error as a factor."""
    passes = {row["processes"]: row["fast"] for row in rows if row["method"] == "ensemble"}
    found = [row for row in rows if METHODS[row["method"]].startswith("weight")]
    cells, errors = [], []
    for row in found:
        times = row["predicted"], overlapped(row, passes[row["processes"]])
        ratios = [row["slow"] / time for time in times]
        errors.append([abs(math.log(ratio)) for ratio in ratios])
        cells.append([row["method"], str(row["processes"]), *(f"{1000 * t:.1f}" for t in times)])
        cells[-1] += [f"{1000 * row['slow']:.1f}", *(f"{ratio:.2f}" for ratio in ratios)]
    means = [math.exp(statistics.mean(each)) for each in zip(*errors, strict=True)]
    cells.append(["mean factor", "", "", "", "", *(f"{mean:.2f}" for mean in means)])
    header = ["", "processes", "ms predicted", "with overlap", "measured", "ratio", "with overlap"]
    return table(cells, header)


def shown(rows: list[dict[str, Any]]) -> str:
    """The table of predicted and measured bytes and times."""
    cells = [
        [
            row["method"],
            str(row["processes"]),
            f"{row['predicted_bytes'] / 1000:,.1f}",
            f"{row['received'] / 1000:,.1f}",
            f"{1000 * row['fast']:.1f}",
            f"{1000 * row['predicted']:.1f}",
            f"{1000 * row['slow']:.1f}",
            f"{row['slow'] / row['predicted']:.2f}",
        ]
        for row in rows
    ]
    header = ["", "processes", "kB predicted", "kB on the card", f"ms at {FAST:g} Mbit/s"]
    header += [f"predicted at {SLOW:g}", f"measured at {SLOW:g}", "ratio"]
    return table(cells, header)


def _received() -> int:
    return int(Path("/sys/class/net/eth0/statistics/rx_bytes").read_text())


def main() -> None:
    """Measure and compare."""
    made = parser(__doc__ or "")
    made.add_argument("--worker", type=int, help="used by the script itself")
    made.add_argument("--overlap", type=Path, help="compare two models with the times of this file")
    options = made.parse_args()
    if options.overlap is not None:
        return print(compared(json.loads(options.overlap.read_text())["rows"]))
    if options.worker is not None:
        return worker(options.worker)
    if (reason := refusal()) is not None:
        sys.exit(f"nothing can be measured here: {reason}")
    rows = measure(3 if options.quick else 10)
    value = title(torch.device("cpu")) | {"workload": asdict(WORK), "rows": rows}
    finish(value, shown(rows), options.out)


if __name__ == "__main__":
    main()
