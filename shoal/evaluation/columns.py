"""What the columns of a table do to predictions: permutation importance and partial dependence.

Both see predictions alone. Who has the table makes the inputs, with one column permuted or fixed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.arguments import checked, share
from shoal.core.display.text import number, table
from shoal.core.errors import DataError
from shoal.core.optional import require
from shoal.prediction.metrics import registry
from shoal.prediction.metrics.regression import ranked_scores
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = [
    "Explanation",
    "Importances",
    "PartialDependence",
    "dependence_of",
    "permutation_importances",
    "score_of",
]

BAND = 0.9
"""Probability of the band of members around a partial dependence."""

Permuted = tuple[int, np.ndarray]
"""A column, and for every data point the one that gives it its value of this column."""


@dataclass(frozen=True, eq=False, repr=False)
class Importances:
    r"""How much worse predictions become if the values of one column are permuted.

    With the score s, the importance of column j is $I_j = \frac1N \sum_n s(x_n^{j \leftarrow
    \pi(n)}, y_n) - s(x_n, y_n)$: point n has the value of column j of another point. A column that
    does not matter has importance 0. Columns that say the same share their importance: while one
    is permuted, the others still tell its value. Breiman (2001), doi 10.1023/A:1010933404324.

    Attributes:
        columns: names of the columns.
        score: "crps", in the units of the targets, or "nll", in nats.
        data: what was permuted, such as "out-of-fold".
        points: number of data points.
        baseline: the score without a permutation.
        mean: importance of each column [D].
        error: standard error of `mean` over data points and permutations [D].
        members: importance of each column for each member's own predictions [D, M].
    """

    columns: tuple[str, ...]
    score: str
    data: str
    points: int
    baseline: float
    mean: np.ndarray
    error: np.ndarray
    members: np.ndarray

    @property
    def spread(self) -> np.ndarray:
        """Standard deviation of the importance over members [D]; 0 for one member."""
        known = np.isfinite(self.members).all(0)
        if known.sum() < 2:
            return np.zeros(len(self.columns))
        return self.members[:, known].std(1, ddof=1)

    @property
    def shares(self) -> np.ndarray:
        """Importances without negative ones, divided by their sum [D]; zeros if none is left."""
        positive = np.clip(self.mean, 0, None)
        return positive / positive.sum() if positive.any() else positive

    @checked(level=share)
    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Both ends of the interval of each importance [D], by the normal distribution."""
        reach = NormalDist().inv_cdf(0.5 + level / 2) * self.error
        return self.mean - reach, self.mean + reach

    def to_pandas(self) -> Any:
        """A table with one row per column, the most important first."""
        low, high = self.interval()
        columns = {
            "column": list(self.columns),
            "importance": self.mean,
            "low": low,
            "high": high,
            "spread": self.spread,
            "share": self.shares,
        }
        frame = require("pandas", extra="frames").DataFrame(columns)
        order = np.argsort(-self.mean, kind="stable")
        return frame.iloc[order].reset_index(drop=True)

    def __repr__(self) -> str:
        parts = (self.columns, self.mean, self.error, *self.interval(), self.spread)
        each = zip(*(list(part) for part in parts), strict=True)
        rows = [
            [
                name,
                number(mean, error),
                f"{number(low, error)} to {number(high, error)}",
                number(spread, error),
            ]
            for name, mean, error, low, high, spread in sorted(each, key=lambda row: -row[1])
        ]
        about = f"increase of {_WORDS[self.score]}, {self.points} {self.data} points"
        header = ["column", "importance", "95 % interval", "std over members"]
        return f"Importances: {about}\n{table(rows, header)}"

    def _repr_html_(self) -> str:
        return self.to_pandas().to_html(index=False)


_WORDS = {"crps": "the CRPS in units of y", "nll": "the NLL in nats"}


def score_of(pred: Predictive) -> str:
    """The proper score of a prediction: CRPS where it is known, NLL elsewhere."""
    return "crps" if registry["crps"].fits(pred) else "nll"


def _scores(pred: Predictive, y: ArrayLike) -> Tensor:
    """The score of every data point [B], in double precision."""
    if score_of(pred) == "crps":
        return pred.by_blocks(ranked_scores, pred.check(y)).mean(-1).double()
    return -pred.log_prob(y).double()


