"""Preprocessing of tables for networks: numbers are standardised, gaps filled, categories encoded.

The parts are those of scikit-learn, so that a fitted model keeps them and pickles with them:

    numbers      StandardScaler, then SimpleImputer with the mean and an indicator of gaps
    categories   OneHotEncoder; a gap is a category of its own, an unknown category has only zeros
"""

from typing import Any

import numpy as np
from sklearn import config_context
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler

from shoal.core.errors import DataError
from shoal.core.optional import require

__all__ = [
    "as_categories",
    "as_numbers",
    "fitted",
    "is_table",
    "merged",
    "preprocessing_for",
    "rows_of",
    "transformed",
]


def is_table(X: Any) -> bool:
    """Whether X is a DataFrame."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def rows_of(X: Any, rows: np.ndarray) -> Any:
    """Some rows of a table or an array."""
    return X.iloc[rows] if is_table(X) else X[rows]


def merged(
    X: Any, y: np.ndarray, weight: np.ndarray | None
) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """Equal data points (x, y) as one point with the sum of their weights, in a fixed order.

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
    return rows_of(X, first), y[first], None if (total == 1).all() else total


def _codes(X: Any) -> np.ndarray:
    """The columns of a table as numbers [N, K]: numbers stay, categories are counted in order."""
    factorize, codes = require("pandas", extra="frames").factorize, []
    for i, name in enumerate(X.columns):
        column = X.iloc[:, i]
        if not _is_categorical(column, name):
            codes.append(_numbers(column, name))
            continue
        try:
            codes.append(factorize(column, sort=True)[0])
        except TypeError:  # values of several kinds have no order
            codes.append(factorize(column)[0])
    return np.stack(codes, axis=1)


def preprocessing_for(X: Any) -> ColumnTransformer:
    """The preprocessing of a table by the kinds of its columns; an array has numbers only.

    >>> preprocessing_for(np.zeros((3, 2))).transformers[0][2]
    [0, 1]
    """
    if is_table(X):
        kinds = [_is_categorical(X.iloc[:, i], X.columns[i]) for i in range(X.shape[1])]
    else:
        kinds = [False] * X.shape[1]
    with config_context(enable_metadata_routing=True):
        scaler = StandardScaler().set_fit_request(sample_weight=True)
    numbers = make_pipeline(
        FunctionTransformer(as_numbers, feature_names_out="one-to-one"),
        scaler,
        # The mean of a standardised column is 0, with the weights of the data points.
        SimpleImputer(
            strategy="constant", fill_value=0.0, add_indicator=True, keep_empty_features=True
        ),
    )
    categories = make_pipeline(
        FunctionTransformer(as_categories, feature_names_out="one-to-one"),
        OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float64),
    )
    return ColumnTransformer(
        [
            ("numbers", numbers, [i for i, kind in enumerate(kinds) if not kind]),
            ("categories", categories, [i for i, kind in enumerate(kinds) if kind]),
        ]
    )


def fitted(preprocessing: Any, X: Any, y: Any, weight: np.ndarray | None) -> np.ndarray:
    """Fit the preprocessing in place; returns X as the networks take it.

    Weights reach those parts that ask for them by scikit-learn's metadata routing.
    """
    weighted = weight is not None and isinstance(preprocessing, ColumnTransformer)
    given = {"sample_weight": weight} if weighted else {}
    # a column without any number has no mean; its values become 0
    with _arrays(enable_metadata_routing=weighted), np.errstate(invalid="ignore"):
        found = preprocessing.fit_transform(X, y, **given)
    return _dense(found)


def transformed(preprocessing: Any, X: Any) -> np.ndarray:
    """X as the networks take it."""
    with _arrays():
        return _dense(preprocessing.transform(X))


def _arrays(**settings: bool) -> Any:
    """Transformers return arrays, whatever the caller has set for their output."""
    return config_context(transform_output="default", **settings)


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


def _is_categorical(column: Any, name: object) -> bool:
    """Whether a column holds categories: texts, a categorical type, or objects of several kinds."""
    kinds = require("pandas", extra="frames").api.types
    if kinds.is_datetime64_any_dtype(column) or kinds.is_timedelta64_dtype(column):
        raise DataError(
            f"column {name!r} holds dates, which are neither numbers nor categories; "
            f"leave it out or turn it into numbers, such as days since a date"
        )
    if isinstance(column.dtype, kinds.CategoricalDtype):
        return True
    if kinds.is_numeric_dtype(column) or kinds.is_bool_dtype(column):
        return False
    found = kinds.infer_dtype(column, skipna=True)
    return found not in {"integer", "floating", "mixed-integer-float", "boolean", "empty"}


def _numbers(column: Any, name: object) -> np.ndarray:
    try:
        found = column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} must hold numbers, but {error}; give numbers, or gaps as NaN"
        ) from None
    if np.isinf(found).any():
        raise DataError(f"column {name!r} holds infinity; replace it by a number or by NaN")
    return found


def _dense(found: Any) -> np.ndarray:
    found = found.toarray() if hasattr(found, "toarray") else found
    return np.ascontiguousarray(found, dtype=np.float64)
