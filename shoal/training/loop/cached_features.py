"""`fit(cache=True)`: features that all members compute alike are computed once for all epochs."""

import math
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.storage.disk import machine_memory
from shoal.core.structure import Structured, joined
from shoal.data.batches.batch import Targets
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.engine.resources.trunk import Trunk, divide
from shoal.inference.ensemble import Ensemble
from shoal.inference.priors import FunctionalPrior
from shoal.training.options.settings import Settings

__all__ = ["behind_features", "cached"]


def cached(
    ensemble: Ensemble, batches: ArrayBatches | LoaderBatches, settings: Settings
) -> tuple[Ensemble, ArrayBatches]:
    """The members behind their common features, on the same memory, and the features as data.

    A loader is read once.
    """
    _check(ensemble, settings)
    return behind_features(ensemble, batches, settings.options.batch_size, settings.options.seed)


def behind_features(
    ensemble: Ensemble,
    batches: ArrayBatches | LoaderBatches,
    batch_size: int,
    seed: int,
    mode: bool = True,
) -> tuple[Ensemble, ArrayBatches]:
    """See `cached`; `mode` tells whether the networks run in training mode."""
    training = ensemble.training
    ensemble.train(mode)
    try:
        group = ensemble.groups[0]
        first, _ = batches.first()
        size = min(batch_size, batches.n)
        if isinstance(batches, LoaderBatches):
            size = len(first)
        trunk = divide(group, first, sorted({size, batches.n % size} - {0}))
        features, y = _features(trunk, ensemble, batches)
    finally:
        ensemble.train(training)
    rest = ensemble.slice_members(0, ensemble.members)
    rest.groups, rest.alive = [trunk.group], ensemble.alive
    return rest, ArrayBatches(features, y, size, seed)


def _check(ensemble: Ensemble, settings: Settings) -> None:
    """Refuse settings under which the inputs of the members change, or are needed."""
    options, repulsion = settings.options, settings.method.repulsion
    reasons = {
        "augment changes the inputs at every step": settings.augment is not None,
        "adversarial training changes the inputs": settings.adversarial is not None,
        f"'{settings.method.name}' compares gradients at the inputs": repulsion is not None
        and repulsion.space.base == "gradients",
        "derivatives are taken at the inputs": ensemble.derivatives is not None,
        "a prior on functions needs the inputs": isinstance(settings.prior, FunctionalPrior),
        "the members have several architectures": len(ensemble.groups) > 1,
        "dropout and running statistics of frozen members need the inputs": options.frozen > 0
        and bool(ensemble.groups[0].keys or ensemble.groups[0].buffers),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"features cannot be cached: {reason}; leave cache out")


def _features(
    trunk: Trunk, ensemble: Ensemble, batches: ArrayBatches | LoaderBatches
) -> tuple[Tensor | Structured, Targets]:
    group, rows, targets = ensemble.groups[0], [], []
    source: Any = (
        zip(batches.x.split(trunk.size), batches.y.split(trunk.size), strict=True)
        if isinstance(batches, ArrayBatches)
        else batches.sweep()
    )
    for x, y in source:
        parts = trunk.features(group, x)
        if not rows:
            _check_memory(parts, batches.n)
        rows.append(parts)
        targets.append(y)
    columns = [torch.cat(column) for column in zip(*rows, strict=True)]
    y = batches.y if isinstance(batches, ArrayBatches) else joined(targets)
    return (columns[0] if len(columns) == 1 else Structured.of(tuple(columns))), y


def _check_memory(parts: tuple[Tensor, ...], points: int) -> None:
    """Refuse features that do not fit into memory, before they are computed."""
    one = sum(math.prod(part.shape[1:]) * part.element_size() for part in parts)
    memory = machine_memory()
    if parts[0].is_cuda:
        memory = torch.cuda.mem_get_info(parts[0].device)[0]
    if memory is not None and one * points > 0.8 * memory:
        raise ConfigError(
            f"the features of {points:,} data points need {one * points:,} bytes, and there are "
            f"{memory:,}; leave cache out"
        )
