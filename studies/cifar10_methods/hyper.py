"""Hyper-deep ensembles: members with different hyper-parameters, chosen greedily.

Candidates have a random learning rate, prior and dropout, and their own random start. Members are
chosen among them one after another, with replacement, by the validation NLL of the mean
probability. Wenzel et al. (2020), arXiv 2006.13570, train several starts of every chosen setting
and choose again among them. That second stage is left out.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import shoal
from shoal.core.random import generator
from shoal.inference.priors import Gaussian
from shoal.prediction.predictive import Predictive

__all__ = ["CANDIDATES", "Setting", "drawn", "greedy", "selected"]

CANDIDATES = 12


class Setting(NamedTuple):
    """Hyper-parameters of a candidate."""

    lr_factor: float
    prior_std: float
    dropout: float


def drawn(seed: int, count: int = CANDIDATES) -> list[Setting]:
    """Factor of the learning rate in [1/3, 3] and prior in [0.1, 10], log-uniform; dropout to 0.5.

    >>> len(drawn(0)), drawn(0) == drawn(0)
    (12, True)
    """
    u = torch.rand(count, 3, generator=generator(seed, "hyper-deep"))
    return [Setting(3 ** (2 * a - 1), 10 ** (2 * b - 1), c / 2) for a, b, c in u.tolist()]


def greedy(probabilities: Tensor, size: int) -> list[int]:
    """Candidates of the lowest NLL of the mean, one after another, with replacement.

    Args:
        probabilities: of the true classes, by candidate and data point [K, B].
        size: number of choices.

    >>> greedy(torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.4, 0.4]]), 3)
    [2, 0, 1]
    """
    total, chosen = torch.zeros_like(probabilities[0]), []
    for _ in range(size):
        chosen.append(int((total + probabilities).log().mean(1).argmax()))
        total = total + probabilities[chosen[-1]]
    return chosen


def selected(
    start: Callable[..., shoal.Ensemble],
    fit: Callable[..., shoal.Run],
    validation: shoal.Split,
    seed: int,
    asked: argparse.Namespace,
) -> Callable[[Tensor], Predictive]:
    """Train the candidates, and predict with those that are chosen on the validation images."""
    table = json.loads(asked.model) if asked.model.startswith("{") else {"name": asked.model}
    runs = []
    for index, setting in enumerate(drawn(seed)):
        changes: dict[str, Any] = {"lr": asked.lr * setting.lr_factor, "method": "ensemble"}
        changes["prior"] = Gaussian(setting.prior_std)
        own = 1000 * (seed + 1) + index
        runs.append(fit(start(table | {"dropout": setting.dropout}, 1, own), own, **changes))
    probabilities = torch.stack(
        [shoal.predict(run, validation.x).log_prob(validation.y).exp() for run in runs]
    )
    chosen = greedy(probabilities, asked.members)

    def predict(x: Tensor) -> Predictive:
        outputs = {index: shoal.predict(runs[index], x).members for index in set(chosen)}
        return Predictive(torch.cat([outputs[i] for i in chosen]), runs[0].likelihood)

    return predict
