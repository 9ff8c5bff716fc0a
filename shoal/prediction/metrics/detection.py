"""OOD detection: metrics that separate OOD data from the test set by uncertainty."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.core.arguments import checked
from shoal.core.errors import DataError
from shoal.core.values import describe_value
from shoal.data.batches.arrays import as_tensor
from shoal.inference.likelihoods import WithDerivatives
from shoal.prediction.metrics.metric import CLASSES, NUMBERS, OUTPUTS, Better, average, register
from shoal.prediction.predictive import Predictive, prediction

__all__ = ["aupr", "auroc", "check_pair", "disagreement_ratio", "entropy_ratio", "fpr95", "scores"]


def uncertainties(name: str, value: Any) -> Tensor:
    """The check of uncertainty scores [N]."""
    scores = as_tensor(value, name)
    if scores.ndim == 1 and len(scores) and not bool(scores.isnan().any()):
        return scores
    raise DataError(
        f"{name} must be uncertainties [N] such as pred.entropy(), without NaN, "
        f"not {describe_value(value)}"
    )


@checked(test=uncertainties, ood=uncertainties)
def auroc(test: Tensor, ood: Tensor) -> float:
    """Probability that an OOD score exceeds a test score; ties count one half.

    >>> auroc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]))
    0.875
    """
    test = test.sort().values
    below = torch.searchsorted(test, ood) + torch.searchsorted(test, ood, right=True)
    return average(below) / (2 * len(test))


@checked(test=uncertainties, ood=uncertainties)
def aupr(test: Tensor, ood: Tensor) -> float:
    """Average precision of OOD detection: mean precision at the OOD scores."""
    above = len(ood) - torch.searchsorted(ood.sort().values, ood)
    false = len(test) - torch.searchsorted(test.sort().values, ood)
    return average(above.double() / (above + false))


@checked(test=uncertainties, ood=uncertainties)
def fpr95(test: Tensor, ood: Tensor) -> float:
    """False-positive rate on test data at the highest threshold that detects 95 % of OOD data."""
    needed = -(-95 * len(ood) // 100)
    return average(test >= ood.sort(descending=True).values[needed - 1])


def _max_prob(pred: Predictive) -> Tensor:
    """1 - max p, summed from the other classes so that a confidence near 1 keeps its digits."""
    others = pred.probs.scatter(-1, pred.labels().unsqueeze(-1), 0.0).sum(-1)
    return others.flatten(1).mean(-1) if others.ndim > 1 else others


_SCORES: dict[str, tuple[Callable[[Predictive], Tensor], tuple[str, ...], str]] = {
    "entropy": (Predictive.entropy, CLASSES, "entropy"),
    "mutual_information": (Predictive.mutual_information, CLASSES, "mutual information"),
    "disagreement": (Predictive.disagreement, OUTPUTS, "disagreement of the members"),
    "max_prob": (_max_prob, CLASSES, "one minus the largest probability"),
    "variance": (lambda pred: pred.variance.mean(-1), NUMBERS, "variance"),
}

_MEASURES: dict[str, tuple[Callable[[Tensor, Tensor], float], Better, str]] = {
    "auroc": (auroc, "higher", "Area under the ROC curve"),
    "aupr": (aupr, "higher", "Average precision"),
    "fpr95": (fpr95, "lower", "False-positive rate when 95 % of the OOD data are detected"),
}


@checked(pred=prediction)
def scores(pred: Predictive) -> dict[str, Tensor]:
    """Every uncertainty score for OOD detection, each [B]; OOD data should score high.

    A prediction with derivatives also has their `derivative_deviation`.
    """
    slopes = {}
    if isinstance(pred.likelihood, WithDerivatives):
        slopes = {"derivative_deviation": pred.derivative_deviation()}
        pred = pred.of_values
    pred = pred.points()[0]
    known = pred.likelihood.about.kinds
    fitting = {name: score for name, (score, kinds, _) in _SCORES.items() if {*kinds} & {*known}}
    return {name: score(pred) for name, score in fitting.items()} | slopes


def check_pair(test: Predictive, ood: Predictive) -> None:
    """Refuse test and OOD predictions of different tasks or shapes."""
    if test.likelihood != ood.likelihood or test.members.shape[-1] != ood.members.shape[-1]:
        raise DataError(
            f"test and OOD predictions must come from the same ensemble, not {test} and {ood}"
        )


def _register(measure: str, score: str) -> None:
    separate, better, title = _MEASURES[measure]
    uncertainty, kinds, words = _SCORES[score]

    def metric(test: Predictive, ood: Predictive) -> float:
        check_pair(test, ood)
        return separate(uncertainty(test), uncertainty(ood))

    metric.__doc__ = f"{title} of OOD detection by {words}; OOD data are the positives."
    register(f"{measure}_{score}", kinds, better, ood=True)(metric)


for _measure in _MEASURES:
    for _score in _SCORES:
        _register(_measure, _score)


@register("entropy_ratio", CLASSES, "higher", ood=True, cite=("dangelo2021repulsive",))
def entropy_ratio(test: Predictive, ood: Predictive) -> float:
    """Mean predictive entropy on OOD data / on the test set; infinite if the latter is 0."""
    check_pair(test, ood)
    return _ratio(ood.entropy(), test.entropy())


@register("disagreement_ratio", OUTPUTS, "higher", ood=True, cite=("dangelo2021repulsive",))
def disagreement_ratio(test: Predictive, ood: Predictive) -> float:
    """Mean disagreement on OOD data / on the test set; NaN for a single member."""
    check_pair(test, ood)
    return _ratio(ood.disagreement(), test.disagreement())


def _ratio(above: Tensor, below: Tensor) -> float:
    return float(above.double().mean() / below.double().mean())
