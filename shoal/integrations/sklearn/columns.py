"""Columns of a table: what they hold, their values as arrays, and equal rows as one."""

import re
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.optional import require

__all__ = [
    "RARE",
    "as_categories",
    "as_numbers",
    "as_seconds",
    "as_texts",
    "input_kind",
    "is_table",
    "kind_of",
    "merged",
    "rows_of",
]

MANY_CATEGORIES = 32
"""Values of a column up to which each is an input: as many as the widest embedding has numbers."""

RARE = 3
"""Data points that a category needs for an embedding of its own; fewer hardly train it."""

SEVERAL_WORDS = 2.0
"""Words per value, in the mean, from which a column holds texts rather than names."""

FEW_REPEATED_TEXTS, FEW_REPEATED_NAMES = 0.5, 0.1
"""Share of data points whose value is not rare, below which a column holds no categories.

Texts that differ have words in common, so half of the points is the bound. Names have nothing else
to say; they are kept as long as a tenth of the points can learn from each other.
"""


def is_table(X: Any) -> bool:
    """Whether X is a DataFrame."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def rows_of(X: Any, rows: np.ndarray) -> Any:
    """Some rows of a table or an array."""
    return X.iloc[rows] if is_table(X) else X[rows]


def merged(
    X: Any, y: np.ndarray, weight: np.ndarray | None
) -> tuple[Any, np.ndarray, np.ndarray | None, np.ndarray]:
    """Equal data points (x, y) as one point with the sum of their weights, in a fixed order.

    The last result has the place of every given point among the merged ones.

    Weighted and repeated data become the same arrays. So whole weights equal repetition to the bit,
    in batches of any size. Without it, rounding would grow during training. Weights that are all
    1 become None.

    >>> sorted(merged(np.array([[1.0], [2.0], [1.0]]), np.array([0, 1, 0]), None)[2].tolist())
    [1.0, 2.0]
    """
    values = _codes(X) if is_table(X) else X.reshape(len(X), -1)
    points = np.column_stack([values, y]).astype(np.float64) + 0.0  # no negative zero
    points[np.isnan(points)] = np.nan
    as_bytes = np.ascontiguousarray(points).view(f"V{points.itemsize * points.shape[1]}").ravel()
    _, first, place = np.unique(as_bytes, return_index=True, return_inverse=True)
    total = np.bincount(place, weights=weight).astype(np.float64)
    return rows_of(X, first), y[first], None if (total == 1).all() else total, place.ravel()


def _codes(X: Any) -> np.ndarray:
    """The columns of a table as numbers [N, K]: numbers stay, categories are counted in order."""
    factorize, codes = require("pandas", extra="frames").factorize, []
    for i, name in enumerate(X.columns):
        column = X.iloc[:, i]
        kind = kind_of(column)
        if kind != "categories":
            codes.append((_numbers if kind == "numbers" else _seconds)(column, name))
            continue
        if any(isinstance(value, _NESTED) for value in column):
            raise DataError(
                f"column {name!r} holds lists or other collections; give one number, date or text "
                f"per row, for example a column for each element"
            )
        try:
            codes.append(factorize(column, sort=True)[0])
        except TypeError:  # values of several kinds have no order
            codes.append(factorize(column)[0])
    return np.stack(codes, axis=1)


def as_numbers(X: Any) -> np.ndarray:
    """Columns as floats [N, K]; gaps are NaN."""
    if not is_table(X):
        return np.ascontiguousarray(X, dtype=np.float64)  # sums depend on the layout
    columns = [_numbers(X.iloc[:, i], X.columns[i]) for i in range(X.shape[1])]
    return np.stack(columns, axis=1)


def as_categories(X: Any) -> np.ndarray:
    """Columns as Python objects [N, K]; every kind of gap is NaN."""
    values = np.asarray(X, dtype=object).copy()
    values[np.asarray(require("pandas", extra="frames").isna(values))] = np.nan
    return values


def as_texts(X: Any) -> np.ndarray:
    """Columns as texts [N, K]; gaps are empty."""
    values = as_categories(X)
    return np.vectorize(lambda v: "" if v != v else str(v), otypes=[object])(values)


def as_seconds(X: Any) -> np.ndarray:
    """Columns of dates as whole seconds since 1970 in UTC [N, K]; gaps are NaN."""
    return np.stack([_seconds(X.iloc[:, i], X.columns[i]) for i in range(X.shape[1])], axis=1)


_NESTED = (list, tuple, dict, set, np.ndarray)
_DURATIONS = {"timedelta", "timedelta64"}
_NUMBERS = {
    "integer",
    "floating",
    "mixed-integer-float",
    "decimal",
    "boolean",
    "empty",
} | _DURATIONS
_DATES = {"date", "datetime", "datetime64", "period"}


def kind_of(column: Any) -> str:
    """What a column holds: "numbers", "dates" or "categories".

    Categories are texts, a categorical type, or objects of several kinds. Texts that all are dates
    in the form of ISO 8601, such as 2024-05-31 or 2024-05-31 14:00, are dates.
    """
    kinds = require("pandas", extra="frames").api.types
    if isinstance(column.dtype, kinds.CategoricalDtype):
        return "categories"
    if kinds.is_datetime64_any_dtype(column):
        return "dates"
    if kinds.is_numeric_dtype(column) or kinds.is_bool_dtype(column):
        return "numbers"
    kind = kinds.infer_dtype(column, skipna=True)
    if kind in _DATES or (kind == "string" and _are_dates(column)):
        return "dates"
    return "numbers" if kind in _NUMBERS else "categories"


_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d([.]\d+)?)?(Z|[+-]\d\d:?\d\d)?)?")
"""Day, month and year in another order would be a guess."""


def _are_dates(texts: Any) -> bool:
    """Whether all texts of a column are dates."""
    known = texts.dropna()
    if not len(known) or not all(_ISO_DATE.fullmatch(text) for text in known):
        return False
    to_datetime = require("pandas", extra="frames").to_datetime
    return bool(to_datetime(known, utc=True, format="ISO8601", errors="coerce").notna().all())


def input_kind(column: Any, weight: np.ndarray | None = None) -> str:
    """What the networks get of a column: as `kind_of`, but categories are one of four kinds.

    "categories" are few, and each is an input. "codes" are many, and have embeddings. "words" are
    texts that differ, so that their words count. "left out" is a name of nearly every data point.
    A small weight does not make a value rare.
    """
    if (kind := kind_of(column)) != "categories":
        return kind
    pandas = require("pandas", extra="frames")
    places, values = pandas.factorize(column, use_na_sentinel=False)
    if len(values) <= MANY_CATEGORIES:
        return kind
    points = np.bincount(places, None if weight is None else np.maximum(weight, 1.0))
    known = np.asarray(pandas.notna(values))
    texts = [value for value in values.tolist() if isinstance(value, str)]
    words = np.mean([len(text.split()) for text in texts]) if texts else 0.0
    if words >= SEVERAL_WORDS and _repeated(points[known]) < FEW_REPEATED_TEXTS:
        return "words"
    return "left out" if _repeated(points) < FEW_REPEATED_NAMES else "codes"


def _repeated(points: np.ndarray) -> float:
    """Share of data points whose value is not rare."""
    return float(points[points >= RARE].sum() / points.sum())


def _numbers(column: Any, name: object) -> np.ndarray:
    """Numbers; a duration is its seconds."""
    pandas = require("pandas", extra="frames")
    kind = pandas.api.types.infer_dtype(column, skipna=True)
    try:
        if kind in _DATES:
            raise TypeError("it holds dates")
        if kind == "complex":
            raise TypeError("it holds complex numbers")
        if kind in _DURATIONS:
            column = pandas.to_timedelta(column).dt.total_seconds()
        numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} must hold numbers, but {error}; give numbers, or gaps as NaN"
        ) from None
    if np.isinf(numbers).any():
        raise DataError(f"column {name!r} holds infinity; replace it by a number or by NaN")
    return numbers


def _seconds(column: Any, name: object) -> np.ndarray:
    """Dates as whole seconds since 1970; dates without a time zone count as UTC."""
    pandas = require("pandas", extra="frames")
    if kind_of(column) != "dates" and not column.isna().all():
        raise DataError(
            f"column {name!r} must hold dates, not {column.dtype}; type pandas.to_datetime(column)"
        )
    try:
        if isinstance(column.dtype, pandas.PeriodDtype):
            column = column.dt.to_timestamp()
        texts = pandas.api.types.infer_dtype(column, skipna=True) == "string"
        form = {"format": "ISO8601"} if texts else {}
        dates = pandas.to_datetime(column, utc=True, **form).dt.tz_localize(None)
    except (TypeError, ValueError) as error:
        raise DataError(f"column {name!r} must hold dates, but {error}") from None
    whole = dates.to_numpy(dtype="datetime64[s]")
    return np.where(np.isnat(whole), np.nan, whole.astype(np.int64))
