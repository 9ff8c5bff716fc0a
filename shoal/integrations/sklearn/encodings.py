"""Preprocessing of tables by parts of scikit-learn, which a fitted model keeps and pickles:

numbers      StandardScaler, `InRange`, then SimpleImputer with the mean and an indicator of gaps;
             `HeavyTails` before and `PiecewiseLinear` between, where `numbers` says so
dates        `DateParts`: days, and the time of the day, week and year; then as numbers
categories   OneHotEncoder; a gap is a category of its own, an unknown category has only zeros
words        texts that differ: `HashedWords`
codes        many categories: `CategoryCodes`, of which each member learns an embedding
left out     names of nearly every data point

`columns.input_kind` says which columns are which.
"""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
from sklearn import config_context
from sklearn.base import (
    BaseEstimator,
    OneToOneFeatureMixin,
    TransformerMixin,
    clone,
)
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from shoal.core.errors import DataError
from shoal.core.optional import require
from shoal.integrations.sklearn.columns import (
    RARE,
    as_categories,
    as_numbers,
    as_seconds,
    as_texts,
    input_kind,
    is_table,
)
from shoal.models.mlp import MLP
from shoal.models.table import TableMLP

__all__ = [
    "DAY",
    "NUMBERS",
    "PERIODS",
    "CategoryCodes",
    "DateParts",
    "HashedWords",
    "HeavyTails",
    "InRange",
    "PiecewiseLinear",
    "fitted",
    "network_for",
    "notes_on",
    "preprocessing_for",
    "transformed",
]

NUMBERS = ("standard", "robust", "piecewise", "periodic")
"""What the argument `numbers` may be."""


def preprocessing_for(
    X: Any, numbers: str = "standard", weight: np.ndarray | None = None, embed: bool = True
) -> ColumnTransformer:
    """The preprocessing of a table by the kinds of its columns; an array has numbers only.

    Args:
        X: the training inputs.
        numbers: one of `NUMBERS`.
        weight: weights of the data points.
        embed: False makes all categories one-hot, for networks without embeddings.

    >>> preprocessing_for(np.zeros((3, 2))).transformers[0][2]
    [0, 1]
    """
    kinds = _kinds(X, weight, embed)
    scaling: list[Any] = [HeavyTails()] if numbers != "standard" else []
    scaling += [StandardScaler(), InRange()]
    scaling += [PiecewiseLinear()] if numbers == "piecewise" else []
    codes = CategoryCodes()
    with config_context(enable_metadata_routing=True):
        for each in (*scaling, codes):
            each.set_fit_request(sample_weight=True)
    # The mean of a standardised column is 0, with the weights of the data points.
    imputer = SimpleImputer(
        strategy="constant", fill_value=0.0, add_indicator=True, keep_empty_features=True
    )
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float64)
    steps = {  # in this order: the networks take numbers first and codes last
        "numbers": (_columnwise(as_numbers), *scaling, imputer),
        "categories": (_columnwise(as_categories), one_hot),
        "dates": (_columnwise(as_seconds), DateParts(), *map(clone, scaling), clone(imputer)),
        "words": (_columnwise(as_texts), HashedWords()),
        "codes": (_columnwise(as_categories), codes),
    }
    parts: list[tuple[str, Any]] = [(kind, make_pipeline(*each)) for kind, each in steps.items()]
    return ColumnTransformer(
        [
            (name, part, [i for i, kind in enumerate(kinds) if kind == name])
            for name, part in [*parts, ("left out", "drop")]
        ]
    )


def _kinds(X: Any, weight: np.ndarray | None, embed: bool) -> list[str]:
    """The kind of each column."""
    if not is_table(X):
        return ["numbers"] * X.shape[1]
    kinds = [input_kind(X.iloc[:, i], weight) for i in range(X.shape[1])]
    if set(kinds) == {"left out"}:
        raise DataError(
            f"nearly every value of {_listed(X.columns)} is different, so there is nothing to "
            f"learn from; give columns of numbers, dates or values that repeat"
        )
    return kinds if embed else ["categories" if kind == "codes" else kind for kind in kinds]


def notes_on(preprocessing: ColumnTransformer | None) -> tuple[str, ...]:
    """What users should know about columns that a fitted preprocessing hashes or leaves out."""
    parts: Any = () if preprocessing is None else preprocessing.transformers_
    names, notes = getattr(preprocessing, "feature_names_in_", None), []
    for kind, _, places in parts:
        some = _listed(places if names is None else names[places]) if len(places) else ""
        if kind == "words" and some:
            notes.append(
                f"The words of {some} are hashed into {WORDS} inputs per column; if the texts "
                f"matter, give numbers instead, such as the vectors of a language model."
            )
        if kind == "left out" and some:
            notes.append(
                f"The inputs lack {some}, where nearly every value is different; if they hold "
                f"dates or numbers as texts, type pandas.to_datetime or pandas.to_numeric."
            )
    return tuple(notes)


