"""Conformal intervals of numbers: absolute, scaled, and conformalised quantiles (CQR)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.prediction.decisions.binomial import check_share, conformal_rank
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = ["ConformalIntervals", "conformal_intervals"]

Score = Literal["cqr", "scaled", "absolute"]


@dataclass(frozen=True)
class ConformalIntervals:
    """A fitted rule for intervals; call it with a prediction to get both ends, each [B, K].

    Attributes:
        margin: q of every target column; infinite with too few validation points.
        level: probability that an interval contains the target, in each column.
        score: "cqr", "scaled" or "absolute".
        validation_points: number of validation points.
    """

    margin: tuple[float, ...]
    level: float
    score: Score
    validation_points: int

    @property
    def guarantee(self) -> str:
        """What holds for new data, and on which condition."""
        column = " of a column" if len(self.margin) > 1 else ""
        return (
            f"An interval{column} contains the target with probability {self.level:.4g} or more, "
            f"if new data are exchangeable with the {self.validation_points} validation points."
        )

    def __call__(self, pred: Predictive) -> tuple[Tensor, Tensor]:
        """Low and high ends of the interval of each data point, in the units of the targets."""
        points = pred.points()[0]
        low, high, unit = _parts(points, self.score, self.level)
        margin = torch.tensor(self.margin, dtype=torch.float64, device=low.device) * unit
        low, high = low - margin, high + margin
        return (low.ceil(), high.floor()) if points.likelihood.discrete else (low, high)


def conformal_intervals(
    pred: Predictive, y: ArrayLike, level: float = 0.9, *, score: Score = "cqr"
) -> ConformalIntervals:
    r"""Intervals that contain the target with probability `level`, in every target column.

    The margin q is the $\lceil (n+1)\, level \rceil$-th smallest score of the n validation targets.
    New data must be *exchangeable* with the validation data; then coverage is at least `level`, on
    average over validation data and new data.

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
    check_share("level", level)
    if score not in ("cqr", "scaled", "absolute"):
        raise ConfigError(f'score must be "cqr", "scaled" or "absolute", not {score!r}')
    points, targets = pred.points(y)
    low, high, unit = _parts(points, score, level)
    targets = points.check(targets).double()
    each = torch.maximum(low - targets, targets - high) / unit
    rank = conformal_rank(n := len(each), level)
    found = [torch.inf] * each.shape[-1]
    if rank <= n:
        found = each.kthvalue(rank, dim=0).values.tolist()
    return ConformalIntervals(tuple(found), level, score, n)


def _parts(pred: Predictive, score: str, level: float) -> tuple[Tensor, Tensor, Tensor | float]:
    """Both ends before the margin, and the unit of the margin."""
    if "numbers" not in pred.likelihood.about.kinds:
        raise ConfigError(f"{pred.task} has no intervals; use conformal_sets")
    if score == "cqr":
        low, high = pred.interval(level)
        return low.double(), high.double(), 1.0
    mean = pred.mean.double()
    return mean, mean, pred.stddev.double() if score == "scaled" else 1.0
