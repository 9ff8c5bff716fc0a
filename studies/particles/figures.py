"""Figures of the study: convergence, Laplace beside RBF, and the toys."""

import math
from itertools import product
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from shoal.plots.figure import COLOURS, INK, png, power, rc
from studies.particles.comparison import Pair, Rows, interval
from studies.particles.summary import SIZES, fidelity_pairs, hot_pairs, kernel_pairs, planned

LINES = {
    "exact draws": (INK, "--", "x", "exact draws"),
    "kde+rbf": (COLOURS["kde"], "-", "o", "KDE, RBF"),
    "kde+laplace": (COLOURS["f-kde"], "-", "s", "KDE, Laplace"),
    "kde+imq": (COLOURS["ssge"], "-", "D", "KDE, IMQ"),
    "svgd+rbf": (COLOURS["svgd"], "-", "^", "SVGD, RBF"),
    "kde:calibrated": (COLOURS["sge"], "-", "P", "KDE, calibrated"),
}


def _settings() -> Any:
    return rc() | {"font.size": 10, "axes.labelsize": 10.5, "axes.titlesize": 10.5}


def _finite(half: float) -> float:
    """Half a width to draw; one seed has none."""
    return 0.0 if math.isnan(half) else half


def convergence(rows: Rows) -> bytes:
    """MMD against the number of particles."""
    with matplotlib.rc_context(_settings()):
        figure = Figure(figsize=(9.5, 6.2), layout="constrained")
        grid = figure.subplots(2, 3, sharex=True, sharey="row")
        for (i, name), (j, d) in product(
            enumerate(("gaussian", "mixture")), enumerate((2, 10, 50))
        ):
            axes = grid[i, j]
            for method, (colour, dash, marker, label) in LINES.items():
                cases = [("convergence", f"{name}-{d}", method, size) for size in SIZES]
                found = [rows[case, "mmd"] for case in cases if rows.get((case, "mmd"))]
                if len(found) == len(cases):
                    ends = [interval([*row.values()]) for row in found]
                    axes.errorbar(
                        SIZES, [m for m, _ in ends], yerr=[_finite(h) for _, h in ends],
                        color=colour, linestyle=dash, marker=marker, label=label, markersize=5,
                        linewidth=1.6, capsize=2,
                    )  # fmt: skip
            axes.set(xscale="log", yscale="log", title=f"{name}, {d} dimensions")
            axes.set_xticks(SIZES, [str(size) for size in SIZES])
            axes.minorticks_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("MMD to exact samples")
            axes.set_ylim(bottom=0.01)  # an interval of three seeds may end below 0
            power(axes.yaxis)
        for axes in grid[-1]:
            axes.set_xlabel("particles M")
        handles = grid[0, 0].get_legend_handles_labels()
        figure.legend(*handles, ncols=3, loc="outside upper left")
        return png(figure, 100)


def laplace(rows: Rows) -> bytes:
    """Relative difference Laplace − RBF of the distance or NLL of every comparison."""
    wanted = [(p, "mmd") for p in kernel_pairs()] + [(p, "frechet") for p in fidelity_pairs()]
    wanted += [(p, "nll") for p in hot_pairs()]
    found = []
    for pair, metric in wanted:
        if not any(word.startswith("laplace") for word in pair.words):
            continue
        a, b = (rows.get((case, metric), {}) for case in (pair.case, pair.other))
        if common := sorted(a.keys() & b.keys()):
            found.append((_words(pair, metric), [100 * (a[s] / b[s] - 1) for s in common]))
    with matplotlib.rc_context(_settings()):
        figure = Figure(figsize=(8, 1.0 + 0.26 * len(found)), layout="constrained")
        axes = figure.subplots()
        for i, (_, values) in enumerate(found):
            mean, half = interval(values)
            half = _finite(half)
            colour = COLOURS["ensemble"]
            if abs(mean) > half:
                colour = COLOURS["kde"] if mean < 0 else COLOURS["forde"]
            axes.errorbar(mean, i, xerr=half, color=colour, marker="o", capsize=3, markersize=5)
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(found)), [words for words, _ in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks(
            [-100, -10, -1, 0, 1, 10, 100], ["−100", "−10", "−1", "0", "1", "10", "100"]
        )
        axes.set_xlabel("Laplace against RBF: change in %, lower is better")
        return png(figure, 100)


def _words(pair: Pair, metric: str) -> str:
    names = {"mmd": "MMD", "frechet": "Fréchet", "nll": "NLL"}
    *first, last = pair.words
    width = last.partition(" − ")[0].removeprefix("laplace").strip(", ")
    size = [f"M = {w}" if w.isdigit() else w for w in first]
    return ", ".join([names[metric], *size, *([width] if width else [])])


def toys(rows: Rows) -> bytes:
    """Coverage and NLL of the regression toy, on and off the data."""
    methods = planned("toys", "regression")
    panels = (("coverage", "share of targets in the 95 % interval"), ("nll", "NLL (nats)"))
    with matplotlib.rc_context(_settings()):
        figure = Figure(figsize=(9.5, 1.3 + 0.34 * len(methods)), layout="constrained")
        for axes, (metric, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            for place, colour, marker in (
                ("on", COLOURS["kde"], "o"),
                ("off", COLOURS["f-kde"], "D"),
            ):
                for i, method in enumerate(methods):
                    row = rows.get((("toys", "regression", method, 20), f"{metric}_{place}"))
                    if row:
                        mean, half = interval([*row.values()])
                        axes.errorbar(
                            mean, i, xerr=_finite(half), color=colour,
                            marker=marker, capsize=3, linestyle="none",
                            label=f"{place} the data" if i == 0 else None,
                        )  # fmt: skip
            axes.set(xlabel=title, ylim=(len(methods) - 0.5, -0.5))
            if metric == "coverage":
                axes.axvline(0.95, color=INK, linewidth=0.8, linestyle="--")
                axes.set_yticks(range(len(methods)), methods)
                axes.set_xlim(0, 1.02)
            else:
                axes.set_xscale("symlog", linthresh=1)
                places = [0, 1, 10, 100, 1000]
                axes.set_xticks(places, [str(place) for place in places])
                axes.set_xlim(-0.5, 1.3 * axes.dataLim.x1)
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), ncols=2, loc="outside upper left"
        )
        return png(figure, 100)


FIGURES = {"convergence": convergence, "laplace": laplace, "toys": toys}
