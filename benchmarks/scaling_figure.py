"""Figures of the step on many processes: predicted against measured, and 1 to 1,024 GPUs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import DOCS

from shoal.core.display.text import table
from shoal.core.optional import require
from shoal.core.storage.files import read_json
from shoal.experiment.bench.scaling import SPACES, Link, StepTime, Workload, step_time
from shoal.plots.figure import blank, legend, look, power, rc, svg

__all__ = ["draw", "forecast"]

METHODS = dict(zip(SPACES, ("ensemble", "f-kde", "forde", "kde", "svgd"), strict=True))
"""The method whose colour stands for a space."""

GPUS = tuple(2**power for power in range(11))
GPU_LINK = Link(bandwidth=50e9, latency=10e-6, rate=50e12, trees=True)
"""Assumed: 400 Gbit/s for each GPU, 10 µs per round, 50 Tflop/s in float32."""

PER_GPU, FIXED = 10, 1024
"""Members per GPU where the ensemble grows with the GPUs, and members where it does not."""


def workload(space: str, members: int) -> Workload:
    """ResNet-18 on CIFAR-10, with the time per member that was measured on one H200."""
    steps = read_json(DOCS / "h200-forde.json")["steps"]
    method = "forde" if space == "input-gradient" else "ensemble"
    row = next(row for row in steps if row["method"] == method)
    seconds = row["ms"] / 1000 / row["members"]
    return Workload(members, row["weights"], row["batch_size"], 10, 3 * 32 * 32, seconds)


def forecast(members_of: Callable[[int], int], gpus: Sequence[int]) -> dict[str, list[StepTime]]:
    """Predicted steps by space, for each number of GPUs."""
    return {
        space: [step_time(workload(space, members_of(p)), GPU_LINK, p, space) for p in gpus]
        for space in SPACES
    }


def draw(value: dict[str, Any], folder: Path) -> None:
    """Write the figures as SVG and PNG, and print the table of predictions."""
    matplotlib = require("matplotlib", extra="report")
    growing = forecast(lambda gpus: PER_GPU * gpus, GPUS)
    larger = [gpus for gpus in GPUS if gpus >= 8]
    fixed = forecast(lambda gpus: FIXED, larger)
    with matplotlib.rc_context(rc()):
        _save(_agreement(value["rows"]), folder / "scaling-out-measured", "Measured times")
        grown = f"members: {PER_GPU} × GPUs"
        _save(_curves(growing, GPUS, grown), folder / "scaling-out-growing", "Step time, growing")
        shared = f"members: {FIXED:,} on all GPUs"
        _save(_curves(fixed, larger, shared), folder / "scaling-out-fixed", "Step time, fixed")
    print(_table(growing, GPUS))
    print(_table(fixed, larger))


def _agreement(rows: Sequence[dict[str, Any]]) -> Any:
    figure, axes = blank()
    for space in SPACES:
        style = look(METHODS[space])
        mine = [row for row in rows if row["case"] == f"step, {space}"]
        times = [[1000 * row[key] for row in mine] for key in ("predicted", "seconds")]
        axes.plot(*times, linestyle="", label=space, **style.spot)
    low, high = (f(1000 * row["predicted"] for row in rows) for f in (min, max))
    axes.plot([low / 2, 2 * high], [low / 2, 2 * high], ":", color=look("ensemble").colour)
    axes.set(xscale="log", yscale="log", xlabel="predicted (ms)", ylabel="measured (ms)")
    power(axes.xaxis)
    power(axes.yaxis)
    legend(figure, axes)
    return figure


def _curves(found: dict[str, list[StepTime]], gpus: Sequence[int], title: str) -> Any:
    figure, axes = blank()
    for space, times in found.items():
        style = look(METHODS[space])
        total = [1000 * each.total for each in times]
        axes.plot(gpus, total, label=space, linestyle=style.linestyle, **style.spot)
    ideal = [1000 * each.compute for each in found["plain"]]
    axes.plot(gpus, ideal, ":", color=look("ensemble").colour, label="computing only")
    axes.set(xscale="log", yscale="log", xlabel=f"GPUs ({title})", ylabel="time per step (ms)")
    power(axes.yaxis)
    ticker = require("matplotlib.ticker", extra="report")
    axes.xaxis.set_major_locator(ticker.FixedLocator(gpus[::2] if len(gpus) > 8 else gpus))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda at, _: f"{at:,.0f}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    legend(figure, axes)
    return figure


def _save(figure: Any, path: Path, label: str) -> None:
    path.with_suffix(".svg").write_text(svg(figure, path.name, label) + "\n")
    figure.savefig(path.with_suffix(".png"), dpi=160, facecolor="white")


def _table(found: dict[str, list[StepTime]], gpus: Sequence[int]) -> str:
    """Milliseconds by cause: computing + interaction + traffic + latency = total."""
    rows = [
        [
            f"{count:,}",
            space,
            *(f"{1000 * part:.3g}" for part in each),
            f"{1000 * each.total:.3g}",
        ]
        for space, times in found.items()
        for count, each in zip(gpus, times, strict=True)
        if count in (1, 8, 64, 1024)
    ]
    return table(rows, ["GPUs", "space", "computing", "interaction", "traffic", "latency", "total"])
