r"""Cross-conformal prediction (CV+): intervals and sets from folds, without validation data.

Point n lies in fold k(n). Members that hold out fold k are a mixture, which never trained on its
points and gives them their scores $s_n$. For a new point x and a candidate y, the mixture of every
fold gives a score $s_k(x, y)$, and y is in the set if

$\#\{n : s_n < s_{k(n)}(x, y)\} < (1 - \alpha)(N + 1)$ with $\alpha = 1 - level$.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from shoal.core.arguments import checked, list_of, one_of, share, text
from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.arrays import as_tensor
from shoal.prediction.decisions.binomial import class_probs, labelled, threshold_rank
from shoal.prediction.decisions.conformal import IntervalScore, class_scores, interval_parts
from shoal.prediction.predictive import ArrayLike, Predictive, prediction

__all__ = [
    "CrossConformalIntervals",
    "CrossConformalSets",
    "FoldScores",
    "cross_conformal_intervals",
    "cross_conformal_sets",
]

_HALVINGS = 64

CrossSetScore = Literal["lac", "aps"]


@dataclass(frozen=True, eq=False)
class FoldScores:
    """Scores of the training points, sorted within each fold; no inputs and no targets.

    Attributes:
        sorted: scores [D, K, m] of D target columns, K folds and m points; smaller folds end with
            infinity.
        counts: how many points are before each place [D, K, m + 1].
        member_folds: number of the fold that each member holds out [M].
        points: number of training points N, repetitions counted.
        alike: whether all folds have the same number of points, each of them counted once.
        knew: what members had learned of the points that they hold out.
    """

    sorted: Tensor
    counts: Tensor
    member_folds: Tensor
    points: int
    alike: bool
    knew: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, each: Tensor, folds: Tensor, member_folds: Tensor, weight: Tensor, knew: Sequence[str]
    ) -> "FoldScores":
        """From the scores of all points [N, D], their folds and repetitions [N]."""
        known = folds.unique()
        rows = [(folds == fold).nonzero().flatten() for fold in known]
        ordered = [each[mine].sort(0) for mine in rows]
        repeated = [weight[mine][own.indices] for mine, own in zip(rows, ordered, strict=True)]
        scores = pad_sequence([own.values for own in ordered], padding_value=torch.inf)
        counts = pad(pad_sequence(repeated).permute(2, 1, 0).cumsum(-1), (1, 0))
        alike = len({len(mine) for mine in rows}) == 1 and bool((weight == 1).all())
        members = torch.searchsorted(known, member_folds)
        total = int(weight.sum())
        table = scores.permute(2, 1, 0).contiguous()
        return cls(table, counts, members, total, alike, tuple(knew))

    def mixtures(self, pred: Predictive) -> Iterator[Predictive]:
        """For each fold, the prediction of the members that hold it out."""
        held = self.member_folds.to(pred.members.device)
        for fold in range(self.sorted.shape[1]):
            yield replace(pred, members=pred.members[held == fold])

    def below(self, values: Tensor, equal: bool = False) -> Tensor:
        """How many points have a score below `values` [D, K, Q]; at most equal, if `equal`."""
        places = torch.searchsorted(self.sorted.to(values.device), values, right=equal)
        return self.counts.to(values.device).gather(-1, places).sum(1)

    def ranked(self, start: Tensor, unit: Tensor, rank: int) -> Tensor:
        r"""The rank-th smallest of all $start_{k(n)} + s_n\, unit_{k(n)}$, [D, K, Q] to [D, Q].

        Bisection finds it within rounding, since scores are sorted; the nearest of the numbers
        around is the number itself.
        """
        table = self.sorted.to(start.device)
        last = table.masked_fill(table.isinf(), -torch.inf).amax(-1, keepdim=True)
        low = (start + table[..., :1] * unit).amin(1)
        high = (start + last * unit).amax(1)
        for _ in range(_HALVINGS):
            middle = low / 2 + high / 2
            enough = self.below((middle.unsqueeze(1) - start) / unit, equal=True) >= rank
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        after = torch.searchsorted(table, (high.unsqueeze(1) - start) / unit)
        near = [(after + step).clamp(0, table.shape[-1] - 1) for step in (-1, 0)]
        numbers = torch.cat([start + table.gather(-1, place) * unit for place in near], 1)
        nearest = (numbers - high.unsqueeze(1)).abs().argmin(1, keepdim=True)
        return numbers.gather(1, nearest).squeeze(1)

    def check(self, pred: Predictive) -> None:
        """Refuse a prediction of other members."""
        if pred.size != len(self.member_folds):
            raise DataError(
                f"the rule knows the folds of {len(self.member_folds)} members, and the prediction "
                f"has {pred.size}; predict with all members of the run: shoal.predict(run, x)"
            )
        _check_members(pred)

    def guarantee(self, subject: str, level: float) -> str:
        """What holds for new data, and on which conditions."""
        least = self.probability(level)
        kept = f"with probability {least:.4g} or more" if least > 0 else "with no sure probability"
        sentence = (
            f"{subject} {kept}, and about {level:.4g} in practice, if new data are exchangeable "
            f"with the {self.points} training points and no member learned from the points that "
            f"it holds out."
        )
        if not self.knew:
            return sentence
        return f"{sentence} Here members did learn of them: {', '.join(self.knew)}."

    def probability(self, level: float) -> float:
        r"""$1 - 2\alpha - \min(2 (1 - 1/K) / (N/K + 1), (1 - K/N) / (K + 1))$, at least 0.

        The second number of the minimum needs folds of one size; the first does not, since a
        weighted mean of p-values is half of a p-value. Vovk & Wang (2020), arXiv 1212.4966.
        """
        folds, points = self.sorted.shape[1], self.points
        short = 2 * (1 - 1 / folds) / (points / folds + 1)
        if self.alike:
            short = min(short, (1 - folds / points) / (folds + 1))
        return max(1 - 2 * (1 - level) - short, 0.0)

    def rank(self, level: float) -> int:
        """The rank of the threshold among the scores of all points."""
        return threshold_rank(self.points, level, "training")


@dataclass(frozen=True, eq=False)
class CrossConformalIntervals:
    """A fitted rule for intervals; call it with a prediction of all members to get both ends.

    Each end has the shape of the targets: [B] or [B, K].

    Attributes:
        scores: scores of the training points, by fold.
        level: share of intervals that contain the target, in each column.
        score: "scaled", "absolute" or "cqr".
    """

    scores: FoldScores
    level: float
    score: IntervalScore

    def __post_init__(self) -> None:
        self.scores.rank(self.level)

    @property
    def guarantee(self) -> str:
        """What holds for new data, and on which conditions."""
        column = " of a column" if len(self.scores.sorted) > 1 else ""
        return self.scores.guarantee(f"An interval{column} contains the target", self.level)

    @checked(level=share)
    def at(self, level: float) -> Self:
        """The same rule at another level."""
        if self.score == "cqr" and level != self.level:
            raise ConfigError(
                f"scores of 'cqr' are for level {self.level:g} alone; fit another rule, or one "
                f"with score='scaled'"
            )
        return replace(self, level=level)

    @checked(pred=prediction)
    def __call__(self, pred: Predictive) -> tuple[Tensor, Tensor]:
        """Low and high ends of the interval of each data point, in the units of the targets."""
        self.scores.check(pred)
        low, high = pred.by_blocks(self._ends).unbind(-1)
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise DataError("the prediction is not finite; leave out inputs that are not finite")
        if pred.likelihood.discrete:
            low, high = low.ceil(), high.floor()
        return pred.as_targets(low), pred.as_targets(high)

    def _ends(self, part: Predictive) -> Tensor:
        """Both ends [b, D, 2] from the ends and the unit of each fold [D, K, b]."""
        each = [interval_parts(m, self.score, self.level) for m in self.scores.mixtures(part)]
        low, high, unit = (
            torch.stack(ends).movedim(2, 0).contiguous() for ends in zip(*each, strict=True)
        )
        if len(low) != len(self.scores.sorted):
            raise DataError(
                f"the rule is for {len(self.scores.sorted)} target columns, and the prediction has "
                f"{len(low)}; predict with the run of the rule"
            )
        unit = unit.clamp_min(torch.finfo(unit.dtype).tiny)
        rank = self.scores.rank(self.level)
        ends = [-self.scores.ranked(-low, unit, rank), self.scores.ranked(high, unit, rank)]
        return torch.stack(ends, -1).movedim(0, 1)


@checked(
    pred=prediction,
    level=share,
    score=one_of("scaled", "absolute", "cqr"),
    knew=list_of(text),
)
def cross_conformal_intervals(
    pred: Predictive,
    y: ArrayLike,
    folds: ArrayLike,
    member_folds: ArrayLike,
    level: float = 0.9,
    *,
    score: IntervalScore = "scaled",
    repeated: ArrayLike | None = None,
    knew: Sequence[str] = (),
) -> CrossConformalIntervals:
    r"""CV+ intervals, from predictions of all training points by members that hold them out.

    `shoal.cross_conformal(run)` calls this function for a run with folds. With the quantiles
    $q^-$ and $q^+$ of ranks $\lfloor \alpha (N+1) \rfloor$ and $\lceil (1-\alpha)(N+1) \rceil$,
    the interval of a new point x is

    $[q^-\{\mu_{k(n)}(x) - s_n \sigma_{k(n)}(x)\},\; q^+\{\mu_{k(n)}(x) + s_n \sigma_{k(n)}(x)\}]$.

    It contains the target with probability $1 - 2\alpha$ or little less, and about `level` in
    practice. With one point per fold these are the intervals of the jackknife+.
    Barber, Candès, Ramdas & Tibshirani (2021), arXiv 1905.02928.

    - "scaled": $s_n = |y_n - \mu| / \sigma$, with mean and standard deviation of the mixture.
    - "absolute": $s_n = |y_n - \mu|$ and $\sigma = 1$.
    - "cqr": $s_n = \max(lo - y_n, y_n - hi)$ with quantiles at (1 ∓ level)/2 instead of $\mu$.

    Args:
        pred: out-of-fold prediction of the training points.
        y: their targets [N] or [N, K].
        folds: number of the fold of each training point [N].
        member_folds: number of the fold that each member of new predictions holds out [M].
        level: wished share of intervals that contain the target.
        score: "scaled", "absolute" or "cqr".
        repeated: how often each training point occurs [N], whole numbers; None for once.
        knew: what members learned of the points that they hold out, for `guarantee`.
    """
    places = _checked_folds(pred, folds, member_folds, repeated)
    targets = pred.columns.check(y).double()
    low, high, unit = interval_parts(pred.columns, score, level)
    each = torch.maximum(low - targets, targets - high) / unit
    return CrossConformalIntervals(_fold_scores(each, *places, knew), level, score)


@dataclass(frozen=True, eq=False)
class CrossConformalSets:
    """A fitted rule for sets; call it with a prediction of all members to get the sets [B, C].

    Attributes:
        scores: scores of the training points, by fold.
        level: share of sets that contain the true class.
        score: "lac" or "aps".
    """

    scores: FoldScores
    level: float
    score: CrossSetScore

    def __post_init__(self) -> None:
        self.scores.rank(self.level)

    @property
    def guarantee(self) -> str:
        """What holds for new data, and on which conditions."""
        return self.scores.guarantee("A set contains the true class", self.level)

    @checked(level=share)
    def at(self, level: float) -> Self:
        """The same rule at another level."""
        return replace(self, level=level)

    @checked(pred=prediction)
    def __call__(self, pred: Predictive) -> Tensor:
        """Which classes are in the set of each data point [B, C]; the most probable always is."""
        self.scores.check(pred)
        return pred.by_blocks(self._inside)

    def _inside(self, part: Predictive) -> Tensor:
        each = [class_probs(mixture)[1] for mixture in self.scores.mixtures(part)]
        scores = torch.stack([class_scores(probs, self.score) for probs in each])
        if not bool(scores.isfinite().all()):
            raise DataError("the prediction is not finite; leave out inputs that are not finite")
        below = self.scores.below(scores.flatten(1).unsqueeze(0)).view(scores.shape[1:])
        inside = below < self.scores.rank(self.level)
        return inside.scatter(-1, class_probs(part)[1].argmax(-1, keepdim=True), True)


@checked(pred=prediction, level=share, score=one_of("lac", "aps"), knew=list_of(text))
def cross_conformal_sets(
    pred: Predictive,
    y: ArrayLike,
    folds: ArrayLike,
    member_folds: ArrayLike,
    level: float = 0.9,
    *,
    score: CrossSetScore = "lac",
    repeated: ArrayLike | None = None,
    knew: Sequence[str] = (),
) -> CrossConformalSets:
    r"""CV+ sets of classes, from predictions of all training points by members that hold them out.

    `shoal.cross_conformal(run)` calls this function for a run with folds. Class c is in the set of
    a new point x if $\#\{n : s_n < s_{k(n)}(x, c)\} < (1 - \alpha)(N + 1)$. The set contains the
    true class with probability $1 - 2\alpha$ or little less, and about `level` in practice.
    Romano, Sesia & Candès (2020), arXiv 2006.02544.

    - "lac": $1 - p_c$, the smallest sets on average.
    - "aps": the sum of all probabilities from the largest to $p_c$; larger sets where the
      prediction is uncertain.

    Args:
        pred: out-of-fold prediction of the training points.
        y: their labels [N].
        folds: number of the fold of each training point [N].
        member_folds: number of the fold that each member of new predictions holds out [M].
        level: wished share of sets that contain the true class.
        score: "lac" or "aps".
        repeated: how often each training point occurs [N], whole numbers; None for once.
        knew: what members learned of the points that they hold out, for `guarantee`.
    """
    places = _checked_folds(pred, folds, member_folds, repeated)
    counted = pred.likelihood.counted(pred.check(y))
    if counted is not None and not bool(counted.all()):
        kept = counted.nonzero().flatten()
        pred, y = pred[kept], as_tensor(y, "y")[kept]
        places = places[0][kept], places[1], places[2][kept]
    _, probs, labels = labelled(pred, y)
    each = class_scores(probs, score).gather(1, labels.unsqueeze(1))
    return CrossConformalSets(_fold_scores(each, *places, knew), level, score)


def _checked_folds(
    pred: Predictive, folds: ArrayLike, member_folds: ArrayLike, repeated: ArrayLike | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Folds of points and members and the repetitions, if they fit the prediction."""
    _check_members(pred)
    points, members = _whole("folds", folds), _whole("member_folds", member_folds)
    weight = torch.ones_like(points) if repeated is None else _whole("repeated", repeated)
    for name, given in (("folds", points), ("repeated", weight)):
        if len(given) != len(pred):
            raise DataError(f"{name} has {len(given)} numbers for {len(pred)} data points")
    if set(points.tolist()) != set(members.tolist()):
        raise DataError(
            "folds of points and of members differ; give every fold of the points a member that "
            "holds it out, and every member a fold"
        )
    return points, members, weight


