"""Exact binomial tests and intervals, which the guarantees of decisions rest on."""

import math

import torch
from torch import Tensor

from shoal.core.arguments import checked, share, whole, whole_or_zero
from shoal.core.errors import ConfigError, DataError
from shoal.inference.likelihoods.incomplete_beta import incomplete_beta
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = [
    "beta_quantile",
    "binomial_cdf",
    "class_probs",
    "clopper_pearson",
    "conformal_rank",
    "labelled",
    "threshold_rank",
]

_HALVINGS = 60


def binomial_cdf(k: Tensor, n: Tensor, p: float) -> Tensor:
    """P(K <= k) for K ~ Binomial(n, p), an incomplete beta function; 1 for k = n.

    >>> binomial_cdf(torch.tensor(1), torch.tensor(2), 0.5)
    tensor(0.7500, dtype=torch.float64)
    """
    k, n = torch.broadcast_tensors(k.double(), n.double())
    rest = (n - k).clamp_min(1)
    below = incomplete_beta(rest, k + 1, torch.tensor(1 - p, dtype=torch.float64))
    return torch.where(k >= n, 1.0, below)


def beta_quantile(p: float, a: float, b: float) -> float:
    """The number below which a Beta(a, b) variable lies with probability p, by bisection.

    >>> round(beta_quantile(0.5, 2, 1), 6)
    0.707107
    """
    if a <= 0:
        return 0.0
    if b <= 0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta_cdf(a, b, middle) < p else (low, middle)
    return (low + high) / 2


def _beta_cdf(a: float, b: float, x: float) -> float:
    """`incomplete_beta` of single numbers, many times as fast as with tensors."""
    if x * (a + b + 2) >= a + 1:
        return 1 - _beta_part(b, a, 1 - x)
    return _beta_part(a, b, x)


def _beta_part(a: float, b: float, x: float) -> float:
    """The continued fraction of DLMF 8.17.22 by the method of Lentz, for x below the mean."""
    if x <= 0:
        return 0.0
    logs = a * math.log(x) + b * math.log1p(-x)
    logs += math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    value = upper = 1.0
    lower, change, j = 0.0, 0.0, 0
    while abs(change - 1) > 1e-15 and j < 10_000:
        j += 1
        m = j // 2
        if j % 2:
            step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / (1 + step * lower)
        upper = 1 + step / upper
        change = lower * upper
        value *= change
    return math.exp(logs) / (a * value)


_MOST = 2**53


@checked(k=whole_or_zero, n=whole, confidence=share)
def clopper_pearson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of a probability from k successes in n trials.

    The ends are quantiles of Beta(k, n - k + 1) and Beta(k + 1, n - k).
    Clopper & Pearson (1934), doi 10.1093/biomet/26.4.404.

    >>> tuple(round(end, 4) for end in clopper_pearson(0, 10))
    (0.0, 0.3085)
    """
    if k > n:
        raise ConfigError(f"k successes in n trials need k <= n, not k={k} and n={n}")
    if n > _MOST:
        raise ConfigError(f"n must be at most 2**53, which floats still count, not {n}")
    tail = (1 - confidence) / 2
    return beta_quantile(tail, k, n - k + 1), beta_quantile(1 - tail, k + 1, n - k)


def conformal_rank(n: int, level: float) -> int:
    """The rank ⌈(n + 1) level⌉ of the calibration score that is the threshold; n + 1 is infinity.

    Vovk et al. (2005), doi 10.1007/b106715.

    >>> conformal_rank(99, 0.9), conformal_rank(5, 0.9)
    (90, 6)
    """
    return max(math.ceil((n + 1) * level - 1e-9), 1)


def threshold_rank(n: int, level: float, kind: str = "validation") -> int:
    r"""The rank of `conformal_rank`, which $n \ge \lceil level / (1 - level) \rceil$ points have.

    With fewer points the threshold would be infinite, and every set would hold everything.

    >>> threshold_rank(9, 0.9)
    9
    """
    if (rank := conformal_rank(n, level)) <= n:
        return rank
    needed = math.ceil(level / (1 - level) - 1e-9)
    raise DataError(
        f"level {level:g} needs {needed} {kind} points or more, not {n}; give more, or a "
        f"level of at most {n / (n + 1):.4g}"
    )


def class_probs(pred: Predictive) -> tuple[Predictive, Tensor]:
    """The prediction with every site as a data point, and its class probabilities [B, C]."""
    points = pred.points()[0]
    probs = points.probs.double()
    if probs.ndim != 2:
        raise ConfigError(
            "a decision needs one label per data point, but the prediction has several; "
            "take the columns one by one"
        )
    return points, probs


def labelled(pred: Predictive, y: ArrayLike) -> tuple[Predictive, Tensor, Tensor]:
    """Data points that count, their class probabilities [B, C] and labels [B]."""
    counted, targets = pred.points(y)
    points, probs = class_probs(counted)
    labels = points.likelihood.labels(points.check(targets))
    return points, probs, labels.to(probs.device)
