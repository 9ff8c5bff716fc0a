"""Calibration: confidence against accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.arguments import checked, whole_from
from shoal.data.batches.arrays import as_tensor
from shoal.prediction.metrics.metric import of_points, point_weight
from shoal.prediction.predictive import ArrayLike, Predictive, prediction

__all__ = [
    "BINS",
    "AccuracyConfidence",
    "Reliability",
    "accuracy_confidence",
    "binned",
    "reliability",
]


BINS = whole_from(1, 1_000_000)
"""The check of a number of bins."""


@dataclass(frozen=True, eq=False)
class Reliability:
    """Numbers of a reliability diagram; bin i holds confidences in (edges[i], edges[i + 1]].

    Attributes:
        edges: edges of the bins [bins + 1].
        count: data points in each bin [bins].
        confidence: mean confidence in each bin; NaN for an empty bin.
        accuracy: accuracy in each bin; NaN for an empty bin.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def error(self) -> float:
        r"""Expected calibration error $\sum_i (n_i / n)\, |acc_i - conf_i|$."""
        gap = (self.accuracy - self.confidence).abs().nan_to_num(0.0)
        return float((self.count * gap).sum() / self.count.sum())


@of_points
@checked(bins=BINS)
def reliability(
    pred: Predictive, y: ArrayLike, bins: int = 15, adaptive: bool = False
) -> Reliability:
    """Confidence and accuracy of the top label, in bins of equal width or of equal mass.

    Args:
        pred: a prediction of classes.
        y: the true labels [B].
        bins: number of bins.
        adaptive: bins with equal numbers of data points instead of equal widths. Data points of
            equal confidence share a bin, so ties can leave other bins empty.
    """
    sure, right = pred.confidence().double(), _right(pred, y)
    return binned(sure.flatten(), right.flatten(), bins, adaptive)


def binned(sure: Tensor, right: Tensor, bins: int, adaptive: bool = False) -> Reliability:
    """Probabilities [N] and what came of them [N], in bins."""
    weight = point_weight()
    weight = torch.ones_like(sure) if weight is None else weight.to(sure).expand_as(sure)
    inner = _equal_mass(sure, bins) if adaptive else torch.arange(1, bins).to(sure) / bins
    index = torch.bucketize(sure.contiguous(), inner)

    def total(values: Tensor) -> Tensor:
        return sure.new_zeros(bins).index_add(0, index, weight * values)

    count = total(torch.ones_like(sure))
    edges = torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)])
    return Reliability(edges, count, total(sure) / count, total(right) / count)


def _right(pred: Predictive, y: ArrayLike) -> Tensor:
    """1 for each prediction that equals the label, else 0."""
    return (pred.labels() == pred.likelihood.labels(pred.check(y))).double()


def _equal_mass(values: Tensor, bins: int) -> Tensor:
    last = (torch.arange(1, bins, device=values.device) * len(values) + bins - 1) // bins - 1
    return values.sort().values[last]


class AccuracyConfidence(NamedTuple):
    """Accuracy of predictions above each confidence, and their number; all [T]."""

    threshold: Tensor
    accuracy: Tensor
    retained: Tensor


@of_points
@checked(ood=prediction)
def accuracy_confidence(
    pred: Predictive,
    y: ArrayLike,
    thresholds: Sequence[float] | Tensor | None = None,
    ood: Predictive | None = None,
) -> AccuracyConfidence:
    """Accuracy of predictions above each confidence; NaN if there are none.

    Lakshminarayanan et al. (2017), arXiv 1612.01474.

    Args:
        pred: a prediction of classes.
        y: the true labels [B].
        thresholds: confidence thresholds [T]; None for 0, 0.05, ..., 0.95.
        ood: predictions for OOD data, pooled with the others and always counted as wrong.
    """
    sure, right = pred.confidence().flatten(), _right(pred, y).flatten()
    if ood is not None:
        others = ood.points()[0].confidence().flatten()
        sure, right = torch.cat([sure, others]), torch.cat([right, right.new_zeros(len(others))])
    thresholds = (
        torch.arange(20) / 20 if thresholds is None else as_tensor(thresholds, "thresholds")
    )
    threshold = thresholds.flatten().float().to(sure)
    kept = (sure >= threshold.unsqueeze(-1)).double()
    return AccuracyConfidence(threshold, (kept @ right) / kept.sum(-1), kept.mean(-1))
