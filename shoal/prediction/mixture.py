"""Quantities of a mixture of members at some data points, and the blocks of a large prediction.

Every function takes a `Predictive` of some data points. Temporary tensors have the size of its
outputs, so a large prediction is worked on in blocks.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError, OutOfRange
from shoal.core.values import describe_value
from shoal.data.batches.arrays import as_tensor
from shoal.inference.posterior import as_points

__all__ = [
    "bisected",
    "bisected_quantile",
    "blocks",
    "checked_shares",
    "chosen_rows",
    "counted_points",
    "deviation",
    "drawn_targets",
    "mean_entropy",
    "mixture_cdf",
    "mixture_log_prob",
    "real_targets",
    "same_shares",
    "total_variance",
]

_HALVINGS = 80

_BLOCK = 1 << 22
"""Numbers of all members that are worked on at a time; smaller predictions are one block."""

_ON_GPU = 4
"""Times as many on a GPU, which smaller blocks would leave waiting."""


def blocks(pred: Any) -> Iterator[slice]:
    """The data points of a prediction, divided into blocks."""
    most = _BLOCK * (_ON_GPU if pred.members.is_cuda else 1)
    rows = max(most * len(pred) // pred.members.numel(), 1)
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
    weights = as_tensor(weights, "weights").to(members)
    fits = weights.shape == members.shape[:1] and bool((weights >= 0).all())
    if not fits or abs(float(weights.sum()) - 1) > 1e-4:
        raise DataError(
            f"weights must be {len(members)} numbers of at least 0 with sum 1, "
            f"not {describe_value(weights.tolist())}; divide them by their sum"
        )
    alike = bool((weights == weights[0]).all())
    return None if alike else weights / weights.sum()


def same_shares(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two predictions weigh their members alike."""
    return a is b if a is None or b is None else torch.equal(a, b)


_LEAST = 2.0**-54
"""Below the smallest positive number that `torch.rand` gives in double precision."""


def chosen_rows(index: Any, count: int) -> slice | Tensor:
    """An index of data points for a tensor: a slice, or numbers [n].

    >>> chosen_rows(-1, 5), chosen_rows([True, False, True], 3)
    (tensor([4]), tensor([0, 2]))
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(count)
        rows: Any = index if step > 0 else torch.arange(start, stop, step)
        length = len(range(start, stop, step))
    else:
        rows = _numbers(index, count)
        length = len(rows)
    if length == 0:
        raise DataError("the index chooses no data point; choose at least one")
    return rows


def _numbers(index: Any, count: int) -> Tensor:
    if isinstance(index, tuple):
        raise DataError(
            "a prediction has one index, for its data points; type pred.members for other axes"
        )
    try:
        rows = torch.as_tensor([operator.index(index)])
    except (OverflowError, ValueError):
        raise OutOfRange(f"there are {count} data points, numbered from 0") from None
    except TypeError:
        rows = as_tensor(index, "the index")
    if rows.ndim != 1 or rows.is_floating_point():
        came = describe_value(index)
        raise DataError(
            f"data points are chosen by a slice, by whole numbers or by a mask, not by {came}"
        )
    if rows.dtype == torch.bool:
        if len(rows) != count:
            raise OutOfRange(f"the mask has {len(rows)} entries for {count} data points")
        return rows.nonzero().squeeze(1)
    if bool(((rows < -count) | (rows >= count)).any()):
        raise OutOfRange(f"there are {count} data points, numbered from 0")
    return rows % count


def counted_points(pred: Any, y: Any) -> tuple[Tensor, Any]:
    """Outputs [M, N, C] and targets of all sites that count; the prediction's own if all do."""
    sites, targets = pred.members.ndim - 3, None if y is None else pred.check(y)
    counted = None if targets is None else pred.likelihood.counted(targets)
    if not sites and (counted is None or bool(counted.all())):
        return pred.members, targets
    if targets is None:
        members = pred.members.flatten(1, -2)
    else:
        members, targets = as_points(pred.likelihood, pred.members, targets)
    if members.shape[1] == 0:
        raise DataError("every target is ignored; give at least one that counts")
    return members, targets


def drawn_targets(pred: Any, n: int, seed: int | None, joint: bool) -> Tensor:
    """Targets [n, B, *S] of classes or [n, B, *S, K] of numbers; see `Predictive.sample`."""
    if "loss" in pred.likelihood.about.kinds:
        raise ConfigError("a custom loss has no distribution of targets, so none can be drawn")
    random = torch.Generator()
    random.seed() if seed is None else random.manual_seed(seed)
    shape = (n, 1) if joint else (n, len(pred))
    shares = torch.ones(pred.size) if pred.weights is None else pred.weights.cpu()
    member = torch.multinomial(shares.double(), shape[0] * shape[1], True, generator=random)
    member = member.view(shape).expand(n, len(pred)).to(pred.members.device)
    points = torch.arange(len(pred), device=pred.members.device)
    # one draw is one row, so that likelihoods see data points
    outputs = pred.members[member, points].flatten(0, 1)
    return _of_outputs(pred.likelihood, outputs, random).unflatten(0, (n, len(pred)))


def _of_outputs(likelihood: Any, outputs: Tensor, random: torch.Generator) -> Tensor:
    """One target of each row of outputs [R, *S, C]."""
    kinds = likelihood.about.kinds
    if "classes" in kinds:
        probs = likelihood.probs(outputs).double()
        # the number of cumulative probabilities below a uniform number
        level = _uniform(probs.shape[:-1], random).to(probs.device).unsqueeze(-1)
        edges = probs.cumsum(-1)[..., :-1]
        return (edges < level * probs.sum(-1, keepdim=True)).sum(-1)
    moments = likelihood.moments(outputs)
    mean, variance = (moment.double() for moment in moments)
    if "gaussian" in kinds:
        noise = torch.randn(mean.shape, generator=random, dtype=torch.float64)
        targets = mean + variance.sqrt() * noise.to(mean.device)
    else:
        level = _uniform(mean.shape, random).to(mean.device)
        targets = bisected(
            lambda y: likelihood.cdf(outputs, y),
            mean,
            variance.sqrt(),
            level,
            likelihood.discrete,
        )
    return targets.to(moments[0].dtype)


def _uniform(shape: torch.Size, random: torch.Generator) -> Tensor:
    """Uniform numbers in double precision, above 0 and below 1."""
    return torch.rand(shape, generator=random, dtype=torch.float64).clamp(min=_LEAST)


def real_targets(y: Any) -> Any:
    """Integers as floats: without classes, integers are not labels."""
    targets = as_tensor(y, "y")
    return targets if targets.is_floating_point() else targets.double()
