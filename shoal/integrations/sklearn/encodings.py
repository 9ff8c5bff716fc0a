"""Preprocessing of tables by parts of scikit-learn, which a fitted model keeps and pickles:

numbers      StandardScaler, then SimpleImputer with the mean and an indicator of gaps;
             `HeavyTails` before and `PiecewiseLinear` between, where `numbers` says so
dates        `DateParts`: days, and the time of the day, week and year; then as numbers
categories   OneHotEncoder; a gap is a category of its own, an unknown category has only zeros
codes        many categories: `CategoryCodes`, of which each member learns an embedding
"""

from collections import Counter
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
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from shoal.integrations.sklearn.columns import (
    as_categories,
    as_numbers,
    as_seconds,
    is_table,
    kind_of,
)
from shoal.models.mlp import MLP
from shoal.models.table import TableMLP

__all__ = [
    "DAY",
    "NUMBERS",
    "PERIODS",
    "CategoryCodes",
    "DateParts",
    "HeavyTails",
    "PiecewiseLinear",
    "fitted",
    "network_for",
    "preprocessing_for",
    "transformed",
]

NUMBERS = ("standard", "robust", "piecewise", "periodic")
"""What the argument `numbers` may be."""


def preprocessing_for(X: Any, numbers: str = "standard", embed: bool = True) -> ColumnTransformer:
    """The preprocessing of a table by the kinds of its columns; an array has numbers only.

    Without `embed` all categories are one-hot: a network of one's own has no embeddings.

    >>> preprocessing_for(np.zeros((3, 2))).transformers[0][2]
    [0, 1]
    """
    kinds = [_kind(X.iloc[:, i], embed) if is_table(X) else "numbers" for i in range(X.shape[1])]
    scaling = [StandardScaler()] if numbers == "standard" else [HeavyTails(), StandardScaler()]
    scaling += [PiecewiseLinear()] if numbers == "piecewise" else []
    with config_context(enable_metadata_routing=True):
        scaling = [each.set_fit_request(sample_weight=True) for each in scaling]
        codes = CategoryCodes().set_fit_request(sample_weight=True)
    # The mean of a standardised column is 0, with the weights of the data points.
    imputer = SimpleImputer(
        strategy="constant", fill_value=0.0, add_indicator=True, keep_empty_features=True
    )
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float64)
    steps = {  # in this order: the networks take numbers first and codes last
        "numbers": (_columnwise(as_numbers), *scaling, imputer),
        "categories": (_columnwise(as_categories), one_hot),
        "dates": (_columnwise(as_seconds), DateParts(), *map(clone, scaling), clone(imputer)),
        "codes": (_columnwise(as_categories), codes),
    }
    return ColumnTransformer(
        [
            (kind, make_pipeline(*parts), [i for i, each in enumerate(kinds) if each == kind])
            for kind, parts in steps.items()
        ]
    )


def network_for(preprocessing: ColumnTransformer | None, numbers: str, **settings: Any) -> MLP:
    """The perceptron for inputs that `preprocessing_for` made and that were fitted.

    Args:
        preprocessing: the fitted preprocessing; None for inputs of another origin.
        numbers: as in `preprocessing_for`.
        settings: settings of `shoal.models.MLP`.
    """
    fitted = {} if preprocessing is None else preprocessing.named_transformers_
    columns, embeddings = 0, ()
    for kind, _, places in () if preprocessing is None else preprocessing.transformers_:
        columns = len(places) if kind == "numbers" and numbers == "periodic" else columns
        if kind == "codes" and len(places):
            embeddings = tuple(len(known) + 1 for known in fitted["codes"][-1].categories_)
    if not columns and not embeddings:
        return MLP(**settings)
    return TableMLP(**settings, columns=columns, embeddings=embeddings)


MANY_CATEGORIES = 32
"""Values of a column up to which they are one-hot: as wide as the widest embedding."""

RARE = 3
"""Data points that a category needs for an embedding of its own."""


