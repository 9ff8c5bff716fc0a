"""Which helps more, samples within a mode or more modes? Every combination of the two, scored."""

from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.seeds import generator
from shoal.inference.likelihoods import Likelihood
from shoal.prediction.metrics import accuracy, nll
from shoal.prediction.predictive import Predictive

__all__ = ["Combination", "combine"]


class Combination(NamedTuple):
    """Scores of one way to treat each mode, against the number of modes.

    Attributes:
        treatment: what stands for a mode, such as "swag x 5".
        modes: how many modes are averaged.
        accuracy: mean over the subsets of that size.
        nll: likewise.
    """

    treatment: str
    modes: list[int]
    accuracy: list[float]
    nll: list[float]


def combine(
    outputs: Mapping[str, Tensor], y: Tensor, likelihood: Likelihood, subsets: int = 50
) -> list[Combination]:
    """Score every treatment with 1 to all of the modes.

    Args:
        outputs: for each treatment [modes, samples, B, C]; all samples of the chosen modes are
            averaged as probabilities.
        y: targets.
        likelihood: what the outputs mean.
        subsets: scores are means over all subsets of the modes, or so many random ones where there
            are more.
    """
    found = []
    for treatment, values in outputs.items():
        sizes = list(range(1, len(values) + 1))
        scores = [_mean_scores(values, size, y, likelihood, subsets) for size in sizes]
        right, loss = zip(*scores, strict=True)
        found.append(Combination(treatment, sizes, list(right), list(loss)))
    return found


def _mean_scores(
    values: Tensor, size: int, y: Tensor, likelihood: Likelihood, subsets: int
) -> tuple[float, float]:
    scores = []
    for modes in _subsets(len(values), size, subsets):
        pred = Predictive(values[modes].flatten(0, 1), likelihood)
        right = accuracy(pred, y) if likelihood.about.has_classes else float("nan")
        scores.append((right, nll(pred, y)))
    columns = torch.tensor(scores, dtype=torch.float64).mean(0)
    return float(columns[0]), float(columns[1])


def _subsets(count: int, size: int, most: int) -> list[list[int]]:
    """
    >>> _subsets(3, 2, 10)
    [[0, 1], [0, 2], [1, 2]]
    """
    every = [list(subset) for subset in combinations(range(count), size)] if count <= 12 else []
    if every and len(every) <= most:
        return every
    random = generator(0, "subsets", count, size)
    return [torch.randperm(count, generator=random)[:size].tolist() for _ in range(most)]
