"""A prediction in a notebook: the mean of its uncertainties, and a small figure.

At most 500 data points are looked at, so that a notebook never waits.
"""

import math
from typing import Any

import torch
from torch import Tensor

from shoal.core.display.notebook import Curve, bars_svg, curves_svg
from shoal.core.display.text import number, percent

__all__ = ["summary"]

POINTS, NUMBERS = 500, 4_000_000
"""Most data points, and most outputs of all members together."""

BINS = 10


def summary(pred: Any) -> tuple[dict[str, str], str]:
    """Facts about a `Predictive`, and its figure as SVG; an empty text if it has none."""
    kinds = pred.likelihood.about.kinds
    if "classes" not in kinds and "numbers" not in kinds:
        return {}, ""
    some = _some(pred)
    told = "" if len(some) == _points(pred) else f" (of {len(some)} points)"
    facts, figure = _of_classes(some) if "classes" in kinds else _of_numbers(some)
    return {f"{name}{told}": fact for name, fact in facts.items()}, figure


def _points(pred: Any) -> int:
    """Number of data points, each site of a data point counted."""
    return math.prod(pred.members.shape[1:-1])


def _some(pred: Any) -> Any:
    """The prediction for evenly spaced data points, every site a data point."""
    each = max(pred.members[:, :1].numel(), 1)
    count = max(1, min(len(pred), POINTS, NUMBERS // each))
    chosen = torch.linspace(0, len(pred) - 1, count).round().long()
    some, _ = pred[chosen].points()
    if len(some) > POINTS:
        some = some[torch.linspace(0, len(some) - 1, POINTS).round().long()]
    return some


def _of_classes(pred: Any) -> tuple[dict[str, str], str]:
    """Mean confidence and entropy; how many data points have which confidence."""
    confidence = pred.confidence().flatten().double()
    entropy, epistemic = pred.entropy().mean(), pred.mutual_information().mean()
    facts = {"mean confidence": percent(float(confidence.mean()))}
    facts["mean predictive entropy"] = _parted(float(entropy), float(epistemic))
    found = confidence[confidence.isfinite()]
    if found.numel() == 0:
        return facts, ""
    shares = torch.histc(found, BINS, 0, 1) / found.numel()
    return facts, bars_svg(shares.tolist(), "confidence", (0, 1), "share of points")


def _parted(entropy: float, epistemic: float) -> str:
    share = percent(epistemic / entropy) if entropy > 0 and math.isfinite(epistemic) else "0 %"
    return f"{number(entropy)} nats, {share} epistemic"


def _of_numbers(pred: Any) -> tuple[dict[str, str], str]:
    """Mean standard deviations, and the predictions in order with both uncertainties."""
    mean, deviation = pred.mean, pred.stddev
    spread = (deviation.square() - pred.average(pred.likelihood.variance(pred.members))).clamp(0)
    among = spread.sqrt()
    facts = {
        "mean standard deviation": number(float(deviation.mean())),
        "its epistemic part": number(float(among.mean())),
    }
    first = mean[:, 0].double()
    if not first.isfinite().any():
        return facts, ""
    order = first.argsort()
    middle, total, own = (t[order, 0].double() for t in (mean, deviation, among))
    curves = {
        "": _banded(middle, 2 * total),
        "mean, ± 2 standard deviations (darker: epistemic)": _banded(middle, 2 * own),
    }
    column = "" if mean.shape[-1] == 1 else " of the first column"
    ends = (1, len(middle))
    return facts, curves_svg(curves, "points, by prediction", ends, f"prediction{column}")


def _banded(middle: Tensor, reach: Tensor) -> Curve:
    low, high = (middle - reach).tolist(), (middle + reach).tolist()
    return Curve(middle.tolist(), low=low, high=high)
