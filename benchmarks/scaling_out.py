"""The step on many processes: predicted by `shoal.experiment.bench.scaling`, and measured.

    python benchmarks/scaling_out.py -o docs/benchmarks/scaling-out.json      (root, Linux)
    python benchmarks/scaling_out.py --draw docs/benchmarks/scaling-out.json

Two to four processes of gloo run the exchanges of a step in network namespaces with limited
bandwidth. All-gathers of two processes at the first bandwidth calibrate the model. Every other row
is a prediction. The processes share the cores of one machine, so computing cannot scale here: the
measurement checks traffic and latency.
"""

import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import DOCS, finish, parser, say, title
from namespaces import namespaces, refusal, run_in
from scaling_figure import draw

from shoal.core.display.text import table
from shoal.core.storage.files import read_json
from shoal.experiment.bench.scaling import SPACES, Exchange, Link, Workload, exchanges

WORK = Workload(members=12, weights=100_000, batch=128, outputs=10, inputs=784, seconds=0.0)
"""A small perceptron on MNIST: large enough for the bandwidth, small enough for two cores."""

RATES = (100.0, 400.0)
PROCESSES = (2, 3, 4)
SMALL, LARGE = 1, 500_000
"""Numbers of the all-gathers that calibrate latency and bandwidth."""


def cases(processes: int) -> dict[str, list[tuple[Exchange, int]]]:
    """Sequences of exchanges by name: one of each kind, and the steps of every space."""
    kinds = ("all-gather", "all-to-all", "all-reduce")
    single = {
        f"{kind} of {count}": [(Exchange(kind, count), processes)]
        for kind in kinds
        for count in (SMALL * 12, LARGE)
    }
    return single | {f"step, {space}": exchanges(WORK, processes, space) for space in SPACES}


def exchange(kind: str, numbers: int, processes: int) -> None:
    """Carry out one exchange."""
    numbers = -(-numbers // processes) * processes if kind == "all-to-all" else numbers
    own = torch.zeros(numbers)
    if kind == "all-gather":
        dist.all_gather([torch.empty_like(own) for _ in range(processes)], own)
    elif kind == "all-to-all":
        dist.all_to_all_single(torch.empty_like(own), own)
    else:
        dist.all_reduce(own)


def worker(repeats: int) -> None:
    """One process: times every case in turn, and rank 0 prints all times in seconds."""
    dist.init_process_group("gloo")
    processes = dist.get_world_size()
    found: dict[str, list[float]] = {}
    for turn in range(repeats + 1):
        for name, messages in cases(processes).items():
            dist.barrier()
            start = time.perf_counter()
            for each, _ in messages:
                exchange(each.kind, each.numbers, processes)
            if turn:  # the first turn opens connections
                found.setdefault(name, []).append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def measure(rates: tuple[float, ...], repeats: int) -> list[dict[str, Any]]:
    """Times of every case, bandwidth and number of processes.

    Other work of the machine only ever adds time, so the fastest of the turns counts.
    """
    rows = []
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    for rate in rates:
        for processes in PROCESSES:
            say(f"{processes} processes, {rate:g} Mbit/s")
            with namespaces(processes, rate) as names:
                words = (os.path.abspath(__file__), "--worker", str(repeats))
                text = run_in(names, words, quiet, timeout=600)
            for name, times in json.loads(text).items():
                row = {"case": name, "processes": processes, "megabits": rate}
                rows.append(row | {"seconds": min(times), "median": statistics.median(times)})
    return rows


def calibrated(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Latency per round, and the share of the nominal bandwidth, from two rows."""
    chosen = {
        row["case"]: row["seconds"]
        for row in rows
        if row["processes"] == 2 and row["megabits"] == rows[0]["megabits"]
    }
    latency = chosen[f"all-gather of {SMALL * 12}"]
    seconds = chosen[f"all-gather of {LARGE}"] - latency
    received = Exchange("all-gather", LARGE).received(2, 4)
    return {"latency": latency, "share": received / seconds / (rows[0]["megabits"] * 125_000)}


def predict(rows: list[dict[str, Any]], known: dict[str, float]) -> None:
    """Add the prediction and the ratio measured / predicted to each row."""
    for row in rows:
        link = Link(row["megabits"] * 125_000 * known["share"], known["latency"])
        messages = cases(row["processes"])[row["case"]]
        row["predicted"] = sum(sum(each.cost(count, link)) for each, count in messages)
        row["received"] = sum(each.received(count, 4) for each, count in messages)
        row["ratio"] = row["seconds"] / row["predicted"]
        first = row["processes"] == 2 and row["megabits"] == rows[0]["megabits"]
        row["calibrates"] = first and row["case"].startswith("all-gather")


def shown(rows: list[dict[str, Any]]) -> str:
    """The table of predicted and measured times."""
    header = ["", "processes", "Mbit/s", "kB received", "predicted, ms", "measured, ms", "ratio"]
    cells = [
        [
            row["case"] + (" (calibrates)" if row["calibrates"] else ""),
            str(row["processes"]),
            f"{row['megabits']:g}",
            f"{row['received'] / 1000:.1f}",
            f"{1000 * row['predicted']:.1f}",
            f"{1000 * row['seconds']:.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return table(cells, header)


def main() -> None:
    """Measure, calibrate, predict and draw."""
    made = parser(__doc__ or "")
    made.add_argument("--worker", type=int, help="used by the script itself")
    made.add_argument("--draw", help="only draw the figures of this JSON file")
    options = made.parse_args()
    if options.worker is not None:
        return worker(options.worker)
    if options.draw is not None:
        return draw(read_json(Path(options.draw)), DOCS)
    if (reason := refusal()) is not None:
        sys.exit(f"nothing can be measured here: {reason}")
    rows = measure(RATES[:1] if options.quick else RATES, 3 if options.quick else 15)
    known = calibrated(rows)
    predict(rows, known)
    value = title(torch.device("cpu")) | {"workload": asdict(WORK), "link": known, "rows": rows}
    finish(value, shown(rows), options.out)
    if options.out is not None:
        draw(value, DOCS)


if __name__ == "__main__":
    main()