def _listed(names: Any) -> str:
    return f"column{'s' * (len(names) > 1)} {', '.join(repr(str(name)) for name in names)}"


def _columnwise(function: Callable[[Any], np.ndarray]) -> FunctionTransformer:
    return FunctionTransformer(function, feature_names_out="one-to-one")


def network_for(preprocessing: ColumnTransformer | None, numbers: str, **settings: Any) -> MLP:
    """The perceptron for inputs that `preprocessing_for` made and that were fitted.

    Args:
        preprocessing: the fitted preprocessing; None for inputs of another origin.
        numbers: as in `preprocessing_for`.
        settings: settings of `shoal.models.MLP`.
    """
    parts: Any = () if preprocessing is None else preprocessing.transformers_
    columns, embeddings = 0, ()
    for kind, pipeline, places in parts:
        columns = len(places) if kind == "numbers" and numbers == "periodic" else columns
        if kind == "codes" and len(places):
            embeddings = tuple(len(known) + 1 for known in pipeline[-1].categories_)
    if not columns and not embeddings:
        return MLP(**settings)
    return TableMLP(**settings, columns=columns, embeddings=embeddings)


class CategoryCodes(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    r"""Categories as numbers for `shoal.models.TableMLP`: category c of n is (c + 1/2) / n.

    A category needs `RARE` data points, or their weight. All others, and those that training had
    not, are category 0: its embedding is trained by the rare ones. A gap is a category, too.

    Attributes:
        categories_: the categories 1, 2, ... of each column; a gap is NaN.
    """

    categories_: list[np.ndarray]

    def fit(self, X: np.ndarray, y: Any = None, sample_weight: Any = None) -> Self:
        """Count the categories of each column of objects [N, K]."""
        factorize, self.categories_ = require("pandas", extra="frames").factorize, []
        points = None if sample_weight is None else np.maximum(sample_weight, 1.0)
        for column in X.T:
            places, values = factorize(column, use_na_sentinel=False)
            known = values[np.bincount(places, points) >= RARE]
            self.categories_.append(np.array(sorted(known.tolist(), key=_order), dtype=object))
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Numbers between 0 and 1 [N, K]."""
        columns = []
        for column, known in zip(X.T, self.categories_, strict=True):
            places = {_key(value): place for place, value in enumerate(known.tolist(), 1)}
            codes = np.array([places.get(_key(value), 0) for value in column.tolist()])
            columns.append((codes + 0.5) / (len(known) + 1))
        return np.stack(columns, axis=1)


def _key(value: Any) -> Any:
    """The value; None for a gap, which equals itself."""
    return None if value != value else value


def _order(value: Any) -> tuple[bool, str, str]:
    """Sorts values of several kinds, a gap last, whatever the order of the data points."""
    return value != value, type(value).__name__, str(value)


WORDS = 64
"""Inputs into which the words of a column are hashed: few collisions among the frequent ones."""


class HashedWords(TransformerMixin, BaseEstimator):
    """Columns of texts as hashed words, 64 inputs each, by scikit-learn's `HashingVectorizer`.

    A text becomes the sum of plus or minus one at the place of each word, of length 1. A gap is 0.
    """

    def fit(self, X: np.ndarray, y: Any = None) -> Self:
        """Hashing learns nothing."""
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Texts [N, K] as numbers [N, 64 K]."""
        hashed: Any = HashingVectorizer(n_features=WORDS)
        return np.hstack([hashed.transform(column).toarray() for column in X.T])

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The columns' names with the place."""
        given = (
            [f"x{i}" for i in range(self.n_features_in_)]
            if input_features is None
            else input_features
        )
        return np.asarray([f"{name}_word{k}" for name in given for k in range(WORDS)], dtype=object)


HEAVY = 10.0
"""Distance from the median, in robust standard deviations, from which a tail is heavy."""

BINS, SMALLEST_BIN = 16, 1e-3
"""Bins of a column, and the smallest width of a bin in standard deviations."""


class HeavyTails(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    r"""Columns with heavy tails on a logarithmic scale; other columns stay as they are.

    With the median m and s = (upper - lower quartile) / 1.349, which is the standard deviation of a
    normal distribution, a tail is heavy if $\max |x - m| / s > 10$. The column then becomes
    $\mathrm{asinh}((x - m) / s)$: linear near m, logarithmic far from it, monotone. Where both
    quartiles are equal, s is that of the values other than m. A column of at most 17 values stays.

    Attributes:
        median_: m of each column; 0 for a column that stays.
        scale_: s of each column; NaN for a column that stays.
    """

    median_: np.ndarray
    scale_: np.ndarray

    def fit(self, X: np.ndarray, y: Any = None, sample_weight: Any = None) -> Self:
        """Find the columns with heavy tails."""
        found = [_tails(*_known(column, sample_weight)) for column in X.T]
        self.median_, self.scale_ = np.array(found).reshape(-1, 2).T
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """asinh((x - m) / s) of the columns with heavy tails."""
        heavy = np.isfinite(self.scale_)
        return np.where(heavy, np.arcsinh((X - self.median_) / np.where(heavy, self.scale_, 1)), X)

    def inverse_transform(self, X: np.ndarray) -> np.ndarray:
        """m + s sinh(x) of the columns with heavy tails."""
        heavy = np.isfinite(self.scale_)
        return np.where(heavy, self.median_ + self.scale_ * np.sinh(np.where(heavy, X, 0)), X)


def _tails(values: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Median and robust standard deviation of a column with heavy tails; otherwise 0 and NaN."""
    if len(np.unique(values)) <= BINS + 1:
        return 0.0, np.nan
    low, median, high = _quantiles(values, weight, np.array([0.25, 0.5, 0.75]))
    others = values != median
    if low == high and others.any():
        low, high = _quantiles(values[others], weight[others], np.array([0.25, 0.75]))
    scale = (high - low) / 1.349
    heavy = scale > 0 and np.abs(values - median).max() > HEAVY * scale
    return (float(median), float(scale)) if heavy else (0.0, np.nan)


class InRange(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    r"""Columns within the range of the training data, widened by its width on both sides.

    x becomes $\mathrm{clip}(x, l - w, h + w)$ with the smallest value l, the largest h and
    w = h - l. So a column that is constant in training stays constant, and a number however far
    away gives finite predictions. A gap stays.

    Attributes:
        low_: l - w of each column; NaN for a column of gaps.
        high_: h + w of each column.
    """

    low_: np.ndarray
    high_: np.ndarray

    def fit(self, X: np.ndarray, y: Any = None, sample_weight: Any = None) -> Self:
        """Find the ranges, on which weights have no effect."""
        low, high = np.fmin.reduce(X, axis=0), np.fmax.reduce(X, axis=0)
        self.low_, self.high_ = 2 * low - high, 2 * high - low
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """The numbers within the ranges."""
        return np.clip(X, self.low_, self.high_)


class PiecewiseLinear(TransformerMixin, BaseEstimator):
    r"""Standardised columns, and behind them the piecewise-linear encoding of each column.

    The edges $b_0 < \dots < b_K$ are quantiles of the training data at multiples of 1/16; a column
    of at most 17 values has them all as edges. Bin k has
    $e_k = \mathrm{clip}((x - b_{k-1}) / (b_k - b_{k-1}), 0, 1)$: ones before the bin that holds x,
    the fraction in it, zeros behind it. Outside of all bins only the column itself goes on: a
    narrow bin would multiply small distances. A column of two values or fewer has no bins, and a
    gap has those of the mean, 0. Gorishniy et al. (2022), arXiv 2203.05556.

    Attributes:
        edges_: the edges of each column.
    """

    edges_: list[np.ndarray]

    def fit(self, X: np.ndarray, y: Any = None, sample_weight: Any = None) -> Self:
        """Find the edges of each column."""
        self.edges_ = [_edges(*_known(column, sample_weight)) for column in X.T]
        return self

    @property
    def bins(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of all bins: their column, left edge and width."""
        counts = [len(edges) - 1 for edges in self.edges_]
        return (
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([edges[:-1] for edges in self.edges_]),
            np.concatenate([np.diff(edges) for edges in self.edges_]),
        )

    def transform(self, X: np.ndarray) -> np.ndarray:
        """The columns, gaps included, then the bins of each column."""
        parts = [X]
        for values, edges in zip(np.nan_to_num(X, nan=0.0).T, self.edges_, strict=True):
            parts.append(np.clip((values[:, None] - edges[:-1]) / np.diff(edges), 0.0, 1.0))
        return np.hstack(parts)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The columns' names, then those names with the number of the bin."""
        given = (
            [f"x{i}" for i in range(len(self.edges_))] if input_features is None else input_features
        )
        bins = [
            f"{name}_bin{k}"
            for name, edges in zip(given, self.edges_, strict=True)
            for k in range(1, len(edges))
        ]
        return np.asarray([*map(str, given), *bins], dtype=object)


def _edges(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Edges of the bins of one column; a single number for a column without bins."""
    edges = np.unique(values)
    if len(edges) > BINS + 1:
        edges = np.unique(_quantiles(values, weight, np.arange(BINS + 1) / BINS))
    while (narrow := np.diff(edges) < SMALLEST_BIN).any():
        edges = np.delete(edges, 1 + np.argmax(narrow))
    return edges if len(edges) > 2 else np.zeros(1)


def _known(column: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The values of a column that are no gaps, and their weights."""
    known = ~np.isnan(column)
    return column[known], np.ones(known.sum()) if weight is None else np.asarray(weight)[known]


def _quantiles(values: np.ndarray, weight: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The smallest value whose share of the weight is at least the level: a value of the data."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weight[order])
    places = np.searchsorted(total, levels * total[-1])
    return values[order][np.minimum(places, len(values) - 1)]


DAY = 86_400
PERIODS = {"day": DAY, "week": 7 * DAY, "year": 31_556_952}
"""Seconds of each period of a date; a year has 365.2425 days."""


class DateParts(TransformerMixin, BaseEstimator):
    r"""Dates as numbers: days since 1970, and the place on the circle of each period.

    A date of s seconds becomes s / 86,400 and, for each period p of `PERIODS`, the pair
    $\sin(2\pi s / p), \cos(2\pi s / p)$. A period counts if the training dates span it and are
    not all at the same place of it. A gap has NaN days, and lies at the centre of every circle.

    Attributes:
        periods_: names of the periods that count, for each column.
    """

    periods_: list[tuple[str, ...]]

    def fit(self, X: np.ndarray, y: Any = None) -> Self:
        """Find the periods of each column of seconds [N, K]."""
        self.periods_ = [_periods(column[~np.isnan(column)]) for column in X.T]
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Seconds [N, K] as days and places on circles, column by column."""
        parts = []
        for seconds, periods in zip(X.T, self.periods_, strict=True):
            parts.append(seconds / DAY)
            for name in periods:
                angle = 2 * np.pi * (np.mod(seconds, PERIODS[name]) / PERIODS[name])
                parts += [np.nan_to_num(np.sin(angle)), np.nan_to_num(np.cos(angle))]
        return np.stack(parts, axis=1)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The columns' names, then those names with the period."""
        names: list[str] = []
        for i, periods in enumerate(self.periods_):
            name = f"x{i}" if input_features is None else str(input_features[i])
            circles = [f"{name}_{period}_{side}" for period in periods for side in ("sin", "cos")]
            names += [name, *circles]
        return np.asarray(names, dtype=object)


def _periods(seconds: np.ndarray) -> tuple[str, ...]:
    """The periods that these dates span, and within which they differ."""
    span = float(np.ptp(seconds)) if len(seconds) else 0.0
    return tuple(
        name
        for name, period in PERIODS.items()
        if span >= period and np.ptp(np.mod(seconds, period)) > 0
    )


def fitted(preprocessing: Any, X: Any, y: Any, weight: np.ndarray | None) -> np.ndarray:
    """Fit the preprocessing in place; returns X as the networks take it.

    Weights reach those parts that ask for them by scikit-learn's metadata routing.
    """
    weighted = weight is not None and isinstance(preprocessing, ColumnTransformer)
    routed = {"sample_weight": weight} if weighted else {}
    with _arrays(enable_metadata_routing=weighted), _quiet():
        return _dense(preprocessing.fit_transform(X, y, **routed))


def transformed(preprocessing: Any, X: Any) -> np.ndarray:
    """X as the networks take it."""
    with _arrays(), _quiet():
        return _dense(preprocessing.transform(X))


def _quiet() -> Any:
    """A column without any number has no mean and becomes 0; a number too large becomes an end."""
    return np.errstate(invalid="ignore", over="ignore")


def _arrays(**settings: bool) -> Any:
    """Transformers return arrays, whatever the caller has set for their output."""
    return config_context(transform_output="default", **settings)


def _dense(values: Any) -> np.ndarray:
    values = values.toarray() if hasattr(values, "toarray") else values
    return np.ascontiguousarray(values, dtype=np.float64)
