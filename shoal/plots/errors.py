"""Where predictions are wrong: confusion of classes, residuals and coverage over the prediction."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.plots.calibration import wilson
from shoal.plots.figure import INK, blank, legend, look, method_styles, percent, plot, tip

__all__ = ["PredictionBins", "confusion", "coverage_over_prediction", "residuals"]

_NUMBERED = 12
"""Classes up to which every cell of a confusion matrix has its number."""

_NAMED = 30
"""Classes up to which every row of a confusion matrix has its name."""

_DRAWN = 300
"""Points of a figure of residuals; its bins have all points."""

_Z = 1.6449
"""Standard deviations on each side of a 90 % interval of a Gaussian."""

_LETTERS = 14


@plot("confusion")
def confusion(counts: Tensor, names: Sequence[str], title: str = "") -> Any:
    """Confusion matrix: one row per true class, with the share of each predicted class.

    Args:
        counts: number of data points [C, C] by true class (row) and predicted class (column).
        names: names of the classes.
        title: written above.
    """
    values = np.asarray(counts, dtype=float)
    shares = values / np.maximum(values.sum(1, keepdims=True), 1)
    size = len(values)
    figure, axes = blank(height=1.2)
    image = axes.imshow(shares, vmin=0, vmax=1, aspect="auto", interpolation="none")
    if size <= _NUMBERED:
        for (i, j), value in np.ndenumerate(values):
            red, green, blue, _ = image.cmap(shares[i, j])
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            how = {"ha": "center", "va": "center", "fontsize": 11 if size <= 6 else 9.5}
            text = axes.text(j, i, f"{value:.0f}", color="white" if dark else "black", **how)
            tip(text, f"{names[i]} predicted as {names[j]}: {value:.0f} ({shares[i, j]:.1%})")
    shown = range(0, size, math.ceil(size / _NAMED))
    short = [name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…" for name in names]
    labels, small = [short[k] for k in shown], 10 if size <= _NUMBERED else 7.5
    slanted = {"rotation": 45, "ha": "right"} if max(map(len, labels)) > 3 else {}
    axes.set_xticks(list(shown), labels, fontsize=small, **slanted)
    axes.set_yticks(list(shown), labels, fontsize=small)
    axes.set(xlabel="predicted class", ylabel="true class", title=title)
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes, label="share of the true class")
    bar.outline.set_visible(False)
    percent(bar.ax.yaxis)
    return figure


class PredictionBins(NamedTuple):
    """Data points in bins of equal number, by their predicted mean.

    Attributes:
        edges: edges of the bins [n + 1].
        rows: for each bin, its data points.
    """

    edges: np.ndarray
    rows: list[np.ndarray]

    @classmethod
    def of(cls, mean: Tensor, most: int = 10, least: int = 20) -> "PredictionBins":
        """At most `most` bins, with at least `least` points each where there are so many."""
        values = np.asarray(mean, dtype=float)
        order = values.argsort(kind="stable")
        rows = np.array_split(order, max(1, min(most, len(order) // least)))
        cuts = [(values[a[-1]] + values[b[0]]) / 2 for a, b in zip(rows, rows[1:], strict=False)]
        return cls(np.array([values[order[0]], *cuts, values[order[-1]]]), rows)


@plot("residuals")
def residuals(mean: Tensor, y: Tensor, stddev: Tensor, method: str, title: str = "") -> Any:
    """Target minus prediction, against the prediction, with its mean in bins.

    The band has the width of the 90 % intervals: the mean standard deviation of each bin.

    Args:
        mean: predicted mean [B].
        y: targets [B].
        stddev: predicted standard deviation [B].
        method: method that gives the colour.
        title: written above.
    """
    mean, y, stddev = (torch.as_tensor(values).flatten().double() for values in (mean, y, stddev))
    residual, colour = (y - mean).numpy(), look(method).colour
    bins = PredictionBins.of(mean)
    figure, axes = blank(height=1.1)
    reach = [_Z * float(stddev[rows].mean()) for rows in bins.rows]
    for low, high, width in zip(bins.edges, bins.edges[1:], reach, strict=False):
        how = {"color": colour, "alpha": 0.22, "linewidth": 0}
        first = "90 % intervals" if low == bins.edges[0] else None
        axes.fill_between([low, high], [-width] * 2, [width] * 2, label=first, **how)
    step = -(-len(residual) // _DRAWN)
    axes.plot(mean[::step], residual[::step], "o", color=colour, markersize=2.5, alpha=0.55)
    axes.axhline(0, color=INK, linewidth=1, linestyle=":")
    for index, rows in enumerate(bins.rows):
        part, place = residual[rows], float(mean[rows].mean())
        error = 1.96 * part.std(ddof=1) / math.sqrt(len(part)) if len(part) > 1 else 0.0
        name = "mean, with its 95 % interval" if index == 0 else None
        axes.errorbar(place, part.mean(), yerr=error, fmt="none", color=INK, capsize=3)
        (spot,) = axes.plot([place], [part.mean()], "D", color=INK, markersize=5, label=name)
        tip(spot, f"prediction near {place:.3g}: mean residual {part.mean():.3g} ± {error:.2g}")
    axes.set(xlabel="prediction", ylabel="target − prediction", title=title)
    legend(figure, axes)
    return figure


@plot("coverage-over-prediction")
def coverage_over_prediction(
    curves: Mapping[str, tuple[Tensor, Tensor]], level: float = 0.9, title: str = ""
) -> Any:
    """Share of targets inside their central interval, against the prediction, in bins.

    A single curve has a 95 % interval per bin.

    Args:
        curves: for each method, the predicted mean [B] and the predictive distribution function at
            the targets [B], `metrics.pit`.
        level: level of the intervals.
        title: written above.
    """
    figure, axes = blank(height=1.1)
    axes.axhline(level, color=INK, linewidth=1, linestyle=":", label=f"level, {100 * level:g} %")
    styles = method_styles(curves)
    for label, (mean, pit) in curves.items():
        style, bins = styles[label], PredictionBins.of(mean)
        inside = 2 * np.abs(np.asarray(pit, dtype=float) - 0.5) <= level
        places = np.array([float(mean[rows].double().mean()) for rows in bins.rows])
        shares = np.array([inside[rows].mean() for rows in bins.rows])
        counts = np.array([len(rows) for rows in bins.rows])
        if len(curves) == 1:
            how = {"color": style.colour, "alpha": 0.45, "linewidth": 5}
            axes.vlines(places, *wilson(shares, counts), **how)
        axes.plot(places, shares, label=label, linestyle=style.linestyle, **style.spot)
        for place, share, count in zip(places, shares, counts, strict=True):
            (spot,) = axes.plot([place], [share], linestyle="", **style.spot)
            tip(spot, f"{label}, prediction near {place:.3g}: {share:.1%} of {count} inside")
    axes.set(xlabel="prediction", ylabel="targets inside", title=title)
    axes.set_ylim(top=1.02)
    percent(axes.yaxis)
    legend(figure, axes)
    return figure
