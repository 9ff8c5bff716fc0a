"""Predictions as a service asks for them: single points in many calls, and batches of three shapes.

    python benchmarks/service.py --device cpu --threads 1 -o docs/benchmarks/service-cpu.json
    python benchmarks/service.py --device cuda -o docs/benchmarks/service-h200.json

Calls of `shoal.predict` take turns with the same members as ordinary modules, one after another,
and with a single module. Inputs come from the host and outputs return to it. Prints the median
(p50) and the 99th percentile (p99) of a call, in milliseconds, and the median of its CPU seconds,
which depend less on other work of the machine. Before the measurement every kind of
call runs `--warm` times; the slowest of these calls (`first`) contains captures on a GPU.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from common import finish, options, parser, say, title
from torch import Tensor, nn

import shoal
from shoal.core.display.text import table
from shoal.engine.members.precision import full_precision
from shoal.experiment.bench.networks import network

NETWORKS = ("mlp", "small-cnn", "resnet18")
SHAPES = (1, 16, 100)
"""Points of the batches that come in turn in the case `three shapes`."""

Call = Callable[[Tensor], Tensor]


def callers(name: str, members: int, device: torch.device) -> tuple[dict[str, Call], Tensor]:
    """The ways to predict, and inputs of the largest batch."""
    known = network(name)
    ensemble = shoal.Ensemble.init(known.blueprint, members=members, seed=0).to(device)
    modules: list[nn.Module] = [ensemble.member(i).to(device) for i in range(members)]
    x = torch.randn(max(SHAPES), *known.input_shape, generator=torch.Generator().manual_seed(0))

    def loop(batch: Tensor) -> Tensor:
        with torch.no_grad(), full_precision():
            moved = batch.to(device)
            return torch.stack([module(moved) for module in modules]).cpu()

    def one(batch: Tensor) -> Tensor:
        with torch.no_grad(), full_precision():
            return modules[0](batch.to(device)).cpu()

    ours: Call = lambda batch: shoal.predict(ensemble, batch).members  # noqa: E731
    return {"predict": ours, "module loop": loop, "one module": one}, x


def seconds(call: Call, x: Tensor) -> tuple[float, float]:
    """Seconds of one call, and its CPU seconds."""
    started, spent = time.perf_counter(), time.process_time()
    call(x)
    return time.perf_counter() - started, time.process_time() - spent


def measured(name: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one network: single points, and batches of three shapes in turn."""
    ways, x = callers(name, asked.members, asked.device)
    wanted, ours = (ways[way](x[:3]) for way in ("module loop", "predict"))
    deviation = float((ours - wanted).abs().max() / wanted.abs().max())
    rows = []
    for what, sizes in {"single points": SHAPES[:1], "three shapes": SHAPES}.items():
        batches = [x[:size] for size in sizes]
        warm = {way: _first(call, batches, asked) for way, call in ways.items()}
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        gc.collect()
        started = time.perf_counter()
        for number in range(asked.calls):
            for way, call in ways.items():
                times[way].append(seconds(call, batches[number % len(batches)]))
            if time.perf_counter() - started > asked.seconds:
                break
        for way, found in times.items():
            (p50, cpu), (p99, _) = torch.tensor(found).double().quantile(_ENDS, dim=0).tolist()
            row = {"network": name, "what": what, "way": way, "calls": len(found)}
            rows.append(row | {"p50": p50, "p99": p99, "cpu": cpu, "first": warm[way]})
        rows[-3]["deviation"] = deviation
        say(f"{name}, {what}: done")
    return rows


_ENDS = torch.tensor([0.5, 0.99], dtype=torch.float64)


def _first(call: Call, batches: list[Tensor], asked: argparse.Namespace) -> float:
    """Seconds of the slowest of the first calls."""
    slowest, started = 0.0, time.perf_counter()
    for number in range(asked.warm):
        slowest = max(slowest, seconds(call, batches[number % len(batches)])[0])
        if time.perf_counter() - started > asked.seconds:
            break
    return slowest


def shown(rows: list[dict[str, Any]], gpu: bool) -> str:
    """A table of milliseconds, and the loop's CPU seconds, on a GPU its p50, over the row's."""
    key = "p50" if gpu else "cpu"
    loops = {(r["network"], r["what"]): r[key] for r in rows if r["way"] == "module loop"}
    cells = [
        [row["network"], row["what"], row["way"], str(row["calls"])]
        + [f"{1000 * row[name]:.3f}" for name in ("p50", "p99", "cpu", "first")]
        + [f"{loops[row['network'], row['what']] / row[key]:.2f}"]
        for row in rows
    ]
    return table(cells, ["", "", "", "calls", "ms p50", "p99", "CPU p50", "first", "loop / row"])


def main() -> None:
    """Measure and print."""
    made = parser(__doc__ or "")
    made.add_argument("--networks", default=",".join(NETWORKS))
    made.add_argument("--members", type=int, default=5)
    made.add_argument("--calls", type=int, default=2000)
    made.add_argument("--warm", type=int, default=1500)
    made.add_argument("--seconds", type=float, default=20.0, help="at most, per case and phase")
    asked = options(made)
    if asked.quick:
        asked.calls, asked.warm, asked.seconds = 20, 5, 2.0
    value = title(asked.device) | {"members": asked.members, "shapes": SHAPES, "rows": []}
    for name in asked.networks.split(","):
        value["rows"] += measured(name, asked)
    finish(value, shown(value["rows"], asked.device.type == "cuda"), asked.out)


if __name__ == "__main__":
    main()
