"""All metrics, and `evaluate`, which applies the metrics that fit the task.

To add a metric, write a function of `(pred, y)`, or of `(pred_test, pred_ood)`, in the file of its
family. Decorate the function with `register`: it appears in `evaluate`, in listings and in tests.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.arguments import checked, items
from shoal.core.errors import DataError
from shoal.core.values import describe_value
from shoal.data.batches.batch import checked_weights
from shoal.prediction.metrics.calibration import (
    AccuracyConfidence,
    Reliability,
    accuracy_confidence,
    reliability,
)
from shoal.prediction.metrics.classification import (
    accuracy,
    brier,
    class_scores,
    confidence,
    confusion,
    disagreement,
    ece,
    ece_30,
    ece_adaptive,
    entropy,
    loss,
    mutual_information,
    nll,
    nll_legacy,
)
from shoal.prediction.metrics.detection import (
    aupr,
    auroc,
    check_pair,
    disagreement_ratio,
    entropy_ratio,
    fpr95,
    scores,
)
from shoal.prediction.metrics.label_metrics import (
    ece_positive,
    label_auroc,
    label_mae,
    rps,
    subset_accuracy,
)
from shoal.prediction.metrics.metric import Metric, average, register, registry, weighing
from shoal.prediction.metrics.regression import coverage, crps, pit, rmse, sharpness
from shoal.prediction.metrics.similarity import affinity, effective_functions, pairwise_disagreement
from shoal.prediction.predictive import ArrayLike, Predictive, prediction

__all__ = [
    "AccuracyConfidence",
    "Metric",
    "Reliability",
    "accuracy",
    "accuracy_confidence",
    "affinity",
    "aupr",
    "auroc",
    "brier",
    "class_scores",
    "confidence",
    "confusion",
    "coverage",
    "crps",
    "disagreement",
    "disagreement_ratio",
    "ece",
    "ece_30",
    "ece_adaptive",
    "ece_positive",
    "effective_functions",
    "entropy",
    "entropy_ratio",
    "evaluate",
    "fpr95",
    "label_auroc",
    "label_mae",
    "loss",
    "mean_scores",
    "mutual_information",
    "nll",
    "nll_legacy",
    "pairwise_disagreement",
    "pit",
    "point_weights",
    "register",
    "registry",
    "reliability",
    "rmse",
    "rps",
    "scores",
    "sharpness",
    "subset_accuracy",
]


@checked(pred=prediction, ood=prediction)
def evaluate(
    pred: Predictive,
    y: ArrayLike,
    ood: Predictive | None = None,
    sample_weight: ArrayLike | None = None,
) -> dict[str, float]:
    """Every registered metric that fits the task, by name.

    Args:
        pred: the prediction for labelled data.
        y: labels [B] for classes, targets [B] or [B, K] for regression; [B] and [B, 1] score alike.
            A pair (values, derivatives) for an ensemble that was trained on both: the scores of the
            derivatives begin with `derivatives_`, and errors of members are added.
        ood: the same ensemble's prediction for OOD data; adds OOD detection metrics.
        sample_weight: weight of each data point [B]. A whole number equals repetition. With other
            numbers, metrics that are not means over data points are left out.

    >>> import torch
    >>> from shoal.inference.likelihoods import Categorical
    >>> pred = Predictive(torch.tensor([[[2.0, 0.0], [0.0, 2.0]]]), Categorical())
    >>> evaluate(pred, [0, 1])["accuracy"]
    1.0
    """
    if pred.takes_pair(y):
        return _pair_scores(pred, y, ood, sample_weight)
    targets = pred.check(y)
    weight = None if sample_weight is None else point_weights(pred, targets, sample_weight)
    pred, targets = pred.points(targets)
    metrics = {name: registry[name] for name in registry if registry[name].fits(pred)}
    if weight is not None and bool((weight == weight.round()).all()):
        rows = torch.arange(len(weight), device=weight.device).repeat_interleave(weight.long())
        pred, targets = replace(pred, members=pred.members[:, rows]), targets[rows]
        weight = None
    with weighing(weight):
        values = {
            name: metric(pred, targets)
            for name, metric in metrics.items()
            if not metric.ood and (metric.weighs or weight is None)
        }
    if ood is not None:
        check_pair(pred, ood := ood.points()[0])
        values |= {name: metric(pred, ood) for name, metric in metrics.items() if metric.ood}
    return dict(sorted(values.items(), key=lambda item: item[0] in HISTORICAL))


def _pair_scores(
    pred: Predictive, y: Any, ood: Predictive | None, sample_weight: ArrayLike | None
) -> dict[str, float]:
    """Scores of values and of derivatives, with the errors of the mean and of the members."""
    weight = (
        None if sample_weight is None else checked_weights(sample_weight, len(pred), torch.float64)
    )
    found = {}
    for prefix, part, targets, shares in pred.pair_parts(y, weight):
        others = None if ood is None or prefix else ood.of_values
        scores = evaluate(part, targets, others, shares)
        with weighing(shares):
            scores["mae"] = average((part.mean - targets).abs())
            errors = [average((each - targets).square()) for each in part.member_means]
            scores["member_rmse"] = sum(map(math.sqrt, errors)) / len(errors)
            scores["member_mae"] = average((part.member_means - targets).abs().mean(0))
        found |= {f"{prefix}{name}": value for name, value in scores.items()}
    return found


HISTORICAL = ("ece_30", "ece_adaptive", "nll_legacy")
"""Metrics that compare with published numbers; they come last, since most readers need none."""

MEANS = ("nll", "loss", "accuracy", "rmse")
"""Metrics of whole data that follow from those of their batches."""


def mean_scores(batches: Iterable[tuple[Predictive, Any, Any]]) -> dict[str, float]:
    """NLL (or loss), and accuracy or root mean square error, of data that come in batches.

    The outputs of all batches never exist together. The numbers are those of `evaluate`.

    Args:
        batches: for each batch its prediction, its targets, and the weights of its data points,
            or None.
    """
    sums = dict[str, tuple[float, float]]()
    for pred, y, sample_weight in _triples(batches):
        for name, count, mean in _batch_means(pred, y, sample_weight):
            total, so_far = sums.get(name, (0.0, 0.0))
            sums[name] = total + count, so_far + count * mean
    means = {name: value / total for name, (total, value) in sums.items()}
    return {n: math.sqrt(v) if n.endswith("rmse") else v for n, v in means.items()}


def _batch_means(pred: Predictive, y: Any, weights: Any) -> Iterator[tuple[str, float, float]]:
    """Name, count and mean of each score of a batch; the square of an error."""
    targets = pred.check(y)
    weight = None if weights is None else point_weights(pred, targets, weights)
    pair = pred.takes_pair(targets)
    if pair:
        for prefix, part, known, shares in pred.pair_parts(targets, weight):
            with weighing(shares):
                count = float(len(known)) if shares is None else float(shares.sum())
                yield f"{prefix}rmse", count, registry["rmse"](part, known) ** 2
    pred, targets = pred.points(targets)
    count = float(len(targets)) if weight is None else float(weight.sum())
    if not count:
        return
    with weighing(weight):
        for name in MEANS:
            if registry[name].fits(pred) and not (pair and name == "rmse"):
                value = registry[name](pred, targets)
                yield name, count, value**2 if name == "rmse" else value


def _triples(batches: Any) -> Iterator[tuple[Predictive, Any, Any]]:
    for batch in items("batches", batches) if not hasattr(batches, "__next__") else batches:
        if not isinstance(batch, tuple | list) or len(batch) != 3:
            raise DataError(
                f"a batch must be (prediction, targets, weights or None), "
                f"not {describe_value(batch)}"
            )
        yield prediction("a prediction of batches", batch[0]), batch[1], batch[2]


def point_weights(pred: Predictive, y: Tensor, weight: ArrayLike) -> Tensor:
    """The weight of every target that counts, from the weights of the data points [B]."""
    weights = checked_weights(weight, len(pred), torch.float64).to(pred.members.device)
    sites = pred.members.shape[2:-1].numel()
    counted = pred.likelihood.counted(y)
    weights = weights.flatten().repeat_interleave(sites * len(pred) // weights.numel())
    return weights if counted is None else weights[counted.flatten().to(weights.device)]
