"""Drift: columns of new data whose distribution is not that of the training data.

A fitted estimator keeps a sketch of every training column: 101 quantiles of numbers and dates, the
counts of categories, and the number of gaps. New data are compared with these sketches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import kolmogorov
from scipy.stats import chi2, fisher_exact

from shoal.core.display.text import number, percent, table
from shoal.core.errors import ConfigError, DataError
from shoal.core.optional import require
from shoal.integrations.sklearn.columns import (
    as_categories,
    as_numbers,
    as_seconds,
    is_table,
    kind_of,
)
from shoal.prediction.statistics import holm

__all__ = ["ColumnDrift", "ColumnSketch", "Drift", "drift_of", "sketches"]

LEVELS = 100
"""Quantiles of a column of numbers, beside the smallest number."""

FEW, MANY = 20, 1000
"""Different numbers up to which a column is compared by counts; most categories of a sketch."""

EXPECTED = 5.0
"""Smallest expected count of a cell; cells with less are pooled."""

SEEN = 0.01
"""Share of new values from which a sentence speaks of values outside of the training data."""


@dataclass(frozen=True, eq=False)
class ColumnSketch:
    """The distribution of one training column.

    Attributes:
        name: name of the column.
        kind: "numbers", "dates" or "categories".
        known: number of values that are no gaps.
        gaps: number of gaps.
        values: quantiles in ascending order; or different values, if `counted`.
        counts: number of training values up to each quantile; of each value, if `counted`.
        counted: whether the column has counts of values.
        complete: whether `values` has all values of a counted column.
    """

    name: str
    kind: str
    known: int
    gaps: int
    values: np.ndarray
    counts: np.ndarray
    counted: bool
    complete: bool = True


@dataclass(frozen=True)
class ColumnDrift:
    """How new values of a column differ from the training values.

    Attributes:
        column: name of the column.
        distance: Kolmogorov-Smirnov distance of numbers, total variation of categories: 0 to 1.
        p: p value of equal distributions.
        adjusted: p value by Holm's correction for the number of columns.
        drifted: whether `adjusted` is at most the level of the test.
        sentence: the most visible difference.
    """

    column: str
    distance: float
    p: float
    adjusted: float
    drifted: bool
    sentence: str


@dataclass(frozen=True, repr=False)
class Drift:
    """Columns of new data beside those of the training data; true if any has drifted.

    Attributes:
        columns: one result per column, in the order of X.
        level: chance of any alarm, if no column has drifted.
        points: number of new data points.
    """

    columns: tuple[ColumnDrift, ...]
    level: float
    points: int

    @property
    def drifted(self) -> tuple[str, ...]:
        """Names of the columns that have drifted."""
        return tuple(each.column for each in self.columns if each.drifted)

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence per column that has drifted, the largest distance first."""
        order = sorted(self.columns, key=lambda each: -each.distance)
        return tuple(each.sentence for each in order if each.drifted)

    def __bool__(self) -> bool:
        return bool(self.drifted)

    def to_pandas(self) -> Any:
        """A table with one row per column."""
        return require("pandas", extra="frames").DataFrame([vars(each) for each in self.columns])

    def __repr__(self) -> str:
        many = f"{len(self.drifted)} of {len(self.columns)} columns"
        rows = [
            [each.column, f"{each.distance:.3f}", f"{each.adjusted:.2g}", each.sentence]
            for each in sorted(self.columns, key=lambda each: -each.distance)
            if each.drifted
        ]
        text = f"Drift: {many}, {self.points} new points, level {self.level:g}"
        header = ["column", "distance", "p", "what differs"]
        return f"{text}\n{table(rows, header)}" if rows else text


def sketches(X: Any, names: Sequence[str]) -> list[ColumnSketch]:
    """A sketch of every column of X, a table or an array [N, D]; none for other inputs."""
    if not is_table(X) and X.ndim != 2:
        return []
    kinds = [kind_of(X.iloc[:, i]) if is_table(X) else "numbers" for i in range(len(names))]
    return [
        _sketch(name, kind, _column(X, i, kind))
        for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]


