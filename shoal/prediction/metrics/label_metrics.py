"""Metrics of labels that are yes or no, and of labels in order."""

import math

from shoal.core.arguments import checked
from shoal.prediction.metrics.calibration import BINS, binned
from shoal.prediction.metrics.detection import auroc
from shoal.prediction.metrics.metric import BINARY, ORDINAL, average, register
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = ["ece_positive", "label_auroc", "label_mae", "rps", "subset_accuracy"]


@register("subset_accuracy", BINARY, "higher")
def subset_accuracy(pred: Predictive, y: ArrayLike) -> float:
    """Share of data points whose labels are all predicted."""
    right = pred.labels() == pred.likelihood.labels(pred.check(y))
    return average(right.flatten(1).all(-1) if right.ndim > 1 else right)


@register("ece_positive", BINARY, "lower", weighs=False, cite=("guo2017calibration",))
@checked(bins=BINS)
def ece_positive(pred: Predictive, y: ArrayLike, bins: int = 15) -> float:
    r"""Calibration error of the probability of 1, $\sum_i (n_i / n)\, |freq_i - p_i|$."""
    truth = pred.likelihood.target_probs(pred.check(y), 2)[..., 1].double()
    return binned(pred.probs[..., 1].double().flatten(), truth.flatten(), bins).error


@register("label_auroc", BINARY, "higher", weighs=False)
def label_auroc(pred: Predictive, y: ArrayLike) -> float:
    """Probability that a 1 has a higher probability than a 0, mean over the columns.

    Columns with one value only are left out; the result is NaN if there is no other.
    """
    truth = pred.likelihood.labels(pred.check(y)).reshape(len(pred), -1)
    areas = []
    for label, score in zip(truth.T, pred.mean.reshape(len(pred), -1).T, strict=True):
        if bool(label.any()) and not bool(label.all()):
            areas.append(auroc(score[label == 0], score[label == 1]))
    return sum(areas) / len(areas) if areas else math.nan


@register("label_mae", ORDINAL, "lower")
def label_mae(pred: Predictive, y: ArrayLike) -> float:
    """Mean absolute error of the median label, in classes."""
    median = (pred.probs.cumsum(-1) < 0.5).sum(-1).clamp_max(pred.probs.shape[-1] - 1)
    return average((median - pred.likelihood.labels(pred.check(y))).abs())


@register("rps", ORDINAL, "lower")
def rps(pred: Predictive, y: ArrayLike) -> float:
    r"""Ranked probability score $\sum_k (P(Y \le k) - P_y(Y \le k))^2$, in classes.

    Epstein (1969), doi 10.1175/1520-0450(1969)008<0985:ASSFPF>2.0.CO;2.
    """
    probs = pred.probs.double()
    truth = pred.likelihood.target_probs(pred.check(y), probs.shape[-1])
    return average((probs - truth).cumsum(-1).square().sum(-1))
