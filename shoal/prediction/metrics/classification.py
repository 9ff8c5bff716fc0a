"""Metrics of class predictions, and mean uncertainties that need no targets."""

import math

from torch import Tensor

from shoal.core.arguments import checked
from shoal.prediction.metrics.calibration import BINS, reliability
from shoal.prediction.metrics.metric import ANY, CLASSES, LOSS, OUTPUTS, average, register
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = [
    "accuracy",
    "brier",
    "class_scores",
    "confidence",
    "confusion",
    "disagreement",
    "ece",
    "ece_30",
    "ece_adaptive",
    "entropy",
    "loss",
    "mutual_information",
    "nll",
    "nll_legacy",
]


@register("accuracy", CLASSES, "higher")
def accuracy(pred: Predictive, y: ArrayLike) -> float:
    """Share of targets whose most probable class is the label."""
    return average(pred.labels() == pred.likelihood.labels(pred.check(y)))


def confusion(label: Tensor, prediction: Tensor, classes: int) -> Tensor:
    """Number of data points by label (row) and predicted class (column) [C, C].

    >>> import torch
    >>> confusion(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    pairs = label.long() * classes + prediction.long()
    return pairs.bincount(minlength=classes**2).reshape(classes, classes)


def class_scores(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Precision, recall and F1 of each class [C], of a confusion matrix.

    $F_1 = 2 n_{cc} / (\sum_j n_{cj} + \sum_i n_{ic})$. A share of no points is NaN.
    """
    counts = counts.double()
    hits, true, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    return hits / predicted, hits / true, 2 * hits / (true + predicted)


@register("nll", ANY, "lower", cite=("lakshminarayanan2017simple",))
def nll(pred: Predictive, y: ArrayLike) -> float:
    r"""Negative log-likelihood $-\frac1n \sum_n \log p(y_n | x_n)$ of the mixture, in nats."""
    return -average(pred.log_prob(y))


@register("loss", LOSS, "lower")
def loss(pred: Predictive, y: ArrayLike) -> float:
    """Mean of the custom loss over members and targets."""
    return -average(pred.average(pred.likelihood.log_prob(pred.members, pred.check(y))))


@register("nll_legacy", CLASSES, "lower", weighs=False, cite=("dangelo2021repulsive",))
def nll_legacy(pred: Predictive, y: ArrayLike) -> float:
    r"""The released repulsive-ensemble code's "NLL", $-\log \frac1n \sum_n p(y_n | x_n)$.

    This number is at most `nll`. Compare it only with tables from that code.
    """
    return math.log(len(pred)) - float(pred.log_prob(y).double().logsumexp(0))


@register("brier", CLASSES, "lower")
def brier(pred: Predictive, y: ArrayLike) -> float:
    r"""Brier score $\frac1n \sum_n \sum_c (p_{nc} - 1[y_n = c])^2$, summed over classes: 0 to 2."""

    def score(part: Predictive, probs: Tensor, y: Tensor) -> Tensor:
        truth = part.likelihood.target_probs(y, probs.shape[-1])
        return (probs.double() - truth).square().sum(-1)

    return average(pred.by_blocks(score, pred.probs, pred.check(y)))


@register("ece", CLASSES, "lower", cite=("guo2017calibration",))
@checked(bins=BINS)
def ece(pred: Predictive, y: ArrayLike, bins: int = 15, adaptive: bool = False) -> float:
    r"""Expected calibration error of the top label, $\sum_i (n_i / n)\, |acc_i - conf_i|$.

    Guo et al. (2017), arXiv 1706.04599. `reliability` describes the bins.
    """
    return reliability(pred, y, bins, adaptive).error


@register("ece_30", CLASSES, "lower", cite=("guo2017calibration",))
def ece_30(pred: Predictive, y: ArrayLike) -> float:
    """Expected calibration error in 30 bins of equal width."""
    return ece(pred, y, bins=30)


@register("ece_adaptive", CLASSES, "lower", weighs=False, cite=("guo2017calibration",))
def ece_adaptive(pred: Predictive, y: ArrayLike) -> float:
    """Expected calibration error in 15 bins of equal mass.

    Nixon et al. (2019), arXiv 1904.01685.
    """
    return ece(pred, y, adaptive=True)


@register("entropy", CLASSES, "neither")
def entropy(pred: Predictive, y: ArrayLike | None = None) -> float:
    """Mean predictive entropy, in nats: 0 to log C."""
    return average(pred.entropy())


@register("mutual_information", CLASSES, "neither")
def mutual_information(pred: Predictive, y: ArrayLike | None = None) -> float:
    """Mean epistemic uncertainty (mutual information of label and member), in nats: 0 to log M."""
    return average(pred.mutual_information())


@register("disagreement", OUTPUTS, "neither", cite=("dangelo2021repulsive",))
def disagreement(pred: Predictive, y: ArrayLike | None = None) -> float:
    """Mean disagreement: standard deviation of the members' predictions."""
    return average(pred.disagreement())


@register("confidence", CLASSES, "neither")
def confidence(pred: Predictive, y: ArrayLike | None = None) -> float:
    """Mean confidence (largest class probability): 1/C to 1."""
    return average(pred.confidence())
