"""Selective prediction: answer where the prediction is sure enough, or where it costs least."""

import math
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.arguments import checked, one_of, share
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.data.batches.arrays import as_tensor
from shoal.prediction.decisions.binomial import (
    beta_quantile,
    binomial_cdf,
    class_probs,
    labelled,
)
from shoal.prediction.predictive import ArrayLike, Predictive, prediction

__all__ = [
    "ABSTAIN",
    "GRID",
    "Choice",
    "RiskCoverage",
    "SelectiveRule",
    "cheapest",
    "risk_coverage",
    "selective",
]

GRID = 1 - 10 ** -(torch.arange(240, -1, -1, dtype=torch.float64) / 40)
"""Thresholds that are tested, from 0.999999 down to 0: fixed, so that data cannot choose them."""

_STARTS = 10
"""Places of the grid at which a sequence of tests begins."""

_SCORES = ("confidence", "entropy", "mutual_information")


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Error rate of the answered data points against their share, from the surest on.

    Attributes:
        threshold: smallest certainty that is answered [T], descending.
        coverage: share of data points that are answered [T].
        risk: error rate of the answered data points [T].
    """

    threshold: Tensor
    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """Area under the curve (AURC): mean risk over all coverages.

        Geifman et al. (2019), arXiv 1805.08206.
        """
        steps = torch.diff(self.coverage, prepend=self.coverage.new_zeros(1))
        return float((steps * self.risk).sum())


@checked(pred=prediction, score=one_of(*_SCORES))
def risk_coverage(pred: Predictive, y: ArrayLike, score: str = "confidence") -> RiskCoverage:
    """Error rate against the share of answered data points, at every threshold that changes it.

    Args:
        pred: a prediction of classes.
        y: the true labels [B].
        score: "confidence", "entropy" or "mutual_information", as in `selective`.
    """
    sure, wrong = _sure_and_wrong(pred, y, score)
    order = sure.argsort(descending=True, stable=True)
    sure, errors = sure[order], wrong[order].double().cumsum(0)
    # equal certainties are answered together
    last = torch.cat([sure[1:] != sure[:-1], torch.ones(1, dtype=torch.bool, device=sure.device)])
    count = torch.arange(1, len(sure) + 1, device=sure.device, dtype=torch.float64)[last]
    return RiskCoverage(sure[last], count / len(sure), errors[last] / count)


@dataclass(frozen=True)
class SelectiveRule:
    """A fitted rule; call it with a prediction to learn which data points to answer [B].

    Attributes:
        threshold: smallest certainty that is answered; infinite where no threshold passed.
        error: wished error rate of answers.
        confidence: probability with which the error rate holds.
        score: "confidence", "entropy" or "mutual_information".
        answered: share of the validation points that are answered.
        validation_error: their error rate; NaN if there are none.
        bound: upper Clopper-Pearson bound of the error rate at this threshold alone.
        validation_points: number of validation points.
    """

    threshold: float
    error: float
    confidence: float
    score: str
    answered: float
    validation_error: float
    bound: float
    validation_points: int

    @property
    def guarantee(self) -> str:
        """What holds for new data, and on which condition."""
        if math.isinf(self.threshold):
            return (
                f"No threshold is known to keep the error rate at {self.error:.4g}, so nothing is "
                f"answered; give more than {self.validation_points} validation points, or a larger "
                f"error rate."
            )
        return (
            f"The error rate of answers is at most {self.error:.4g} with confidence "
            f"{self.confidence:.4g}, if new data have the distribution of the "
            f"{self.validation_points} validation points."
        )

    @checked(pred=prediction)
    def __call__(self, pred: Predictive) -> Tensor:
        """Which data points are answered [B]."""
        points, probs = class_probs(pred)
        return _certainty(points, probs, self.score) >= self.threshold


@checked(pred=prediction, error=share, confidence=share, score=one_of(*_SCORES))
def selective(
    pred: Predictive,
    y: ArrayLike,
    error: float = 0.01,
    *,
    confidence: float = 0.95,
    score: str = "confidence",
) -> SelectiveRule:
    r"""The lowest threshold at which the error rate of answers is at most `error`, guaranteed.

    With probability `confidence` over the validation data, $P(wrong \mid answered) \le error$ for
    new data of the *same distribution*. For each threshold of a fixed grid the hypothesis "the
    error rate exceeds `error`" has the exact binomial p-value $P(Bin(n_t, error) \le k_t)$, from
    k wrong of n answered validation points (one-sided Clopper-Pearson). Thresholds are tested from
    the strictest on by the fallback procedure with ten starts, which keeps the family-wise error
    below 1 - confidence. This is Learn-then-Test (Angelopoulos et al. 2021, arXiv 2110.01052) for
    the question of Geifman & El-Yaniv (2017, arXiv 1705.08500); fallback: Wiens (2003), doi
    10.1002/pst.64.

    About ln(10 / (1 - confidence)) / error answered points without an error are needed, such as 530
    for 1 % at 95 %. A rule that answers nothing comes with a warning.

    Args:
        pred: prediction of classes for validation data.
        y: the true labels [B].
        error: wished error rate of the answers.
        confidence: probability that the error rate holds.
        score: certainty from 0 to 1. "confidence" is the largest probability. "entropy" is one
            minus predictive entropy / log C; "mutual_information" likewise.
    """
    sure, wrong = _sure_and_wrong(pred, y, score)
    kept = (sure >= GRID.to(sure).unsqueeze(1)).double()
    count, mistakes = kept.sum(1), kept @ wrong.double()
    p_values = torch.where(count > 0, binomial_cdf(mistakes, count, error), 1.0)
    passed = _fallback(p_values.tolist(), 1 - confidence)
    n = len(sure)
    if not passed:
        rule = SelectiveRule(math.inf, error, confidence, score, 0.0, math.nan, 1.0, n)
        warnings.warn(rule.guarantee, ShoalWarning, stacklevel=3)
        return rule
    best = max(passed)
    k, m = int(mistakes[best]), int(count[best])
    bound = beta_quantile(confidence, k + 1, m - k)
    return SelectiveRule(
        float(GRID[best]), error, confidence, score, m / n, k / m, bound, validation_points=n
    )


def _fallback(p_values: list[float], budget: float) -> list[int]:
    """Rejected hypotheses, tested in order; a rejection hands its budget on to the next one."""
    share, spread, passed = budget / _STARTS, len(p_values) / _STARTS, []
    level, started = 0.0, 0
    for i, p in enumerate(p_values):
        if i >= started * spread and started < _STARTS:
            level, started = level + share, started + 1
        if level and p <= level:
            passed.append(i)
        else:
            level = 0.0
    return passed


def _sure_and_wrong(pred: Predictive, y: ArrayLike, score: str) -> tuple[Tensor, Tensor]:
    points, probs, labels = labelled(pred, y)
    return _certainty(points, probs, score), points.labels() != labels


def _certainty(points: Predictive, probs: Tensor, score: str) -> Tensor:
    """Certainty of each data point [B], from 0 to 1."""
    if score == "confidence":
        return probs.amax(-1)
    uncertain = points.entropy() if score == "entropy" else points.mutual_information()
    return 1 - uncertain.double() / math.log(probs.shape[-1])


ABSTAIN = -1
"""The choice that leaves a data point to somebody else."""


class Choice(NamedTuple):
    """The chosen decision of each data point [B], -1 for abstention, and its expected cost [B]."""

    decision: Tensor
    cost: Tensor


@checked(pred=prediction)
def cheapest(pred: Predictive, costs: ArrayLike, abstain: float | None = None) -> Choice:
    r"""The decision with the least expected cost, $\arg\min_a \sum_c p_c\, \mathrm{cost}_{ca}$.

    With cost 1 for every error and abstention at cost d, a data point is answered where its
    confidence is at least 1 - d (Chow 1970, doi 10.1109/TIT.1970.1054406). Calibrate the
    probabilities first, for example by `temperature`: expected costs are as good as they are.

    Args:
        pred: a prediction of classes.
        costs: cost [C, A] of decision a where class c is true; the decisions may be the classes.
        abstain: cost of no decision; None if every data point needs one.

    >>> from shoal.inference.likelihoods import Categorical
    >>> pred = Predictive(torch.tensor([[[0.0, 0.0], [9.0, 0.0]]]), Categorical())
    >>> cheapest(pred, [[0, 1], [1, 0]], abstain=0.2).decision
    tensor([-1,  0])
    """
    _, probs = class_probs(pred)
    table = as_tensor(costs, "costs").to(probs)
    fits = table.ndim == 2 and len(table) == probs.shape[-1] and table.shape[1] > 0
    if not fits or not bool(table.isfinite().all()):
        raise ConfigError(
            f"costs must be finite numbers [classes, decisions] with {probs.shape[-1]} rows, "
            f"not {list(table.shape)}"
        )
    cost, decision = (probs @ table).min(-1)
    if abstain is not None:
        decision = torch.where(cost > abstain, ABSTAIN, decision)
        cost = cost.clamp_max(abstain)
    return Choice(decision, cost)
