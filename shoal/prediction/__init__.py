"""Predictions of an ensemble with their uncertainty, and metrics."""

from shoal.prediction import metrics, statistics
from shoal.prediction.metrics import evaluate
from shoal.prediction.predict import predict
from shoal.prediction.predictive import Predictive
from shoal.prediction.statistics import mean_and_error, paired_difference, standard_error

__all__ = [
    "Predictive",
    "evaluate",
    "mean_and_error",
    "metrics",
    "paired_difference",
    "predict",
    "standard_error",
    "statistics",
]