def _column(X: Any, index: int, kind: str) -> np.ndarray:
    """One column as numbers, seconds or objects; gaps are NaN."""
    one = X.iloc[:, [index]] if is_table(X) else X[:, [index]]
    read = {"numbers": as_numbers, "dates": as_seconds, "categories": as_categories}[kind]
    return read(one)[:, 0]


def _known(column: np.ndarray) -> np.ndarray:
    """The values that are no gaps; categories as texts, which have an order."""
    if column.dtype != object:
        return column[~np.isnan(column)]
    return np.array([str(value) for value in column if value == value], dtype=object)


def _sketch(name: str, kind: str, column: np.ndarray) -> ColumnSketch:
    known = _known(column)
    values, counts = np.unique(known, return_counts=True)
    facts = {"name": name, "kind": kind, "known": len(known), "gaps": len(column) - len(known)}
    if kind == "categories" or len(values) <= FEW:
        kept = np.sort(np.argsort(-counts, kind="stable")[:MANY])
        complete = len(kept) == len(values)
        return ColumnSketch(
            **facts, values=values[kept], counts=counts[kept], counted=True, complete=complete
        )
    total = np.cumsum(counts)
    ranks = np.maximum(np.arange(LEVELS + 1) * len(known) / LEVELS, 1)
    places = np.unique(np.searchsorted(total, ranks))
    return ColumnSketch(**facts, values=values[places], counts=total[places], counted=False)


def drift_of(known: Sequence[ColumnSketch], X: Any, level: float) -> Drift:
    """New data beside the sketches of the training columns.

    Args:
        known: the sketches.
        X: new data, checked by the estimator.
        level: chance of any alarm, if no column has drifted.
    """
    if not known:
        raise ConfigError("this model has no columns to compare; fit it again, on a table")
    if not len(X):
        raise DataError("X has no rows; give new data points")
    columns = [_column(X, i, sketch.kind) for i, sketch in enumerate(known)]
    found = [_compared(sketch, column) for sketch, column in zip(known, columns, strict=True)]
    adjusted = holm([p for _, p, _ in found])
    return Drift(
        tuple(
            ColumnDrift(sketch.name, distance, p, each, each <= level, sentence)
            for sketch, (distance, p, sentence), each in zip(known, found, adjusted, strict=True)
        ),
        level,
        len(X),
    )


def _compared(sketch: ColumnSketch, column: np.ndarray) -> tuple[float, float, str]:
    """Distance, p value and sentence of one column.

    Gaps are a test of their own; the smaller of both p values counts twice.
    """
    new = _known(column)
    gaps = len(column) - len(new)
    distance, p, sentence = 0.0, 1.0, f"{sketch.name}: no difference"
    if sketch.known and len(new):
        compare = _counts_compared if sketch.counted else _quantiles_compared
        distance, p, sentence = compare(sketch, new)
    if not sketch.gaps and not gaps:
        return distance, p, sentence
    cells = np.array([[sketch.known, sketch.gaps], [len(new), gaps]], dtype=float)
    before, now = cells[:, 1] / cells.sum(1)
    p_gaps = _homogeneity(cells)
    if p_gaps <= p:
        sentence = f"{sketch.name}: {percent(now)} gaps instead of {percent(before)}"
    return max(distance, abs(now - before)), min(1.0, 2 * min(p, p_gaps)), sentence


def _quantiles_compared(sketch: ColumnSketch, new: np.ndarray) -> tuple[float, float, str]:
    r"""The Kolmogorov-Smirnov test at the L quantiles of the sketch.

    $D = \max_k |F_\mathrm{new}(q_k) - F(q_k)|$ with $\sqrt{nm / (n + m)} D + 0.583 / \sqrt L$ in
    the distribution of Kolmogorov: the maximum over L places of a Brownian bridge lies so much
    below that over all. Siegmund (1979), doi 10.2307/1426855.
    """
    n, m = sketch.known, len(new)
    below = np.searchsorted(np.sort(new), sketch.values, side="right") / m
    distance = float(abs(below - sketch.counts / n).max())
    scaled = np.sqrt(n * m / (n + m)) * distance + 0.583 / np.sqrt(len(sketch.values))
    return distance, float(kolmogorov(scaled)), _number_sentence(sketch, new)


