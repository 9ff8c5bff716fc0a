"""Does it happen as often as it says? Reliability of classes, coverage of intervals."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from shoal.plots.registry import plot
from shoal.plots.style import INK, Look, blank, legend, looks, percent, tip
from shoal.prediction.calibration import Reliability

__all__ = ["coverage", "reliability", "wilson"]

_FEW = 5


def wilson(right: np.ndarray, count: np.ndarray, z: float = 1.96) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of the 95 % interval of a fraction, which stays within 0 and 1.

    >>> [round(float(end), 3) for end in wilson(np.array(0.5), np.array(100))]
    [0.404, 0.596]
    """
    scale = 1 + z**2 / count
    centre = (right + z**2 / (2 * count)) / scale
    reach = z * np.sqrt(right * (1 - right) / count + z**2 / (4 * count**2)) / scale
    return np.clip(centre - reach, 0, 1), np.clip(centre + reach, 0, 1)


@plot("reliability", cite=("guo2017calibration",))
def reliability(curves: Mapping[str, Reliability], title: str = "") -> Any:
    """Accuracy against confidence in bins, with the share of the data in each bin below.

    A single curve has the 95 % interval of every bin; of several, bins with fewer than 5 inputs
    are left out.

    Args:
        curves: a reliability for each method.
        title: written above.
    """
    figure, (above, below) = blank(2, 1.4, sharex=True, height_ratios=(3.2, 1))
    above.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", label="perfect")
    styles = looks(curves)
    for label, curve in curves.items():
        _reliability(above, below, label, curve, styles[label], intervals=len(curves) == 1)
    above.set(ylabel="right", title=title, xlim=(-0.02, 1.03), ylim=(-0.02, 1.03))
    below.set(xlabel="confidence", ylabel="share")
    below.set_ylim(bottom=0)
    for axis in (above.yaxis, below.xaxis, below.yaxis):
        percent(axis)
    legend(figure, above)
    return figure


def _reliability(
    above: Any,
    below: Any,
    label: str,
    curve: Reliability,
    style: Look,
    intervals: bool,
) -> None:
    filled = curve.count >= (1 if intervals else _FEW)
    count, sure, right = (
        values[filled].numpy() for values in (curve.count, curve.confidence, curve.accuracy)
    )
    if intervals:
        low, high = wilson(right, count)
        above.vlines(sure, low, high, color=style.colour, alpha=0.45, linewidth=5)
    above.plot(sure, right, label=label, linewidth=1.5, linestyle=style.linestyle, **style.spot)
    for n, x, y in zip(count, sure, right, strict=True):
        (spot,) = above.plot([x], [y], linestyle="", **style.spot)
        tip(spot, f"{label}: says {x:.1%}, right {y:.1%} ({n:.0f} inputs)")
    share, edges = curve.count / curve.count.sum(), curve.edges.numpy()
    below.stairs(share.numpy(), edges, color=style.colour, fill=intervals, alpha=0.8)


@plot("coverage")
def coverage(curves: Mapping[str, Tensor], title: str = "") -> Any:
    """Share of targets inside central intervals, against the share that should be inside.

    Args:
        curves: for each method, the distribution function at the targets: `metrics.pit`, any shape.
        title: written above.
    """
    figure, axes = blank(height=1.1)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", label="perfect")
    levels = np.linspace(0, 1, 21)
    styles = looks(curves)
    for label, pit in curves.items():
        inside = 2 * np.abs(np.asarray(pit, dtype=float).ravel() - 0.5)
        found = (inside[:, None] <= levels).mean(0) if inside.size else np.full(21, math.nan)
        style = styles[label]
        axes.plot(levels, found, label=label, color=style.colour, linestyle=style.linestyle)
        for level, share in zip(levels[2::4], found[2::4], strict=True):
            (spot,) = axes.plot([level], [share], **style.spot)
            tip(spot, f"{label}: the {level:.0%} interval holds {share:.1%}")
    percent(axes.xaxis)
    percent(axes.yaxis)
    axes.set(xlabel="interval that should hold", ylabel="interval holds", title=title)
    legend(figure, axes)
    return figure
