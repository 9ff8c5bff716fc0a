"""Ensembles as estimators of scikit-learn; users import them from `shoal.sklearn`."""

from shoal.integrations.sklearn.classifier import EnsembleClassifier
from shoal.integrations.sklearn.columns import as_categories, as_numbers, as_seconds, is_table
from shoal.integrations.sklearn.encodings import (
    DAY,
    NUMBERS,
    PERIODS,
    CategoryCodes,
    DateParts,
    HashedWords,
    HeavyTails,
    InRange,
    PiecewiseLinear,
    preprocessing_for,
)
from shoal.integrations.sklearn.estimator import EnsembleEstimator
from shoal.integrations.sklearn.regressor import EnsembleRegressor

__all__ = [
    "DAY",
    "NUMBERS",
    "PERIODS",
    "CategoryCodes",
    "DateParts",
    "EnsembleClassifier",
    "EnsembleEstimator",
    "EnsembleRegressor",
    "HashedWords",
    "HeavyTails",
    "InRange",
    "PiecewiseLinear",
    "as_categories",
    "as_numbers",
    "as_seconds",
    "is_table",
    "preprocessing_for",
]