def _number_sentence(sketch: ColumnSketch, new: np.ndarray) -> str:
    """Values outside of the training data, or how the quartiles have moved."""
    outside = _outside(sketch, new)
    if outside:
        return outside
    shares = [0.25, 0.5, 0.75]
    before = sketch.values[np.searchsorted(sketch.counts, np.array(shares) * sketch.known)]
    now = np.quantile(new, shares)
    shown = [_shown(sketch, value) for value in (*before, *now)]
    if abs(now[1] - before[1]) >= 0.1 * (before[2] - before[0]):
        return f"{sketch.name}: median {shown[4]} instead of {shown[1]}"
    return f"{sketch.name}: quartiles {shown[3]} to {shown[5]} instead of {shown[0]} to {shown[2]}"


_SIDES = {"dates": ("after the last", "before the first")}


def _outside(sketch: ColumnSketch, new: np.ndarray) -> str:
    """The share of numbers beyond the training data; empty if they are few."""
    low, high = sketch.values[0], sketch.values[-1]
    above, below = float((new > high).mean()), float((new < low).mean())
    if max(above, below) < SEEN:
        return ""
    over, under = _SIDES.get(sketch.kind, ("above the largest", "below the smallest"))
    side, end = (over, high) if above >= below else (under, low)
    share = percent(max(above, below))
    return f"{sketch.name}: {share} {side} training value, {_shown(sketch, end)}"


def _shown(sketch: ColumnSketch, value: float) -> str:
    return (
        str(np.datetime64(int(value), "s")).partition("T")[0]
        if sketch.kind == "dates"
        else number(value)
    )


def _counts_compared(sketch: ColumnSketch, new: np.ndarray) -> tuple[float, float, str]:
    """The chi-squared test of homogeneity; values without training data are one cell."""
    values, counts = np.unique(new, return_counts=True)
    other = dict(zip(values.tolist(), counts.tolist(), strict=True))
    first = [*sketch.counts.tolist(), sketch.known - int(sketch.counts.sum())]
    second = [other.pop(value, 0) for value in sketch.values.tolist()]
    cells = np.array([first, [*second, sum(other.values())]], dtype=float)
    shares = cells / cells.sum(1, keepdims=True)
    sentence = _count_sentence(sketch, new, shares, other)
    return float(abs(shares[1] - shares[0]).sum() / 2), _homogeneity(cells), sentence


def _count_sentence(
    sketch: ColumnSketch, new: np.ndarray, shares: np.ndarray, other: dict[Any, int]
) -> str:
    """Values without training data, or the value whose share has changed most."""
    text = sketch.kind == "categories"
    if not text and (outside := _outside(sketch, new)):
        return outside
    if sketch.complete and shares[1, -1] >= SEEN:
        often = max(other, key=lambda value: other[value])
        what = f"categories such as {often!r}" if text else f"values such as {number(often)}"
        return f"{sketch.name}: {percent(shares[1, -1])} in {what}, without training data"
    k = int(abs(shares[1] - shares[0]).argmax())
    name = "rare categories"
    if k < len(sketch.values):
        name = repr(sketch.values[k]) if text else _shown(sketch, sketch.values[k])
    return f"{sketch.name}: {name} has {percent(shares[1, k])} instead of {percent(shares[0, k])}"


def _homogeneity(cells: np.ndarray) -> float:
    """P value of two rows of counts with equal shares; Fisher's exact test for two cells."""
    cells = cells[:, cells.sum(0) > 0]
    rows = cells.sum(1, keepdims=True) / cells.sum()
    least = np.sort((rows * cells.sum(0)).min(0))
    rare = int((least < EXPECTED).sum())
    if rare and cells.shape[1] > 2:  # the rarest cells become one that is expected often enough
        rare = max(rare, int(np.searchsorted(np.cumsum(least), EXPECTED)) + 1)
        order = np.argsort(cells.sum(0), kind="stable")
        first, rest = np.split(order, [min(rare, len(order) - 1)])
        cells = np.column_stack([cells[:, first].sum(1), cells[:, rest]])
    if cells.shape[1] < 2:
        return 1.0
    if cells.shape[1] == 2:
        return float(fisher_exact(cells.astype(np.int64))[1])  # pyright: ignore
    expected = rows * cells.sum(0)
    return float(chi2.sf(((cells - expected) ** 2 / expected).sum(), cells.shape[1] - 1))
