"""Temperature scaling: one number that makes confidence equal accuracy on validation data."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from shoal.core.arguments import checked, one_of
from shoal.core.errors import ConfigError
from shoal.inference.likelihoods import Categorical
from shoal.prediction.decisions.binomial import class_probs
from shoal.prediction.predictive import ArrayLike, Predictive, prediction

__all__ = ["Temperature", "temperature"]

Where = Literal["members", "pooled"]

_LOWEST, _HIGHEST = math.log(1e-2), math.log(1e2)
_GRID = 33
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Temperature:
    """A fitted temperature; call it with a prediction to get the scaled prediction.

    Attributes:
        value: the temperature T; above 1 it lowers confidence.
        where: "members" or "pooled", as in `temperature`.
        nll: NLL of the scaled validation predictions, in nats.
        nll_before: NLL of the validation predictions before scaling.
    """

    value: float
    where: Where
    nll: float
    nll_before: float

    @checked(pred=prediction)
    def __call__(self, pred: Predictive) -> Predictive:
        """The prediction at this temperature."""
        return _scaled(_ready(pred, self.where), self.value)


@checked(pred=prediction, where=one_of("members", "pooled"))
def temperature(pred: Predictive, y: ArrayLike, where: Where = "members") -> Temperature:
    r"""Fit one temperature to validation data by the smallest NLL of the mixture.

    "members" divides the logits of every member before averaging,
    $p = \sum_m w_m\, \mathrm{softmax}(f_m / T)$, and keeps the epistemic uncertainty. "pooled"
    scales the mean prediction, $p \propto \bar p^{1/T}$: one member is left. Accuracy is unchanged
    by "pooled" and almost unchanged by "members".
    Guo et al. (2017), arXiv 1706.04599; Rahaman & Thiery (2021), arXiv 2007.08792.

    Args:
        pred: prediction of classes for validation data, not for training data.
        y: the true labels [B].
        where: what is scaled, "members" or "pooled".
    """
    pred, targets = pred.points(y)
    ready = _ready(pred, where)
    double = replace(ready, members=ready.members.double())
    labels = double.check(targets)

    def nll(log_t: float) -> float:
        return -float(_scaled(double, math.exp(log_t)).log_prob(labels).mean())

    best = _minimum(nll)
    return Temperature(math.exp(best), where, nll(best), nll(0.0))


def _ready(pred: Predictive, where: Where) -> Predictive:
    """A prediction whose outputs may be divided by a temperature."""
    kinds = pred.likelihood.about.kinds
    if "classes" not in kinds:
        raise ConfigError(
            f"a temperature scales class probabilities, but this is {pred.task}; "
            f"use conformal_intervals"
        )
    if where == "pooled":
        if "binary" in kinds:
            logits = pred.columns.mean.double().logit(eps=1e-300).unsqueeze(0)
            return replace(pred, members=logits.to(pred.members.dtype), weights=None)
        log_probs = class_probs(pred)[1].log().unsqueeze(0)
        return Predictive(log_probs.to(pred.members.dtype), Categorical())
    if "ordinal" in kinds:
        raise ConfigError('outputs of an ordinal likelihood are not logits; use where="pooled"')
    return pred


def _scaled(pred: Predictive, value: float) -> Predictive:
    return replace(pred, members=pred.members / value)


def _minimum(f: Callable[[float], float]) -> float:
    """The minimum of f over the log temperature: a grid, then golden sections."""
    places = [_LOWEST + (_HIGHEST - _LOWEST) * i / (_GRID - 1) for i in range(_GRID)]
    values = [f(place) for place in places]
    best = min(range(_GRID), key=values.__getitem__)
    low, high = places[max(best - 1, 0)], places[min(best + 1, _GRID - 1)]
    while high - low > 1e-7:
        width = _GOLDEN * (high - low)
        left, right = high - width, low + width
        low, high = (low, right) if f(left) < f(right) else (left, high)
    return (low + high) / 2
