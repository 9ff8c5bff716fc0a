"""Uncertainty on test and OOD data, and accuracy above each confidence."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shoal.plots.figure import INK, blank, legend, look, method_styles, percent, plot, tip
from shoal.prediction.metrics.calibration import AccuracyConfidence

__all__ = ["accuracy_confidence", "uncertainty", "uncertainty_by_size"]

_DASHES = ("-", "--", ":", "-.")
_ENDS = {
    "entropy": "predictive entropy (nats)",
    "stddev": "standard deviation (units of the target)",
}


@plot("uncertainty", cite=("lakshminarayanan2017simple",))
def uncertainty(
    test: Tensor,
    ood: Mapping[str, Tensor],
    method: str = "",
    quantity: str = "entropy",
    title: str = "",
) -> Any:
    """Histograms of an uncertainty on the test set and on OOD sets.

    Args:
        test: uncertainty of each test input.
        ood: uncertainty of each input, by OOD set.
        method: method that gives the colour.
        quantity: "entropy", "stddev" or any label of the axis.
        title: written above.
    """
    figure, axes = blank()
    top = _top([test, *ood.values()])
    _histogram(axes, test, ood, top, method)
    axes.set(xlabel=_ENDS.get(quantity, quantity), ylabel="share of inputs", title=title)
    legend(figure, axes)
    return figure


@plot("uncertainty-by-size", cite=("lakshminarayanan2017simple",))
def uncertainty_by_size(
    panels: Mapping[int, tuple[Tensor, Mapping[str, Tensor]]],
    method: str = "",
    quantity: str = "entropy",
    title: str = "",
) -> Any:
    """Histograms of an uncertainty for several ensemble sizes of one method.

    Args:
        panels: by ensemble size, the uncertainty on the test set and on each OOD set.
        method: method that gives the colour.
        quantity: "entropy", "stddev" or any label of the axis.
        title: written above.
    """
    rows = len(panels)
    figure, grid = blank(rows, 0.3 + 0.42 * rows, sharex=True, squeeze=False)
    top = _top([values for test, ood in panels.values() for values in (test, *ood.values())])
    for axes, (members, (test, ood)) in zip(grid[:, 0], panels.items(), strict=True):
        _histogram(axes, test, ood, top, method)
        axes.set(ylabel=f"{members} member{'s' if members > 1 else ''}")
        axes.yaxis.get_major_locator().set_params(nbins=3)
    grid[0, 0].set(title=title)
    grid[-1, 0].set(xlabel=_ENDS.get(quantity, quantity))
    legend(figure, grid[0, 0])
    return figure


def _top(splits: Sequence[Tensor]) -> float:
    return max([1e-6, *(float(values.max()) for values in splits if len(values))])


def _histogram(axes: Any, test: Tensor, ood: Mapping[str, Tensor], top: float, method: str) -> None:
    """Shares of the inputs: the test set filled, each OOD set as an outline."""
    edges, known = np.linspace(0, top, 25), np.asarray(test, dtype=float)
    how = {"fill": True, "color": look(method).colour, "alpha": 0.75, "label": "test set"}
    tip(axes.stairs(_shares(known, edges), edges, **how), f"test set: mean {known.mean():.3g}")
    for index, (name, sample) in enumerate(ood.items()):
        values = np.asarray(sample, dtype=float)
        dashes = _DASHES[index % len(_DASHES)]
        how = {"color": INK, "linestyle": dashes, "linewidth": 1.8, "label": name}
        drawn = axes.stairs(_shares(values, edges), edges, **how)
        tip(drawn, f"{name}: mean {values.mean():.3g}")
    percent(axes.yaxis)
    axes.set_xlim(0, top)


def _shares(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.histogram(values, edges)[0] / max(len(values), 1)


def _focus(shares: Sequence[float]) -> tuple[float, float]:
    """Axis limits from a little below the lowest share to 100 %."""
    low = min((share for share in shares if not math.isnan(share)), default=0.0)
    low = max(0.0, low - 0.1 * (1 - low) - 0.005)
    return low, 1 + 0.03 * (1 - low)


@plot("accuracy-confidence", cite=("lakshminarayanan2017simple",))
def accuracy_confidence(curves: Mapping[str, AccuracyConfidence], title: str = "") -> Any:
    """Accuracy of predictions above each confidence, and their share.

    Args:
        curves: one per method.
        title: written above.
    """
    figure, (above, below) = blank(2, 1.4, sharex=True, height_ratios=(3, 2))
    styles = method_styles(curves)
    for label, curve in curves.items():
        style = styles[label]
        how = {"color": style.colour, "linestyle": style.linestyle, "label": label}
        for axes, values in ((above, curve.accuracy), (below, curve.retained)):
            axes.plot(curve.threshold, values, **how)
        points = zip(*(values.tolist()[::4] for values in curve), strict=True)
        for threshold, accuracy, kept in points:
            if kept == 0:
                continue
            (spot,) = above.plot([threshold], [accuracy], **style.spot)
            words = f"confidence ≥ {threshold:.0%}: accuracy {accuracy:.1%}, share {kept:.1%}"
            tip(spot, f"{label}, {words}")
    percent(above.yaxis)
    percent(below.yaxis)
    percent(below.xaxis)
    below.set(xlabel="confidence threshold", ylabel="share of inputs", ylim=(0, 1.05))
    above.set(ylabel="accuracy", title=title)
    above.set_ylim(
        *_focus([value for curve in curves.values() for value in curve.accuracy.tolist()])
    )
    legend(figure, above)
    return figure