def _whole(name: str, values: ArrayLike) -> Tensor:
    """Whole numbers from 0 on, one axis."""
    given = as_tensor(values, name).cpu()
    whole = given.ndim == 1 and not given.is_complex() and bool((given >= 0).all())
    if not whole or bool((given != given.to(torch.int64)).any()):
        raise DataError(f"{name} must be whole numbers from 0 on in one list, since points count")
    return given.to(torch.int64)


def _check_members(pred: Predictive) -> None:
    """Refuse what the guarantee does not cover."""
    if pred.members.ndim != 3:
        raise ConfigError(
            "cross-conformal rules need one target per data point, since the places of one point "
            "are not exchangeable; use decisions.conformal_sets or conformal_intervals"
        )
    if pred.weights is not None:
        raise ConfigError(
            "cross-conformal rules need members of equal weight, and the prediction has weights; "
            "leave out weights in shoal.predict"
        )


def _fold_scores(
    each: Tensor, folds: Tensor, members: Tensor, weight: Tensor, knew: Sequence[str]
) -> FoldScores:
    bad = (~each.isfinite()).any(1).nonzero().flatten()
    if len(bad):
        raise DataError(
            f"the score of data point {int(bad[0])} is not finite; leave out points whose target "
            f"or prediction is not finite, and predictions without variance"
        )
    return FoldScores.of(each.cpu(), folds, members, weight, knew)
