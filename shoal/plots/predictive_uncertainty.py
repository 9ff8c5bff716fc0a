"""Does it know that it does not know? Uncertainty of the familiar and of the foreign."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shoal.plots.figure import plot
from shoal.plots.style import INK, blank, legend, look, looks, percent, tip
from shoal.prediction.calibration import AccuracyConfidence

__all__ = ["accuracy_confidence", "uncertainty", "uncertainty_by_size"]

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
    top = _top([test, *ood.values()])
    _histogram(axes, test, ood, top, method)
    axes.set(xlabel=_ENDS.get(quantity, quantity), ylabel="share of the inputs", title=title)
    legend(figure, axes)
    return figure


@plot("uncertainty-by-size", cite=("lakshminarayanan2017simple",))
def uncertainty_by_size(
    panels: Mapping[int, tuple[Tensor, Mapping[str, Tensor]]],
    method: str = "",
    quantity: str = "entropy",
    title: str = "",
) -> Any:
    """The same histograms for ensembles of one method and several sizes, one above the other.

    Args:
        panels: by the number of members, the uncertainty on test data and on each foreign set.
        method: whose colour to use.
        quantity: "entropy", "stddev" or any words for the axis.
        title: written above.
    """
    rows = len(panels)
    figure, found = blank(rows, 0.3 + 0.42 * rows, sharex=True, squeeze=False)
    top = _top([values for test, ood in panels.values() for values in (test, *ood.values())])
    for axes, (members, (test, ood)) in zip(found[:, 0], panels.items(), strict=True):
        _histogram(axes, test, ood, top, method)
        axes.set(ylabel=f"{members} member{'s' if members > 1 else ''}")
        axes.yaxis.get_major_locator().set_params(nbins=3)
    found[0, 0].set(title=title)
    found[-1, 0].set(xlabel=_ENDS.get(quantity, quantity))
    legend(figure, found[0, 0])
    return figure


def _top(parts: Sequence[Tensor]) -> float:
    return max([1e-6, *(float(values.max()) for values in parts if len(values))])


def _histogram(axes: Any, test: Tensor, ood: Mapping[str, Tensor], top: float, method: str) -> None:
    """Shares of the inputs: the test data filled, each foreign set as an outline."""
    edges, known = np.linspace(0, top, 25), np.asarray(test, dtype=float)
    how = {"fill": True, "color": look(method).colour, "alpha": 0.75, "label": "test"}
    tip(axes.stairs(_shares(known, edges), edges, **how), f"test: {known.mean():.3g} on average")
    for index, (name, foreign) in enumerate(ood.items()):
        values = np.asarray(foreign, dtype=float)
        dashes = _DASHES[index % len(_DASHES)]
        how = {"color": INK, "linestyle": dashes, "linewidth": 1.8, "label": name}
        drawn = axes.stairs(_shares(values, edges), edges, **how)
        tip(drawn, f"{name}: {values.mean():.3g} on average")
    percent(axes.yaxis)
    axes.set_xlim(0, top)


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
            if kept == 0:
                continue
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