def _all_scores(pred: Predictive, y: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The scores of the mixture [B], and those of each member alone [M, B]."""
    members = pred.members
    alone = [replace(pred, members=members[m : m + 1], weights=None) for m in range(len(members))]
    each = torch.stack([_scores(one, y) for one in alone])
    return (each[0] if len(alone) == 1 else _scores(pred, y)).numpy(), each.numpy()


def permutation_importances(
    columns: Sequence[str],
    reference: Predictive,
    permuted: Callable[[Sequence[Permuted]], Iterator[Predictive]],
    y: ArrayLike,
    *,
    data: str,
    weight: np.ndarray | None = None,
    members: np.ndarray | None = None,
    repeats: int = 5,
    seed: int = 0,
) -> Importances:
    r"""The importances of all columns, from predictions with one of them permuted.

    Each permutation is one cycle through all points in random order, so no point keeps its value.
    With $h_r(n)$ the increase at point n, a(n) its mean over the R permutations and b(n) the mean
    increase where n gives the value, the squared standard error is
    $(\mathrm{Var}(a) + \mathrm{Var}(b) + 2 \mathrm{Cov}(a, b) - \mathrm{Var}(h) / R) / N$: both
    roles of a point count, and the permutations are not counted twice.

    Args:
        columns: names of the columns.
        reference: prediction of the data points as they are.
        permuted: makes the prediction of each pair of a column and its permutation, in order.
        y: targets, as the likelihood takes them.
        data: what the data points are, in a word or two.
        weight: weights of the data points [B].
        members: the member at each place of the mixture and each point [S, B]; None if the
            places are the members.
        repeats: permutations of each column.
        seed: fixes the permutations.
    """
    count = len(reference)
    if count < 2:
        raise DataError("importances need at least 2 data points, of which one takes the other's")
    random = np.random.default_rng(seed)
    cycles = [random.permutation(count) for _ in range(repeats)]
    donors = np.stack([np.roll(order, 1)[np.argsort(order)] for order in cycles])
    shares = np.ones(count) if weight is None else np.asarray(weight) / np.mean(weight)
    base, base_each = _all_scores(reference, y)
    by_member = _of_members(members, base_each.shape, shares)
    stream = permuted([(j, order) for j in range(len(columns)) for order in donors])
    means, errors, each = [], [], []
    for _ in columns:
        pairs = [_all_scores(next(stream), y) for _ in donors]
        increase = np.stack([scores for scores, _ in pairs]) - base
        mean = float((shares * increase).mean())
        means.append(mean)
        errors.append(_error(shares * (increase - mean), donors))
        each.append(by_member(np.mean([scores for _, scores in pairs], axis=0) - base_each))
    return Importances(
        columns=tuple(columns),
        score=score_of(reference),
        data=data,
        points=count,
        baseline=float((shares * base).mean()),
        mean=np.array(means),
        error=np.array(errors),
        members=np.stack(each),
    )


def _error(increase: np.ndarray, donors: np.ndarray) -> float:
    """Standard error of the mean of centred increases [R, N]; see `permutation_importances`."""
    repeats, count = increase.shape
    given = np.empty_like(increase)
    np.put_along_axis(given, donors, increase, axis=1)
    (taken_var, both), (_, given_var) = np.cov(increase.mean(0), given.mean(0))
    variance = taken_var + given_var + 2 * both - increase.var() / repeats
    return math.sqrt(max(variance, 0.0) / count)


def _of_members(
    members: np.ndarray | None, shape: tuple[int, ...], shares: np.ndarray
) -> Callable[[np.ndarray], np.ndarray]:
    """Makes the mean increase of each member [M] of those at places and points [S, B]."""
    if members is None:
        members = np.broadcast_to(np.arange(shape[0])[:, None], shape)
    owner, weight = members.ravel(), np.broadcast_to(shares, shape).ravel()
    total = np.bincount(owner, weights=weight)

    def mean(increase: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # a member without points has no importance
            return np.bincount(owner, weights=weight * increase.ravel()) / total

    return mean


@dataclass(frozen=True, eq=False, repr=False)
class PartialDependence:
    r"""The mean prediction if a column has the same value in all data points.

    $\mathrm{PD}(v) = \frac1N \sum_n E[y \,|\, x_n^{j \leftarrow v}]$; for classes the mean
    probability. Every member has such a curve. The band is $\pm 1.64$ standard deviations of these
    curves: where members disagree. Friedman (2001), doi 10.1214/aos/1013203451.

    Attributes:
        column: name of the column.
        kind: "numbers", "dates" or "categories".
        grid: the values v [G].
        mean: the mean prediction [G], or [G, K] for several classes or target columns.
        low: lower end of the band of members, as `mean`.
        high: upper end of the band.
        noise: standard deviation of the targets around each member's mean; None for classes.
        members: curve of each member, [M, G] or [M, G, K].
    """

    column: str
    kind: str
    grid: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    noise: np.ndarray | None
    members: np.ndarray

    def to_pandas(self) -> Any:
        """A table with one row per value of the grid."""
        parts = {"mean": self.mean, "low": self.low, "high": self.high}
        parts |= {} if self.noise is None else {"noise": self.noise}
        columns: dict[str, Any] = {self.column: self.grid}
        for name, values in parts.items():
            several = values.ndim > 1
            rows = {f"{name}_{k}": column for k, column in enumerate(values.T)} if several else {}
            columns |= rows or {name: values}
        return require("pandas", extra="frames").DataFrame(columns)

    def __repr__(self) -> str:
        return f"PartialDependence({self.column!r}, {self.kind}, {len(self.grid)} values)"

    def _repr_html_(self) -> str:
        return self.to_pandas().to_html(index=False)


def dependence_of(column: str, kind: str, grid: np.ndarray, pred: Predictive) -> PartialDependence:
    """The partial dependence, from the prediction of all points at every value of the grid [G N].

    Of two classes, the curve is that of the second.
    """
    numbers = "numbers" in pred.likelihood.about.kinds
    curves = _over_points(pred.member_means, len(grid))
    if pred.likelihood.about.has_classes and curves.shape[2:] == (2,):
        curves = curves[..., 1]
    mean = pred.average(curves)
    reach = torch.zeros_like(mean)
    if len(curves) > 1:
        reach = NormalDist().inv_cdf(0.5 + BAND / 2) * curves.std(0)
    low, high = mean - reach, mean + reach
    if pred.likelihood.about.has_classes:
        low, high = low.clamp_min(0), high.clamp_max(1)
    noise = None
    if numbers:
        noise = pred.average(_over_points(pred.moments()[1], len(grid))).sqrt().numpy()
    parts = {"mean": mean, "low": low, "high": high, "members": curves}
    arrays = {name: each.double().numpy() for name, each in parts.items()}
    return PartialDependence(column, kind, grid, noise=noise, **arrays)


def _over_points(values: Tensor, count: int) -> Tensor:
    """Means over the data points [M, G, ...], of values [M, G N, ...]."""
    return values.double().unflatten(1, (count, -1)).mean(2)


_KEY = "explained"
_PLAIN = ("score", "data", "points", "baseline")
_ARRAYS = ("mean", "error", "members")
_CURVES = ("mean", "low", "high", "noise", "members")
_STORED = {"numbers": np.float64, "dates": np.int64}


@dataclass(frozen=True, eq=False)
class Explanation:
    """What the report shows of the columns of a table.

    Attributes:
        importances: the importances of all columns.
        dependences: partial dependence on the most important columns.
    """

    importances: Importances
    dependences: tuple[PartialDependence, ...] = ()

    def stored(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain values and tensors by name, for the files of an evaluation."""
        importances, tables = self.importances, []
        facts = {name: getattr(importances, name) for name in _PLAIN}
        tensors = {f"{_KEY}/{name}": getattr(importances, name) for name in _ARRAYS}
        for k, each in enumerate(self.dependences):
            words = [str(value) for value in each.grid] if each.kind == "categories" else None
            tables.append({"column": each.column, "kind": each.kind, "grid": words})
            grid = np.arange(len(each.grid)) if words else each.grid.astype(_STORED[each.kind])
            arrays = {"grid": grid} | {name: getattr(each, name) for name in _CURVES}
            tensors |= {f"{_KEY}/{k}/{n}": a for n, a in arrays.items() if a is not None}
        facts |= {"columns": list(importances.columns), "dependences": tables}
        return {_KEY: facts}, {n: torch.as_tensor(a).contiguous() for n, a in tensors.items()}

    @classmethod
    def read(cls, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "Explanation | None":
        """What `stored` made; None if there is nothing, or only a part of it."""
        known = facts.get(_KEY)
        if known is None or f"{_KEY}/mean" not in tensors:
            return None
        arrays: Any = {name: tensors[f"{_KEY}/{name}"].numpy() for name in _ARRAYS}
        plain = {name: known[name] for name in _PLAIN}
        importances = Importances(columns=tuple(known["columns"]), **plain, **arrays)
        dependences = []
        for k, words in enumerate(known["dependences"]):
            part = {name: tensors.get(f"{_KEY}/{k}/{name}") for name in ("grid", *_CURVES)}
            values: Any = {name: None if t is None else t.numpy() for name, t in part.items()}
            if words["kind"] == "dates":
                values["grid"] = values["grid"].astype("datetime64[s]")
            if words["grid"] is not None:
                values["grid"] = np.array(words["grid"], dtype=object)
            dependences.append(PartialDependence(words["column"], words["kind"], **values))
        return cls(importances, tuple(dependences))
