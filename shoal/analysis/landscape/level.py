"""From a valley between two solutions to a path on which the loss is that of its ends."""

import torch
from torch import Tensor

from shoal.analysis.landscape.planes import line
from shoal.analysis.landscape.survey import Tick, outputs, survey
from shoal.data.dataset import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood

__all__ = ["levelled", "with_midpoints"]

_HALVINGS = 12


def levelled(
    basis: Ensemble,
    coefficients: Tensor,
    split: Split,
    likelihood: Likelihood,
    train: Tensor | None = None,
    tick: Tick = lambda count: None,
) -> Tensor:
    r"""Coefficients [K, R] of the path raised from a valley to the level of its ends.

    Below the level lies the valley $v(t)$, above it as a rule the straight line $l(t)$ through the
    same ends. Between them, on $(1 - s) v(t) + s l(t)$, bisection finds where the loss crosses
    $(1 - t) L(v(0)) + t L(v(1))$. A place where the valley is not below the level stays as it is.

    Args:
        basis: R networks; the first and the last are the ends.
        coefficients: of the valley at K even places from one end to the other [K, R].
        split: labelled data on which the loss is measured.
        likelihood: what the outputs mean.
        train: inputs from which points with batch normalisation take their statistics.
        tick: told of progress.
    """
    valley, along = coefficients.double(), line(len(coefficients))
    straight = torch.zeros_like(valley)
    straight[:, [0, -1]] = along
    nobody = outputs(basis, split.x[:1])[:0]

    def loss(share: Tensor) -> Tensor:
        points = valley + share[:, None] * (straight - valley)
        return survey(basis, points, split, likelihood, nobody, train, tick).loss

    low, high = torch.zeros(len(valley)).double(), torch.ones(len(valley)).double()
    level = along @ loss(low)[[0, -1]]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = loss(middle) <= level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return valley + low[:, None] * (straight - valley)


def with_midpoints(coefficients: Tensor) -> Tensor:
    """The places of a path and those half way between neighbours [2 K - 1, R].

    >>> with_midpoints(torch.tensor([[0.0], [1.0], [4.0]])).flatten().tolist()
    [0.0, 0.5, 1.0, 2.5, 4.0]
    """
    halves = (coefficients[1:] + coefficients[:-1]) / 2
    woven = torch.stack([coefficients[:-1], halves], 1).flatten(0, 1)
    return torch.cat([woven, coefficients[-1:]])
