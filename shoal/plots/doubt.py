"""Does it know that it does not know? Uncertainty of the familiar and of the foreign."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shoal.plots.registry import plot
from shoal.plots.style import INK, blank, legend, look, looks, percent, tip
from shoal.prediction.calibration import AccuracyConfidence

__all__ = ["accuracy_confidence", "uncertainty"]

_DASHES = ("-", "--", ":", "-.")
_ENDS = {"entropy": "entropy (nats)", "stddev": "standard deviation (units of the target)"}


@plot("uncertainty", cite=("lakshminarayanan2017simple",))
def uncertainty(
    test: Tensor,
    ood: Mapping[str, Tensor],
    method: str = "",
    quantity: str = "entropy",
    title: str = "",
) -> Any:
    """Histogram of an uncertainty on test data and on data of other kinds.

    Args:
        test: one uncertainty an input.
        ood: the same for each set of foreign data.
        method: whose colour to use.
        quantity: "entropy", "stddev" or any words for the axis.
        title: written above.
    """
    figure, axes = blank()
    parts = {name: np.asarray(values, dtype=float) for name, values in ood.items()}
    known = np.asarray(test, dtype=float)
    top = max([1e-6, *(float(values.max()) for values in (known, *parts.values()) if values.size)])
    edges = np.linspace(0, top, 25)
    colour = look(method).colour
    how = {"fill": True, "color": colour, "alpha": 0.75, "label": "test"}
    tip(axes.stairs(_shares(known, edges), edges, **how), f"test: {known.mean():.3g} on average")
    for index, (name, values) in enumerate(parts.items()):
        dashes = _DASHES[index % len(_DASHES)]
        how = {"color": INK, "linestyle": dashes, "linewidth": 1.8, "label": name}
        drawn = axes.stairs(_shares(values, edges), edges, **how)
        tip(drawn, f"{name}: {values.mean():.3g} on average")
    percent(axes.yaxis)
    words = _ENDS.get(quantity, quantity)
    axes.set(xlabel=words, ylabel="share of the inputs", title=title, xlim=(0, top))
    legend(figure, axes)
    return figure


def _shares(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.histogram(values, edges)[0] / max(len(values), 1)


def _focus(shares: Sequence[float]) -> tuple[float, float]:
    """From a little below the lowest share to 100 %."""
    low = min((share for share in shares if not math.isnan(share)), default=0.0)
    low = max(0.0, low - 0.1 * (1 - low) - 0.005)
    return low, 1 + 0.03 * (1 - low)


@plot("accuracy-confidence", cite=("lakshminarayanan2017simple",))
def accuracy_confidence(curves: Mapping[str, AccuracyConfidence], title: str = "") -> Any:
    """Accuracy of the answers that are at least so sure, and how many answers those are.

    Args:
        curves: one for each method.
        title: written above.
    """
    figure, (above, below) = blank(2, 1.4, sharex=True, height_ratios=(3, 2))
    styles = looks(curves)
    for label, curve in curves.items():
        style = styles[label]
        how = {"color": style.colour, "linestyle": style.linestyle, "label": label}
        for axes, values in ((above, curve.accuracy), (below, curve.retained)):
            axes.plot(curve.threshold, values, **how)
        points = zip(*(values.tolist()[::4] for values in curve), strict=True)
        for threshold, right, kept in points:
            (spot,) = above.plot([threshold], [right], **style.spot)
            tip(spot, f"{label}: at least {threshold:.0%} sure, right {right:.1%}, kept {kept:.1%}")
    percent(above.yaxis)
    percent(below.yaxis)
    percent(below.xaxis)
    below.set(xlabel="confidence of at least", ylabel="answers kept", ylim=(0, 1.05))
    above.set(ylabel="accuracy", title=title)
    above.set_ylim(
        *_focus([value for curve in curves.values() for value in curve.accuracy.tolist()])
    )
    legend(figure, above)
    return figure
