"""Figures of the strengths on MNIST, and figures 2 to 4 of the published study in their form."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from shoal.data.files.raw import RAW
from shoal.plots.figure import COLOURS, INK, png, power, rc
from shoal.prediction.statistics import mean_and_error

__all__ = ["draw_all"]

METHODS = ("ensemble", "kde", "sge", "ssge", "svgd", "f-kde", "f-sge", "f-ssge", "f-svgd")
SIZES = (1, 5, 9, 13, 17)
SWEPT = ("kde", "f-kde", "svgd", "f-svgd")
STRENGTHS = (1, 100, 1000, 10_000, 100_000, 1_000_000)
LINES = {"kde": "o-", "f-kde": "s--", "svgd": "^-.", "f-svgd": "D:"}
SETS = {"letters": "letters", "clothes": "clothes", "characters": "Japanese characters"}


def _axes(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _of_seeds(runs: Any, method: str, members: int, metric: str) -> list[float]:
    found = [r for (m, s, _), r in runs.items() if (m, s) == (method, members)]
    return [row[metric] for row in found if not row["diverged"]]


def strengths(runs: Any) -> Any:
    """AUROC of the three OOD sets, and test NLL, against the strength."""
    panels = {f"auroc_entropy_{word}": f"AUROC, {title}" for word, title in SETS.items()}
    figure, found = _axes(1, 4, (12, 3.4))
    for axes, (metric, title) in zip(found[0], (panels | {"test_nll": "NLL"}).items(), strict=True):
        for method in SWEPT:
            names = [method if s == 1 else f"{method}:{s}" for s in STRENGTHS]
            values = [_of_seeds(runs, name, 17, metric) for name in names]
            points = [(s, *mean_and_error(v)) for s, v in zip(STRENGTHS, values, strict=True) if v]
            x, y, error = zip(*points, strict=True)
            how = {"color": COLOURS[method], "label": method, "capsize": 2, "markersize": 5}
            axes.errorbar(x, y, yerr=error, fmt=LINES[method], **how)
        plain = _of_seeds(runs, "ensemble", 17, metric)
        axes.axhline(sum(plain) / len(plain), color=INK, linewidth=1, label="plain ensemble")
        axes.set(xscale="log", xlabel="strength", title=title)
        axes.set_xticks([1, 100, 10_000, 1_000_000])
        power(axes.xaxis)
    found[0][3].set_ylim(0.05, 0.4)
    figure.legend(*found[0][0].get_legend_handles_labels(), ncols=5, loc="outside upper left")
    return figure


def entropies(runs: Any) -> Any:
    """Histograms of the predictive entropy on test digits and letters, by method and size."""
    figure, found = _axes(len(METHODS), len(SIZES), (10, 12), sharex=True, sharey=True)
    edges = np.linspace(0, math.log(10), 25)
    for i, method in enumerate(METHODS):
        for j, size in enumerate(SIZES):
            row = runs.get((method if size > 1 else "ensemble", size, 0))
            axes = found[i, j]
            if row is None:
                continue
            for name, how in (("test", {"fill": True, "alpha": 0.75, "color": COLOURS[method]}),
                              ("letters", {"color": INK, "linewidth": 1.2})):  # fmt: skip
                values = np.array(row[f"{name}_entropy"])
                axes.stairs(values / values.sum(), edges, label=name, **how)
            axes.set_ylim(0, 0.5)
            if i == 0:
                axes.set_title(f"{size} member{'s' if size > 1 else ''}")
            if j == 0:
                axes.set_ylabel(method)
    figure.supxlabel("predictive entropy (nats)")
    figure.supylabel("share of images; test digits reach beyond the axis")
    return figure


def confidences(runs: Any) -> Any:
    """Accuracy of predictions above each confidence, on test and on rotated digits."""
    figure, found = _axes(1, 2, (9, 3.8))
    thresholds = np.arange(10) / 10
    for axes, (name, title) in zip(
        found[0], {"test": "test digits", "turned": "rotated and flipped digits"}.items(),
        strict=True,
    ):  # fmt: skip
        for index, method in enumerate(METHODS):
            lists = _of_seeds(runs, method, 17, f"{name}_above")
            mean = np.nanmean(np.array(lists), 0)
            dashes = "-" if index < 5 else "--"
            axes.plot(thresholds, mean, dashes, color=COLOURS[method], label=method)
        axes.plot([0, 0.9], [0, 0.9], ":", color=INK, linewidth=1)
        axes.set(xlabel="confidence threshold", ylabel="accuracy above it", title=title)
    found[0][0].set_ylim(0.95, 1.001)
    found[0][1].set_ylim(0, 1)
    figure.legend(*found[0][1].get_legend_handles_labels(), ncols=5, loc="outside upper left")
    return figure


def disagreements(runs: Any) -> Any:
    """Images with the lowest and the highest disagreement, of the test set and of letters."""
    row = runs["kde", 17, 0]
    images = {"test": RAW["mnist"]("test")[0], "letters": RAW["notmnist"]("test")[0]}
    lines = [(name, kind) for name in images for kind in ("low", "high")]
    figure, found = _axes(len(lines), 8, (8, 4.4))
    for i, (name, kind) in enumerate(lines):
        for j, index in enumerate(row[f"{name}_{kind}"][:8]):
            axes = found[i, j]
            axes.imshow(images[name][int(index)].reshape(28, 28), cmap="gray_r")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if j == 0:
                word = "digits" if name == "test" else "letters"
                axes.set_ylabel(f"{word},\n{kind}", rotation=0, ha="right", va="center")
    return figure


def draw_all(runs: Any, folder: Path) -> None:
    """Write every figure as PNG."""
    drawn = {
        "strength": strengths,
        "entropy-by-size": entropies,
        "accuracy-by-confidence": confidences,
        "low-and-high-disagreement": disagreements,
    }
    settings: Any = rc() | {"font.size": 9, "axes.labelsize": 9, "axes.titlesize": 9.5}
    with matplotlib.rc_context(settings):
        for name, draw in drawn.items():
            (folder / f"{name}.png").write_bytes(png(draw(runs), 90))
