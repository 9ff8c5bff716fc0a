"""Averages within a mode, and the dropout that a network was trained with left on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.analysis.landscape.points import combined, joined, only_group
from shoal.analysis.landscape.statistics import refresh
from shoal.analysis.landscape.subspace import SWAG, Mode, sample_mode
from shoal.core.errors import ConfigError
from shoal.inference.dropout import KeyedDropout
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Likelihood
from shoal.prediction.predictive import Predictive

__all__ = ["averaged", "ema", "mc_dropout", "multiswag", "swa"]


def swa(path: Ensemble) -> Ensemble:
    """The mean of the snapshots, an ensemble of one.

    Stochastic weight averaging, Izmailov et al. (2018), arXiv 1803.05407.
    """
    return combined(path, torch.full((1, path.members), 1 / path.members, dtype=torch.float64))


def ema(path: Ensemble, decay: float = 0.8) -> Ensemble:
    r"""The exponential moving average of the snapshots, the last one counting most.

    $a_k = \beta a_{k-1} + (1 - \beta) \theta_k$ from the first snapshot on.
    """
    if not 0 <= decay < 1:
        raise ConfigError(f"decay is at least 0 and less than 1, not {decay}")
    powers = decay ** torch.arange(path.members - 1, -1, -1, dtype=torch.float64)
    weights = (1 - decay) * powers
    weights[0] = powers[0]
    return combined(path, weights[None])


def averaged(paths: Sequence[Ensemble], train: Tensor | None = None) -> Ensemble:
    """An ensemble of weight-averaged members, one for each path."""
    found = joined([swa(path) for path in paths])
    return found if train is None else refresh(found, train)


def multiswag(
    modes: Sequence[Mode],
    x: Tensor,
    samples: int = 10,
    *,
    likelihood: Likelihood | None = None,
    train: Tensor | None = None,
    seed: int = 0,
) -> Predictive:
    """SWAG within each of several modes, all samples weighed alike, mode after mode.

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
    x: Tensor,
    samples: int = 10,
    *,
    likelihood: Likelihood | None = None,
    seed: int = 0,
    batch_size: int = 500,
) -> Predictive:
    """The prediction with the network's own dropout left on, `samples` masks for each member.

    Gal & Ghahramani (2016), arXiv 1506.02142.
    """
    with torch.no_grad(), _dropping(ensemble):
        drawn = [
            [ensemble(batch.to(ensemble.device), seed=seed + place, step=sample).cpu()
             for place, batch in enumerate(x.split(batch_size))]
            for sample in range(samples)
        ]  # fmt: skip
    found = torch.stack([torch.cat(parts, 1) for parts in drawn], 1)
    return Predictive(found.flatten(0, 1), likelihood or Categorical())


@contextmanager
def _dropping(ensemble: Ensemble) -> Iterator[None]:
    layers = [m for m in only_group(ensemble).skeleton.modules() if isinstance(m, KeyedDropout)]
    if not any(layer.p > 0 for layer in layers):
        raise ConfigError("these networks have no dropout to leave on; train with model.dropout")
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.train()
    try:
        yield
    finally:
        for layer, mode in zip(layers, before, strict=True):
            layer.train(mode)
