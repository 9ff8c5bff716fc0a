"""Conformal prediction: sets of classes (LAC, APS, RAPS) and intervals of numbers.

Intervals are absolute, scaled, or conformalised quantiles (CQR).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.core.arguments import checked, not_negative, one_of, share, whole_or_zero
from shoal.core.errors import ConfigError
from shoal.prediction.decisions.binomial import class_probs, labelled, threshold_rank
from shoal.prediction.predictive import ArrayLike, Predictive, prediction

__all__ = [
    "ConformalIntervals",
    "ConformalSets",
    "class_scores",
    "conformal_intervals",
    "conformal_sets",
    "interval_parts",
]

SetScore = Literal["lac", "aps", "raps"]


@dataclass(frozen=True)
class ConformalSets:
    """A fitted rule for sets; call it with a prediction to get the sets [B, C].

    Attributes:
        threshold: classes with at most this score are in the set.
        level: probability that a set contains the true class.
        score: "lac", "aps" or "raps".
        validation_points: number of validation points.
        penalty: of RAPS, per rank below `free_ranks`.
        free_ranks: of RAPS, ranks without a penalty.
        randomised: whether the last class of a set is included at random.
        allow_empty: whether a set may be empty.
    """

    threshold: float
    level: float
    score: SetScore
    validation_points: int
    penalty: float = 0.0
    free_ranks: int = 0
    randomised: bool = False
    allow_empty: bool = False

    @property
    def guarantee(self) -> str:
        """What holds for new data, and on which condition."""
        return (
            f"A set contains the true class with probability {self.level:.4g} or more, if new data "
            f"are exchangeable with the {self.validation_points} validation points."
        )

    @checked(pred=prediction)
    def __call__(self, pred: Predictive, *, seed: int | None = None) -> Tensor:
        """Which classes are in the set of each data point [B, C].

        Args:
            pred: a new prediction.
            seed: fixes the random part of randomised sets.
        """
        _, probs = class_probs(pred)
        inside = self._scores(probs, seed) <= self.threshold
        if not self.allow_empty:
            inside = inside.scatter(-1, probs.argmax(-1, keepdim=True), True)
        return inside

    def _scores(self, probs: Tensor, seed: int | None) -> Tensor:
        return class_scores(probs, self.score, self.penalty, self.free_ranks, self.randomised, seed)


@checked(
    pred=prediction,
    level=share,
    score=one_of("lac", "aps", "raps"),
    penalty=not_negative,
    free_ranks=whole_or_zero,
)
def conformal_sets(
    pred: Predictive,
    y: ArrayLike,
    level: float = 0.9,
    *,
    score: SetScore = "aps",
    penalty: float = 0.01,
    free_ranks: int = 5,
    randomised: bool = False,
    allow_empty: bool = False,
    seed: int | None = None,
) -> ConformalSets:
    r"""Sets of classes that contain the true class with probability `level`.

    A set holds the classes whose score is at most q, the $\lceil (n+1)\, level \rceil$-th smallest
    score of the n validation labels. New data must be *exchangeable* with the validation data; then
    coverage is at least `level`, on average over validation data and new data. This needs
    $n \ge level / (1 - level)$ points, such as 9 for 0.9.

    Scores, with the classes sorted by probability and o the rank of class c:

    - "lac": $1 - p_c$. Smallest sets on average. Sadinle et al. (2019), arXiv 1609.00451.
    - "aps": $\sum_{r \le o} p_{(r)}$, large sets where the prediction is uncertain.
      Romano et al. (2020), arXiv 2006.02544.
    - "raps": "aps" plus $\lambda\, (o - k)_+$, smaller sets for many classes.
      Angelopoulos et al. (2021), arXiv 2009.14193.

    Args:
        pred: prediction of classes for validation data.
        y: the true labels [B].
        level: wished probability.
        score: "lac", "aps" or "raps".
        penalty: λ of "raps".
        free_ranks: k of "raps".
        randomised: subtract $U p_c$ with uniform U from "aps" and "raps" scores, as published.
            Sets are smaller, and depend on chance.
        allow_empty: keep sets empty where no class reaches the threshold. By default the most
            probable class is in every set.
        seed: fixes the random part.
    """
    used = (penalty, free_ranks) if score == "raps" else (0.0, 0)
    randomised = randomised and score != "lac"
    _, probs, labels = labelled(pred, y)
    each = class_scores(probs, score, *used, randomised, seed).gather(1, labels.unsqueeze(1))
    rank = threshold_rank(n := len(labels), level)
    threshold = float(each.flatten().kthvalue(rank).values)
    return ConformalSets(threshold, level, score, n, *used, randomised, allow_empty)


def class_scores(
    probs: Tensor,
    score: str,
    penalty: float = 0.0,
    free: int = 0,
    randomised: bool = False,
    seed: int | None = None,
) -> Tensor:
    """The score of every class [B, C]; small for probable classes."""
    if score == "lac":
        return 1 - probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device)
    each = ordered.cumsum(-1) + penalty * (ranks - free).clamp_min(0)
    if randomised:
        each = each - _uniform(len(probs), seed).to(probs).unsqueeze(1) * ordered
    return torch.empty_like(each).scatter(-1, order, each)


def _uniform(n: int, seed: int | None) -> Tensor:
    random = torch.Generator()
    random.seed() if seed is None else random.manual_seed(seed)
    return torch.rand(n, generator=random, dtype=torch.float64)


IntervalScore = Literal["cqr", "scaled", "absolute"]


@dataclass(frozen=True)
class ConformalIntervals:
    """A fitted rule for intervals; call it with a prediction to get both ends.

    Each end has the shape of the targets: [B] or [B, K].

    Attributes:
        margin: q of every target column.
        level: probability that an interval contains the target, in each column.
        score: "cqr", "scaled" or "absolute".
        validation_points: number of validation points.
    """

    margin: tuple[float, ...]
    level: float
    score: IntervalScore
    validation_points: int

    @property
    def guarantee(self) -> str:
        """What holds for new data, and on which condition."""
        column = " of a column" if len(self.margin) > 1 else ""
        return (
            f"An interval{column} contains the target with probability {self.level:.4g} or more, "
            f"if new data are exchangeable with the {self.validation_points} validation points."
        )

    @checked(pred=prediction)
    def __call__(self, pred: Predictive) -> tuple[Tensor, Tensor]:
        """Low and high ends of the interval of each data point, in the units of the targets."""
        points = pred.points()[0]
        low, high, unit = interval_parts(points, self.score, self.level)
        margin = torch.tensor(self.margin, dtype=torch.float64, device=low.device) * unit
        low, high = low - margin, high + margin
        if points.likelihood.discrete:
            low, high = low.ceil(), high.floor()
        shape = *pred.members.shape[1:-1], -1
        return pred.as_targets(low.reshape(shape)), pred.as_targets(high.reshape(shape))


@checked(pred=prediction, level=share, score=one_of("cqr", "scaled", "absolute"))
def conformal_intervals(
    pred: Predictive, y: ArrayLike, level: float = 0.9, *, score: IntervalScore = "cqr"
) -> ConformalIntervals:
    r"""Intervals that contain the target with probability `level`, in every target column.

    The margin q is the $\lceil (n+1)\, level \rceil$-th smallest score of the n validation targets.
    New data must be *exchangeable* with the validation data; then coverage is at least `level`, on
    average over validation data and new data. This needs $n \ge level / (1 - level)$ points.

    - "cqr": quantiles of the prediction at (1 ∓ level)/2, both moved by q; score
      $\max(lo - y, y - hi)$. A margin below 0 narrows. Romano et al. (2019), arXiv 1905.03222.
    - "scaled": $\mu \mp q \sigma$, score $|y - \mu| / \sigma$. Lei et al. (2018), arXiv 1604.04173.
    - "absolute": $\mu \mp q$, score $|y - \mu|$: intervals of one width.

    Args:
        pred: prediction of numbers for validation data.
        y: the targets [B] or [B, K].
        level: wished probability.
        score: "cqr", "scaled" or "absolute".
    """
    points, targets = pred.points(y)
    low, high, unit = interval_parts(points, score, level)
    targets = points.check(targets).double()
    each = torch.maximum(low - targets, targets - high) / unit
    rank = threshold_rank(n := len(each), level)
    thresholds = each.kthvalue(rank, dim=0).values.tolist()
    return ConformalIntervals(tuple(thresholds), level, score, n)


def interval_parts(pred: Predictive, score: str, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """Both ends before the margin, and the unit of the margin, for every target."""
    if "numbers" not in pred.likelihood.about.kinds:
        raise ConfigError(f"{pred.task} has no intervals; use conformal_sets")
    if score == "cqr":
        low, high = pred.interval(level)
        low, high = low.double(), high.double()
        return low, high, torch.ones_like(low)
    mean = pred.mean.double()
    return mean, mean, pred.stddev.double() if score == "scaled" else torch.ones_like(mean)
