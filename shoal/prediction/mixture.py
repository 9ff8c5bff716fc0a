"""Quantities of a mixture of members at some data points, and the blocks of a large prediction.

Every function takes a `Predictive` of some data points. Temporary tensors have the size of its
outputs, so a large prediction is worked on in blocks.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "bisected_quantile",
    "blocks",
    "deviation",
    "mean_entropy",
    "mixture_cdf",
    "mixture_log_prob",
    "total_variance",
]

_HALVINGS = 80

_BLOCK = 1 << 24
"""Numbers of all members that are worked on at a time; smaller predictions are one block."""


def blocks(pred: Any) -> Iterator[slice]:
    """The data points of a prediction, divided into blocks."""
    rows = max(_BLOCK * len(pred) // pred.members.numel(), 1)
    for start in range(0, len(pred), rows):
        yield slice(start, min(start + rows, len(pred)))


def total_variance(pred: Any) -> Tensor:
    """The mean of the members' variances plus the variance of their means."""
    variance = pred.likelihood.variance(pred.members)
    return pred.average(variance + (pred.member_means - pred.mean).square())


def mixture_log_prob(pred: Any, y: Tensor) -> Tensor:
    """Log density of the targets under the mixture [B]."""
    return pred.likelihood.mixture_log_prob(pred.members, y, pred.weights)


def mixture_cdf(pred: Any, y: Tensor) -> Tensor:
    """P(Y <= y) of each column [B, K]."""
    return pred.average(pred.likelihood.cdf(pred.members, y))


def bisected_quantile(pred: Any, level: float) -> Tensor:
    """The quantile of each column, between bounds that Chebyshev's inequality gives."""
    whole = pred.likelihood.discrete
    # P(|Y - mean| >= r std) <= 1 / r²
    reach = pred.stddev.double() / math.sqrt(min(level, 1 - level) / 2) + whole
    low, high = pred.mean.double() - reach, pred.mean.double() + reach
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = mixture_cdf(pred, middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high.floor() if whole else high


def mean_entropy(pred: Any) -> Tensor:
    """Mean entropy of the members [B]."""

    def variance() -> Tensor:
        return pred.likelihood.variance(pred.members)

    return pred.average(pred.likelihood.entropy(pred.member_means, variance))


def deviation(pred: Any, share: float | None = None) -> Tensor:
    """Standard deviation over members, averaged over outputs; see `Predictive.disagreement`.

    Args:
        pred: the prediction.
        share: the sum of the squared weights, if it is known.
    """
    each = pred.member_means
    if share is None:
        share = 1 / pred.size if pred.weights is None else float(pred.weights.square().sum())
    if 1 - share < 1e-6:
        return torch.zeros_like(each[0, ..., 0])
    variance = pred.average((each - pred.average(each)).square()) / (1 - share)
    return variance.sqrt().mean(-1)
