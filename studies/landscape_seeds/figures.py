"""Figures of the study: diversity, the low-loss tunnel, and ensembles of averages."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from shoal.plots.figure import COLOURS, png, rc
from shoal.prediction.statistics import mean_and_error
from studies.landscape_seeds.tables import Rows, read, values

__all__ = ["draw_averaging", "draw_diversity", "draw_tunnel"]

SERIES = {
    "members": ("#c03c00", "*"),
    "mean-field": ("#24783c", "P"),
    "swag": ("#0078a8", "s"),
    "diagonal": ("#6c54cc", "D"),
    "low-rank": ("#a83c78", "^"),
    "low-rank-scaled": ("#c078cc", "v"),
    "dropout": ("#d87800", "o"),
    "random": (COLOURS["ensemble"], "x"),
}
TREATED = {
    "1 member": (COLOURS["ensemble"], "o"),
    "1 average": ("#d87800", "s"),
    "mean-field": ("#24783c", "P"),
    "5 member": ("#0078a8", "D"),
    "5 average": ("#c03c00", "*"),
}
_STYLE: Any = rc() | {"font.size": 10, "axes.labelsize": 10.5, "axes.titlesize": 10.5}


def _mine(points: Rows, figure: str) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Points by case and series."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for p in points:
        if p["figure"] == figure:
            found.setdefault(p["case"], {}).setdefault(p["series"], []).append((p["x"], p["y"]))
    return found


def write(folder: Path) -> None:
    """Write the figures of raw.csv and points.csv."""
    rows, points = read(folder / "raw.csv"), read(folder / "points.csv")
    if not (rows and points):
        return
    cases = list(dict.fromkeys(row["case"] for row in rows))
    (folder / "diversity.png").write_bytes(draw_diversity(points))
    (folder / "tunnel.png").write_bytes(draw_tunnel(points))
    (folder / "averaging.png").write_bytes(draw_averaging(rows, cases))


def draw_diversity(points: Rows) -> bytes:
    """Disagreement divided by the error rate, against accuracy; one panel per case."""
    cases = _mine(points, "diversity")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4 * len(cases) + 1.5, 3.8), layout="constrained")
        every = figure.subplots(1, len(cases), squeeze=False)[0]
        for axes, (case, series) in zip(every, cases.items(), strict=True):
            for name, (colour, marker) in SERIES.items():
                if name in series:
                    x, y = zip(*series[name], strict=True)
                    size, above = (11, 3) if name == "members" else (4, 2)
                    axes.plot(x, y, marker, color=colour, markersize=size, label=name, zorder=above)
            axes.set(title=case, xlabel="test accuracy", ylim=(0, 1.15))
            best = max(x for x, _ in series["members"])
            axes.set_xlim(best - 0.2, best + 0.03)
        every[0].set_ylabel("disagreement / error rate")
        figure.legend(*every[0].get_legend_handles_labels(), loc="outside right upper")
        return png(figure, 100)


def draw_tunnel(points: Rows) -> bytes:
    """Loss above, labels and accuracy below, along the tunnel; one column per case."""
    cases = _mine(points, "tunnel")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(max(4 * len(cases), 7), 5.4), layout="constrained")
        grid = figure.subplots(2, len(cases), sharex=True, squeeze=False)
        for column, (case, series) in enumerate(cases.items()):
            above, below = grid[:, column]
            _losses(above, series)
            above.set_title(case)
            for name, colour in (
                ("labels unlike the first member", "#0078a8"),
                ("labels unlike the second member", "#d87800"),
                ("test accuracy", "#24783c"),
            ):
                below.plot(*zip(*series[name], strict=True), color=colour, label=name)
            below.set(xlabel="from the first member to the second", ylim=(0, 1))
        grid[0, 0].set_ylabel("training loss")
        grid[1, 0].set_ylabel("share of test images")
        handles = [axes.get_legend_handles_labels() for axes in grid[:, 0]]
        labels = [label for _, names in handles for label in names]
        figure.legend([h for found, _ in handles for h in found], labels, ncols=2,
                      loc="outside upper left")  # fmt: skip
        return png(figure, 100)


def _losses(axes: Any, series: dict[str, list[tuple[float, float]]]) -> None:
    used, other = series["loss, training images"], series["loss, other training images"]
    axes.plot(
        *zip(*used[::2], strict=True), "o", markersize=4, color="#c03c00", label="loss, enforced"
    )
    axes.plot(
        *zip(*used[1::2], strict=True),
        "x",
        markersize=4,
        color="#6c54cc",
        label="loss, found at midpoints",
    )
    axes.plot(
        *zip(*other, strict=True),
        color=COLOURS["ensemble"],
        label="loss, found on other training images",
    )
    axes.set_ylim(0, 1.6 * max(y for _, y in used + other))


def draw_averaging(rows: Rows, cases: list[str]) -> bytes:
    """NLL by corruption for one and five modes, with and without weight averages."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(max(3.6 * len(cases) + 1.5, 8), 5.8), layout="constrained")
        every = figure.subplots(1, len(cases), squeeze=False)[0]
        for axes, case in zip(every, cases, strict=True):
            mine = [r for r in rows if r["case"] == case and r["analysis"] == "averaging"]
            splits = list(dict.fromkeys(row["split"] for row in mine))
            for name, (colour, marker) in TREATED.items():
                means = [
                    mean_and_error([*values(mine, split=s, treatment=name, metric="nll").values()])[
                        0
                    ]
                    for s in splits
                ]
                axes.plot(means, range(len(splits)), marker, color=colour, markersize=6, label=name)
            axes.set(title=case, xlabel="NLL", ylim=(len(splits) - 0.5, -0.5))
            axes.set_yticks(range(len(splits)), [s.removesuffix("-3") for s in splits])
        figure.legend(*every[0].get_legend_handles_labels(), ncols=5, loc="outside upper left")
        return png(figure, 100)
