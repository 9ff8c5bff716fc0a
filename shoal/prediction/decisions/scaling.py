"""Calibration by one number: a temperature of logits, or a factor of the noise of numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from shoal.core.arguments import checked, one_of, positive
from shoal.core.errors import ConfigError
from shoal.data.batches.arrays import as_tensor
from shoal.inference.likelihoods import (
    Categorical,
    HeteroscedasticGaussian,
    Likelihood,
    StudentT,
    WithDerivatives,
)
from shoal.prediction.decisions.binomial import class_probs
from shoal.prediction.metrics import point_weights
from shoal.prediction.metrics.metric import average, weighing
from shoal.prediction.predictive import ArrayLike, Predictive, prediction

__all__ = ["Temperature", "calibrated", "temperature"]

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


LEVEL = 0.9
"""Probability of the central interval by which the noise is calibrated."""

_HALVINGS = 22


Shape = Literal["trained", "auto"]

SHAPES = (10.0, 5.0, 3.0)
"""Degrees of freedom of Student's t that are compared with a Gaussian."""

_PER_POINT, _IN_ALL = 0.01, 3.0
"""Nats that another shape must gain: on average, and of all points together, a factor of 20.

A standard error is no use here: the outliers for which Student's t is made would inflate it.
"""


@checked(pred=prediction, apart=positive, shape=one_of("trained", "auto"))
def calibrated(
    pred: Predictive,
    y: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    apart: float = 1.0,
    shape: Shape = "trained",
) -> Likelihood:
    r"""The likelihood of a prediction, with the one number that fits held-out data best.

    Numbers: the factor of the noise's standard deviation, in each column, with which the central
    90 % interval holds 90 % of the targets (and at least $0.9 (n + 1)$ of n). This quantile of the
    errors has a bounded influence of each point: outliers that would multiply the factor of the
    smallest NLL count as one point outside. For Gaussian errors its variance is 1.6 times as large.

    Labels: the temperature of the logits, which minimises
    $n\, \mathrm{NLL}(T) + \frac12 (\log T)^2$. The second term, a standard normal prior, keeps T
    finite where all points are right.

    A mixture of m members says less of the ensemble of M than the ensemble itself: its members'
    variance is $(1 - 1/m) τ^2$ instead of $(1 - 1/M) τ^2$, and its mean is off by
    $(1/m - 1/M) τ^2$ more. Locations or logits that lie `apart` times as far from their mean, with
    $\mathrm{apart}^2 = (1 + 1/m - 2/M) / (1 - 1/m)$, make up for most of both.

    Args:
        pred: prediction for data that its members were not trained on.
        y: the targets [B] or [B, K]; or a pair (values, derivatives), of which each has a factor.
        weight: weight of each data point [B]; None if all count 1.
        apart: factor of the members' distances from their mean, while the number is found.
        shape: "auto" also chooses the shape of the noise per input: Gaussian, or Student's t with
            10, 5 or 3 degrees of freedom, each with its own factor. Student's t of the smallest NLL
            is taken if it gains 0.01 nats per point, and 3 nats of all points together.
    """
    likelihood = pred.likelihood.uncalibrated
    if isinstance(likelihood, WithDerivatives) and pred.takes_pair(y):
        counts = None if weight is None else as_tensor(weight, "weight").double()
        found = {
            "derivatives" if prefix else "values": calibrated(
                part, targets, shares, apart=apart, shape="trained" if prefix else shape
            )
            for prefix, part, targets, shares in pred.pair_parts(y, counts)
        }
        return likelihood.with_parts(**found)
    targets = pred.check(y)
    shares = None if weight is None else point_weights(pred, targets, weight)
    points, targets = replace(pred, likelihood=likelihood).points(targets)
    outputs = likelihood.moved_apart(points.members.double(), apart)
    points = replace(points, members=outputs)
    if shape == "auto":
        return _shaped(points, targets, shares)
    if not likelihood.about.has_classes:
        return likelihood.calibrated(_noise_factor(points, targets, shares))
    return _tempered(points, targets, shares)


def _shaped(pred: Predictive, y: Tensor, shares: Tensor | None) -> Likelihood:
    """The calibrated likelihood of the best shape; a Gaussian unless one is clearly better."""
    known = pred.likelihood
    if not isinstance(known, HeteroscedasticGaussian | StudentT):
        raise ConfigError(
            f'shape="auto" is for noise per input, not for {known}; '
            f"train with likelihood='heteroscedastic'"
        )
    kinds = [HeteroscedasticGaussian(damping=known.damping)]
    kinds += [StudentT(df, damping=known.damping) for df in SHAPES]
    found = []
    for kind in kinds:
        each = replace(pred, likelihood=kind.restored(known.state))
        fitted = each.likelihood.calibrated(_noise_factor(each, y, shares))
        found.append((fitted, replace(each, likelihood=fitted).log_prob(y).double()))
    (plain, before), *others = found
    with weighing(shares):
        best, after = max(others, key=lambda pair: average(pair[1]))
        gain = average(after - before)
    return best if gain > max(_PER_POINT, _IN_ALL / len(pred)) else plain


def _tempered(points: Predictive, targets: Tensor, shares: Tensor | None) -> Likelihood:
    """The likelihood of labels at the best temperature."""
    likelihood = points.likelihood
    n = len(points) if shares is None else float(shares.sum())

    def loss(log_t: float) -> float:
        tempered = likelihood.calibrated(torch.tensor(log_t, dtype=torch.float64).exp())
        with weighing(shares):
            nll = -average(replace(points, likelihood=tempered).log_prob(targets))
        return n * nll + 0.5 * log_t**2

    return likelihood.calibrated(torch.tensor(_minimum(loss), dtype=torch.float64).exp())


def _noise_factor(pred: Predictive, y: Tensor, weight: Tensor | None) -> Tensor:
    """The smallest factor of each column [K] whose central interval holds enough targets."""
    shares = torch.ones(len(pred), 1).double() if weight is None else weight.unsqueeze(-1)
    shares = (shares / shares.sum()).to(pred.members.device)
    # With n + 1 a multiple of 10 a share is as wanted, and rounding must not ask for one more.
    wanted = min(LEVEL * (1 + 1 / len(pred)), 1) - 1e-9
    columns = pred.mean.shape[-1]
    low = torch.full((columns,), _LOWEST).double()
    high = torch.full((columns,), _HIGHEST).double()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        scaled = replace(pred, likelihood=pred.likelihood.calibrated(middle.exp()))
        inside = (scaled.cdf(y) - 0.5).abs() <= LEVEL / 2
        enough = ((inside * shares).sum(0) >= wanted).cpu()
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high.exp()


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
