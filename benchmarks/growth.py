"""How the time per step grows with members, batch size and weights; as JSON and as figures.

    python benchmarks/growth.py --device cpu

writes docs/benchmarks/growth-cpu.json and three figures, each as SVG and PNG. On a machine without
matplotlib there are no figures; draw them elsewhere from the JSON:

    python benchmarks/growth.py --draw docs/benchmarks/growth-cuda.json
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import DOCS, finish, options, parser, say, title

from shoal.core.display.text import table
from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.core.storage.files import read_json
from shoal.experiment.bench.battery import Case, Contestant, Row, measure
from shoal.experiment.bench.measure import Timing
from shoal.experiment.bench.networks import perceptron
from shoal.plots.figure import blank, legend, look, power, rc, svg

METHODS = ("ensemble", "kde", "f-kde")
POINTS = 16_384


@dataclass(frozen=True)
class Sweep:
    """One size that grows while the others are fixed.

    Attributes:
        name: name of the size.
        key: key of the size in a row.
        axis: label of the horizontal axis.
        sizes: sizes to measure.
        quick: sizes for a short test.
    """

    name: str
    key: str
    axis: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]

    def case(self, size: int, device: torch.device, batch_size: int) -> Case:
        """20 members, batch size 128 and width 100, except the size that grows."""
        members = size if self.name == "members" else 20
        batch = size if self.name == "batch" else batch_size
        network = perceptron(size if self.name == "weights" else 100)
        return Case(network, members, batch, "float32", "sgd", device, POINTS)


SWEEPS = (
    Sweep("members", "members", "members M", (1, 2, 4, 8, 16, 32, 64), (1, 2, 4)),
    Sweep("batch", "batch_size", "batch size B", (16, 32, 64, 128, 256, 512, 1024), (8, 16)),
    Sweep("weights", "weights", "weights per member", (25, 50, 100, 200, 400, 800), (10, 20)),
)


def main() -> None:
    """Measure and draw every sweep, or draw an earlier measurement."""
    made = parser("How the time per step grows with members, batch size and weights.")
    made.add_argument("--engine", default="auto", help="(auto)")
    made.add_argument("--seconds", type=float, help="seconds per point (3; quick: 0.05)")
    made.add_argument("--draw", metavar="FILE", help="only draw the figures of this JSON file")
    found = options(made)
    file = Path(found.draw or found.out or DOCS / f"growth-{found.device.type}.json")
    if found.draw is None:
        value = measured(found.device, found.engine, found.seconds, found.quick)
        finish(value, as_text(value), str(file))
    try:
        figures(read_json(file), file)
    except ConfigError as error:
        say(f"no figures: {error}")


def measured(
    device: torch.device, engine: str, seconds: float | None, quick: bool
) -> dict[str, Any]:
    """Measure every sweep on this machine."""
    seconds = seconds or (0.05 if quick else 3.0)
    value = title(device)
    value["settings"] = {"engine": engine, "points": POINTS, "seconds": seconds}
    value["sweeps"] = {}
    for sweep in SWEEPS:
        rows = swept(sweep, device, engine, seconds, quick)
        value["sweeps"][sweep.name] = {"rows": rows, **summary(sweep, rows)}
    return value


def figures(value: dict[str, Any], file: Path) -> None:
    """One figure per sweep, beside the JSON file and named after it."""
    kind = file.stem.removeprefix("growth-")
    for sweep in SWEEPS:
        rows = value["sweeps"][sweep.name]["rows"]
        draw(sweep, rows, file.with_name(f"growth-{sweep.name}-{kind}"))


def swept(
    sweep: Sweep, device: torch.device, engine: str, seconds: float, quick: bool
) -> list[Row]:
    """Time all sizes and methods, in turns."""
    sizes, batch_size = (sweep.quick, 16) if quick else (sweep.sizes, 128)
    cases = [sweep.case(size, device, batch_size) for size in sizes]
    entries = [Contestant(case, "shoal", method, engine) for case in cases for method in METHODS]
    rows = measure(entries, seconds, say)
    for row in rows:
        row["repulsion_share"] = share(row, rows)
    return rows


def share(row: Row, rows: Sequence[Row]) -> float | None:
    """Extra time relative to the plain ensemble of the same size, within the same rounds."""
    sizes = ("members", "batch_size", "weights")
    plain = next(
        other for other in rows
        if other["method"] == "ensemble" and all(other[key] == row[key] for key in sizes)
    )  # fmt: skip
    if "ms" not in row or "ms" not in plain:
        return None
    return _timing(row).over(_timing(plain)) - 1


def summary(sweep: Sweep, rows: Sequence[Row]) -> dict[str, Any]:
    """Exponent of the growth over the larger half of the sizes, and the largest extra time."""
    exponents, shares = {}, {}
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method and "ms" in row]
        large = mine[len(mine) // 2 :]
        logs = [(math.log(row[sweep.key]), math.log(row["ms"])) for row in large]
        exponents[method] = _slope(logs) if len(logs) > 1 else None
        shares[method] = max((row["repulsion_share"] or 0.0 for row in mine), default=None)
    return {"exponent": exponents, "largest_share": shares}


def _slope(points: Sequence[tuple[float, float]]) -> float:
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _timing(row: Row) -> Timing:
    return Timing(row["rounds_ms"], row["steps_a_round"])


def draw(sweep: Sweep, rows: Sequence[Row], path: Path) -> None:
    """Time against size on logarithmic axes, with a dotted line for exact proportion."""
    matplotlib = require("matplotlib", extra="report")
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(rc()):
        figure, axes = blank()
        for method in METHODS:
            _curve(axes, [row for row in rows if row["method"] == method and "ms" in row], sweep)
        _proportion(axes, [row for row in rows if row["method"] == "ensemble"], sweep)
        axes.set(xscale="log", yscale="log", xlabel=sweep.axis, ylabel="time per step (ms)")
        _plain_ticks(axes, sorted({row[sweep.key] for row in rows}))
        legend(figure, axes)
        label = f"Time per training step in milliseconds against {sweep.axis}"
        path.with_suffix(".svg").write_text(svg(figure, path.name, label) + "\n")
        figure.savefig(path.with_suffix(".png"), dpi=160, facecolor="white")


def _curve(axes: Any, rows: Sequence[Row], sweep: Sweep) -> None:
    if not rows:
        return
    style, sizes = look(rows[0]["method"]), [row[sweep.key] for row in rows]
    low = [row["ms"] - row["quartiles_ms"][0] for row in rows]
    high = [row["quartiles_ms"][1] - row["ms"] for row in rows]
    times = [row["ms"] for row in rows]
    axes.errorbar(sizes, times, [low, high], label=rows[0]["method"], capsize=2, **style.spot)


def _proportion(axes: Any, rows: Sequence[Row], sweep: Sweep) -> None:
    if not rows or "ms" not in rows[-1]:
        return
    last, sizes = rows[-1], [row[sweep.key] for row in rows]
    line = [last["ms"] * size / last[sweep.key] for size in sizes]
    axes.plot(sizes, line, color="#848484", linestyle=":", linewidth=1)


def _plain_ticks(axes: Any, sizes: Sequence[int]) -> None:
    ticker = require("matplotlib.ticker", extra="report")
    axes.xaxis.set_major_locator(ticker.FixedLocator(sizes))
    short = ticker.FuncFormatter(lambda v, _: f"{v / 1000:.0f}k" if v >= 10_000 else f"{v:.0f}")
    axes.xaxis.set_major_formatter(short)
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    power(axes.yaxis)


def as_text(value: dict[str, Any]) -> str:
    """The result as text."""
    blocks = []
    for name, sweep in value["sweeps"].items():
        key = next(found.key for found in SWEEPS if found.name == name)
        lines = [
            [row["method"], f"{row[key]:,}", f"{row['ms']:.4g}", f"{100 * row['spread']:.0f} %",
             f"{100 * row['repulsion_share']:.0f} %"]
            for row in sweep["rows"] if "ms" in row
        ]  # fmt: skip
        known = {m: e for m, e in sweep["exponent"].items() if e is not None}
        slopes = ", ".join(f"{method} {exponent:.2f}" for method, exponent in known.items())
        header = ["", name, "ms per step", "±", "over plain"]
        blocks.append(f"{table(lines, header)}\nexponent over the larger half: {slopes}")
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
