"""Metrics of predictions of numbers, in the units of the targets."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from shoal.core.arguments import checked, share
from shoal.data.dataset import Scaling
from shoal.prediction.metrics.metric import (
    INTERVALS,
    NUMBERS,
    RANKED,
    average,
    of_points,
    register,
)
from shoal.prediction.mixture import mixture_cdf
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = ["coverage", "crps", "in_units", "pit", "ranked_scores", "rmse", "sharpness"]

_GOLDEN = (math.sqrt(5) - 1) / 2


@register("rmse", NUMBERS, "lower")
def rmse(pred: Predictive, y: ArrayLike) -> float:
    """Root mean square error of the mean prediction, over inputs and columns."""
    return math.sqrt(average((pred.mean - pred.check(y)).square()))


@register("crps", RANKED, "lower")
def crps(pred: Predictive, y: ArrayLike) -> float:
    r"""Continuous ranked probability score $\int (F(t) - 1[t \ge y])^2 dt$, in units of y.

    $E|Y - y| - \frac12 E|Y - Y'|$ of two targets of the mixture; the mean over inputs and columns.
    In closed form for Gaussian and log-normal members, by an integral for others: with
    $A(\mu, \sigma^2) = 2 \sigma \varphi(\mu/\sigma) + \mu (2 \Phi(\mu/\sigma) - 1)$,
    $\sum_m w_m A(y - \mu_m, \sigma_m^2) - \frac12 \sum_{mn} w_m w_n
    A(\mu_m - \mu_n, \sigma_m^2 + \sigma_n^2)$ for Gaussians. More than 256 members take the
    integral, with a relative error below 1e-3.
    Grimit et al. (2006), doi 10.1256/qj.05.235.
    """
    return average(pred.by_blocks(ranked_scores, pred.check(y)))


def ranked_scores(pred: Predictive, y: Tensor) -> Tensor:
    """The score `crps` of every input and column [B, K]."""
    likelihood = pred.likelihood
    error = pred.average(likelihood.distance(pred.members, y))
    return error - 0.5 * likelihood.mixture_distance(pred.members, pred.weights)


@of_points
def pit(pred: Predictive, y: ArrayLike) -> Tensor:
    r"""Distribution function of the mixture at the targets [B, K]; uniform if calibrated.

    For counts the randomised transform $F(y - 1) + v_n (F(y) - F(y - 1))$, which is uniform, too.
    The $v_n$ are the fixed sequence n times the golden ratio, modulo 1.
    Czado et al. (2009), doi 10.1111/j.1541-0420.2009.01191.x.
    """
    low, high = _pit_bounds(pred, pred.check(y))
    if not pred.likelihood.discrete:
        return high
    places = torch.arange(high.numel(), device=high.device, dtype=high.dtype).view_as(high)
    return low + (places * _GOLDEN + 0.5).frac() * (high - low)


def _pit_bounds(pred: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """P(Y < y) and P(Y <= y) of the mixture; equal for continuous targets."""
    high = pred.by_blocks(mixture_cdf, y)
    return (pred.by_blocks(mixture_cdf, y - 1) if pred.likelihood.discrete else high), high


@of_points
@checked(level=share)
def coverage(pred: Predictive, y: ArrayLike, level: float = 0.9) -> float:
    """Share of targets inside the central interval of probability `level`.

    The interval lies between the quantiles (1 - level)/2 and (1 + level)/2 of the mixture itself,
    not of a fitted Gaussian. A count at an end of the interval counts in part: by the share of its
    probability that lies inside. So the coverage of calibrated counts is `level`.
    """
    low, high = _pit_bounds(pred, pred.check(y))
    if not pred.likelihood.discrete:
        return average((high - 0.5).abs() <= level / 2)
    inside = high.clamp_max(0.5 + level / 2) - low.clamp_min(0.5 - level / 2)
    mass = high - low
    # a count of no probability lies outside
    return average(torch.where(mass > 0, inside.clamp_min(0) / mass, 0.0))


@register("coverage_50", INTERVALS, "neither")
def coverage_50(pred: Predictive, y: ArrayLike) -> float:
    """Fraction of targets in the central 50 % interval; best near 0.5."""
    return coverage(pred, y, 0.5)


@register("coverage_90", INTERVALS, "neither")
def coverage_90(pred: Predictive, y: ArrayLike) -> float:
    """Fraction of targets in the central 90 % interval; best near 0.9."""
    return coverage(pred, y, 0.9)


@register("coverage_95", INTERVALS, "neither")
def coverage_95(pred: Predictive, y: ArrayLike) -> float:
    """Fraction of targets in the central 95 % interval; best near 0.95."""
    return coverage(pred, y, 0.95)


@register("sharpness", NUMBERS, "neither")
def sharpness(pred: Predictive, y: ArrayLike | None = None) -> float:
    """Mean standard deviation of the prediction; smaller is better only at equal coverage."""
    return average(pred.stddev)


def in_units(pred: Predictive, scaling: Scaling | None) -> Predictive:
    """The prediction in the original units of the targets; unchanged without a scaling.

    >>> import torch
    >>> from shoal.inference.likelihoods import Gaussian
    >>> pred = Predictive(torch.zeros(3, 1, 1), Gaussian(0.5))
    >>> original = in_units(pred, Scaling(mean=20.0, std=4.0))
    >>> original.mean, original.stddev
    (tensor([[20.]]), tensor([[2.]]))
    """
    if scaling is None:
        return pred
    return replace(pred, likelihood=pred.likelihood.in_units(scaling))
