"""Weight averages within a mode, MC dropout, and samples within modes against more modes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.analysis.landscape.points import combined, joined, only_group, refresh
from shoal.analysis.landscape.subspace import SWAG, Mode, sample_mode
from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.core.structure import Inputs
from shoal.engine.members.layers import KeyedDropout
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Likelihood
from shoal.prediction.metrics import accuracy, nll
from shoal.prediction.predictive import Predictive

__all__ = ["Combination", "averaged", "combine", "ema", "mc_dropout", "multiswag", "swa"]


def swa(path: Ensemble) -> Ensemble:
    """The mean of the snapshots, an ensemble of one member.

    Stochastic weight averaging, Izmailov et al. (2018), arXiv 1803.05407.
    """
    return combined(path, torch.full((1, path.members), 1 / path.members, dtype=torch.float64))


def ema(path: Ensemble, decay: float = 0.8) -> Ensemble:
    r"""The exponential moving average of the snapshots; the last snapshot has most weight.

    $a_k = \beta a_{k-1} + (1 - \beta) \theta_k$ from the first snapshot on.
    """
    if not 0 <= decay < 1:
        raise ConfigError(f"decay must be at least 0 and below 1, not {decay}")
    powers = decay ** torch.arange(path.members - 1, -1, -1, dtype=torch.float64)
    weights = (1 - decay) * powers
    weights[0] = powers[0]
    return combined(path, weights[None])


def averaged(paths: Sequence[Ensemble], train: Inputs | None = None) -> Ensemble:
    """An ensemble of weight-averaged members, one per path."""
    average = joined([swa(path) for path in paths])
    return average if train is None else refresh(average, train)


def multiswag(
    modes: Sequence[Mode],
    x: Inputs,
    samples: int = 10,
    *,
    likelihood: Likelihood | None = None,
    train: Inputs | None = None,
    seed: int = 0,
) -> Predictive:
    """SWAG within each of several modes; all samples have equal weight, ordered by mode.

    Wilson & Izmailov (2020), arXiv 2002.08791.
    """
    reach = torch.ones(samples)
    parts = [
        sample_mode(
            SWAG(), mode, reach, x, likelihood=likelihood, train=train, seed=seed + 7919 * index
        )
        for index, mode in enumerate(modes)
    ]
    return Predictive(torch.cat([part.members for part in parts]), parts[0].likelihood)


def mc_dropout(
    ensemble: Ensemble,
    x: Inputs,
    samples: int = 10,
    *,
    likelihood: Likelihood | None = None,
    seed: int = 0,
    batch_size: int = 500,
) -> Predictive:
    """MC dropout: the prediction with the networks' dropout on, `samples` masks per member.

    Gal & Ghahramani (2016), arXiv 1506.02142.
    """
    with torch.no_grad(), _dropping(ensemble):
        drawn = [
            [ensemble(batch.to(ensemble.device), seed=seed + place, step=sample).cpu()
             for place, batch in enumerate(x.split(batch_size))]
            for sample in range(samples)
        ]  # fmt: skip
    outputs = torch.stack([torch.cat(parts, 1) for parts in drawn], 1)
    return Predictive(outputs.flatten(0, 1), likelihood or Categorical())


@contextmanager
def _dropping(ensemble: Ensemble) -> Iterator[None]:
    layers = [m for m in only_group(ensemble).skeleton.modules() if isinstance(m, KeyedDropout)]
    if not any(layer.p > 0 for layer in layers):
        raise ConfigError("these networks have no dropout; train with model.dropout")
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer, mode in zip(layers, before, strict=True):
            layer.train(mode)


class Combination(NamedTuple):
    """Scores of one treatment of the modes, for a number of modes.

    Attributes:
        treatment: what represents a mode, such as "swag x 5".
        modes: number of averaged modes.
        accuracy: accuracy, mean over the subsets of that size.
        nll: NLL, mean over the subsets of that size.
    """

    treatment: str
    modes: list[int]
    accuracy: list[float]
    nll: list[float]


def combine(
    outputs: Mapping[str, Tensor], y: Tensor, likelihood: Likelihood, subsets: int = 50
) -> list[Combination]:
    """Scores of every treatment for 1 mode up to all modes.

    Args:
        outputs: outputs per treatment [modes, samples, B, C]. The prediction averages the
            probabilities of all samples of the chosen modes.
        y: targets.
        likelihood: likelihood of the outputs.
        subsets: largest number of subsets of the modes per score; random subsets if there are more.
    """
    rows = []
    for treatment, values in outputs.items():
        sizes = list(range(1, len(values) + 1))
        scores = [_mean_scores(values, size, y, likelihood, subsets) for size in sizes]
        right, loss = zip(*scores, strict=True)
        rows.append(Combination(treatment, sizes, list(right), list(loss)))
    return rows


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
