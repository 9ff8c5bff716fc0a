"""Quantities of a mixture of members at some data points, and the blocks of a large prediction.

Every function takes a `Predictive` of some data points. Temporary tensors have the size of its
outputs, so a large prediction is worked on in blocks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import DataError

__all__ = [
    "bisected",
    "bisected_quantile",
    "blocks",
    "checked_shares",
    "deviation",
    "mean_entropy",
    "mixture_cdf",
    "mixture_log_prob",
    "same_shares",
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
    """The quantile of each column."""
    moments = pred.mean.double(), pred.stddev.double()

    def cdf(y: Tensor) -> Tensor:
        return mixture_cdf(pred, y)

    whole = pred.likelihood.discrete
    return bisected(cdf, *moments, torch.tensor(level, dtype=torch.float64), whole)


def bisected(
    cdf: Callable[[Tensor], Tensor], mean: Tensor, stddev: Tensor, level: Tensor, whole: bool
) -> Tensor:
    """The smallest y with cdf(y) >= level, between bounds that Chebyshev's inequality gives."""
    # P(|Y - mean| >= r std) <= 1 / r²
    reach = stddev / (torch.minimum(level, 1 - level) / 2).sqrt().to(stddev.device) + whole
    low, high = mean - reach, mean + reach
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = cdf(middle) < level.to(middle.device)
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
    left = 1 - (_share(pred) if share is None else share)
    if left < 1e-6:
        return torch.zeros_like(each[0, ..., 0])
    variance = pred.average((each - pred.average(each)).square()) / left
    return variance.sqrt().mean(-1)


def _share(pred: Any) -> float:
    return 1 / pred.size if pred.weights is None else float(pred.weights.square().sum())


def checked_shares(weights: Tensor, members: Tensor) -> Tensor | None:
    """Weights of the members [M] with sum 1; None if they are equal."""
    weights = torch.as_tensor(weights).to(members)
    fits = weights.shape == members.shape[:1] and bool((weights >= 0).all())
    if not fits or abs(float(weights.sum()) - 1) > 1e-4:
        raise DataError(
            f"weights must be {len(members)} numbers of at least 0 with sum 1, "
            f"not {weights.tolist()}; divide them by their sum"
        )
    alike = bool((weights == weights[0]).all())
    return None if alike else weights / weights.sum()


def same_shares(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two predictions weigh their members alike."""
    return a is b if a is None or b is None else torch.equal(a, b)