def _kind(column: Any, embed: bool) -> str:
    """As `kind_of`, or "codes" for a column of many categories."""
    kind = kind_of(column)
    many = kind == "categories" and column.nunique(dropna=False) > MANY_CATEGORIES
    return "codes" if many and embed else kind


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
        # Small weights do not make a category rare.
        points = np.ones(len(X)) if sample_weight is None else np.maximum(sample_weight, 1.0)
        self.categories_ = []
        for column in _hashable(X).T:
            count: Counter[Any] = Counter()
            for value, weight in zip(column.tolist(), points.tolist(), strict=True):
                count[value] += weight
            known = sorted((v for v, n in count.items() if n >= RARE), key=_order)
            self.categories_.append(np.array([np.nan if v is None else v for v in known], object))
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Numbers between 0 and 1 [N, K]."""
        columns = []
        for column, known in zip(_hashable(X).T, self.categories_, strict=True):
            places = {None if v != v else v: place for place, v in enumerate(known.tolist(), 1)}
            codes = np.array([places.get(value, 0) for value in column.tolist()])
            columns.append((codes + 0.5) / (len(known) + 1))
        return np.stack(columns, axis=1)


def _hashable(X: np.ndarray) -> np.ndarray:
    """Gaps as None, which equals itself."""
    return np.where(X == X, X, None)


def _order(value: Any) -> tuple[bool, str, str]:
    """Sorts values of several kinds, a gap last, whatever the order of the data points."""
    return value is None, type(value).__name__, str(value)


def _columnwise(function: Callable[[Any], np.ndarray]) -> FunctionTransformer:
    return FunctionTransformer(function, feature_names_out="one-to-one")


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


class PiecewiseLinear(TransformerMixin, BaseEstimator):
    r"""Standardised columns, and behind them the piecewise-linear encoding of each column.

    The edges $b_0 < \dots < b_K$ are quantiles of the training data at multiples of 1/16; a column
    of at most 17 values has them all as edges. Bin k has
    $e_k = \mathrm{clip}((x - b_{k-1}) / (b_k - b_{k-1}), 0, 1)$: ones before the bin that holds x,
    the fraction in it, zeros behind it. The first and the last bin go on linearly outside. A column
    of two values or fewer has no bins, and a gap has those of the mean, 0.
    Gorishniy et al. (2022), arXiv 2203.05556.

    Attributes:
        edges_: the edges of each column.
    """

    edges_: list[np.ndarray]

    def fit(self, X: np.ndarray, y: Any = None, sample_weight: Any = None) -> Self:
        """Find the edges of each column."""
        self.edges_ = [_edges(*_known(column, sample_weight)) for column in X.T]
        return self

    @property
    def bins(self) -> tuple[np.ndarray, ...]:
        """Of all bins: their column, left edge, width, and the ends of clipping."""
        counts = [len(edges) - 1 for edges in self.edges_]
        place = np.concatenate([np.arange(n) for n in counts]) if counts else np.zeros(0)
        last = np.repeat(counts, counts) - 1
        return (
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([edges[:-1] for edges in self.edges_]),
            np.concatenate([np.diff(edges) for edges in self.edges_]),
            np.where(place == 0, -np.inf, 0.0),
            np.where(place == last, np.inf, 1.0),
        )

    def transform(self, X: np.ndarray) -> np.ndarray:
        """The columns, gaps included, then the bins of each column."""
        column, left, width, low, high = self.bins
        values = np.nan_to_num(X, nan=0.0)[:, column]
        return np.hstack([X, np.clip((values - left) / width, low, high)])

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
    # a column without any number has no mean; its values become 0
    with _arrays(enable_metadata_routing=weighted), np.errstate(invalid="ignore"):
        return _dense(preprocessing.fit_transform(X, y, **routed))


def transformed(preprocessing: Any, X: Any) -> np.ndarray:
    """X as the networks take it."""
    with _arrays():
        return _dense(preprocessing.transform(X))


def _arrays(**settings: bool) -> Any:
    """Transformers return arrays, whatever the caller has set for their output."""
    return config_context(transform_output="default", **settings)


def _dense(values: Any) -> np.ndarray:
    values = values.toarray() if hasattr(values, "toarray") else values
    return np.ascontiguousarray(values, dtype=np.float64)
