"""Similarity of members: pairwise disagreement, affinity, effective number of functions."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.arguments import checked
from shoal.core.tree import spaced
from shoal.prediction.metrics.metric import OUTPUTS, register
from shoal.prediction.mixture import blocks
from shoal.prediction.predictive import ArrayLike, Predictive, prediction

__all__ = [
    "COMPARED",
    "affinity",
    "compared_members",
    "effective_functions",
    "effective_number",
    "pairwise_disagreement",
]

COMPARED = 64
"""Most members that an evaluation compares in pairs."""


def compared_members(pred: Predictive) -> Predictive:
    """The prediction of at most 64 members: of more, evenly spaced ones stand for all.

    Members with weights are spaced evenly in the sum of the weights, and then count equally.
    """
    if pred.size <= COMPARED:
        return pred
    chosen: Any = spaced(pred.size, COMPARED)
    if pred.weights is not None:
        levels = torch.linspace(0, 1, COMPARED, dtype=torch.float64)
        chosen = torch.searchsorted(pred.weights.double().cpu().cumsum(0), levels)
        chosen = chosen.clamp_max(pred.size - 1).tolist()
    return replace(pred, members=pred.members[chosen], weights=None)


@checked(pred=prediction)
def pairwise_disagreement(pred: Predictive) -> Tensor:
    """Pairwise disagreement [M, M]: share of inputs on which members i and j differ in label.

    Fort et al. (2019), arXiv 1912.02757.
    """
    labels = pred.member_labels().flatten(1)
    return torch.stack([(labels != row).double().mean(-1) for row in labels])


@checked(pred=prediction)
def affinity(pred: Predictive) -> Tensor:
    r"""Bhattacharyya affinity of the members [M, M], averaged over inputs.

    $S_{ij} = \frac1B \sum_b \int \sqrt{p_i(y|x_b)\, p_j(y|x_b)}\, dy$, with a sum over classes in
    place of the integral for labels. The affinity is 1 for equal predictions, and 0 for predictions
    that exclude each other on every input. The matrix is positive semidefinite.
    """
    if "loss" in pred.likelihood.about.kinds:  # its scale comes from all inputs
        return pred.likelihood.affinity(pred.members)
    parts = [pred.block(rows) for rows in blocks(pred)]
    shares = [part.likelihood.affinity(part.members) * (len(part) / len(pred)) for part in parts]
    return shares[0] if len(shares) == 1 else torch.stack(shares).sum(0)


@register("effective_functions", OUTPUTS, "neither", weighs=False)
def effective_functions(pred: Predictive, y: ArrayLike | None = None) -> float:
    r"""Effective number of functions, from 1 (all members equal) to M (all different).

    $\exp(-\sum_k \lambda_k \log \lambda_k)$ with $\lambda$ the eigenvalues of
    $\sqrt{w_i w_j}\, S_{ij}$, where S is the `affinity` of the members and the weights w are 1/M
    unless given. The eigenvalues sum to 1; M members that exclude each other give 1/M each.
    Friedman & Dieng (2022), arXiv 2210.02410, with the affinity as the similarity.

    Of more than 64 members, 64 evenly spaced ones are compared; the number is then at most 64.
    """
    pred = compared_members(pred)
    return effective_number(affinity(pred), pred.weights)


def effective_number(S: Tensor, weights: Tensor | None = None) -> float:
    """exp of the entropy of the spectrum of a similarity matrix [M, M] with ones on its diagonal.

    >>> round(effective_number(torch.eye(4)), 6), round(effective_number(torch.ones(4, 4)), 6)
    (4.0, 1.0)
    """
    root = (torch.full_like(S[0], 1 / len(S)) if weights is None else weights.to(S)).sqrt()
    spectrum = torch.linalg.eigvalsh(root[:, None] * S * root).clamp_min(0)
    return float(torch.special.entr(spectrum / spectrum.sum()).sum().exp())
