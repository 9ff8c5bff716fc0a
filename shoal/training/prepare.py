"""What a run prepares before its first step: frozen members, weight decay, fitted axes."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.files import read_tensors, write_tensors
from shoal.core.types import Tree
from shoal.data.sources import ArrayBatches, LoaderBatches
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Flat, Gaussian
from shoal.interaction.axes import Inputs, fitted, learned, needs_data, with_learned
from shoal.interaction.flows import Stein
from shoal.interaction.methods import Method
from shoal.interaction.repulsion import Repulsion
from shoal.training.settings import Settings

__all__ = ["AXES", "check_count", "divided", "hand_over", "keep", "prepared"]


def check_count(count: int, members: int) -> None:
    """Refuse to freeze all members."""
    if count >= members:
        raise ConfigError(f"{count} frozen members leave none of {members} to train; freeze fewer")


def divided(ensemble: Ensemble, count: int) -> tuple[Ensemble, Ensemble | None]:
    """The members that move, and the first `count`, which do not, both on the memory of the whole.

    The frozen ones run as in prediction, so that neither batch statistics nor dropout move them;
    they have networks of their own for it, since the others run as in training.
    """
    if count == 0:
        return ensemble, None
    check_count(count, ensemble.members)
    frozen = ensemble.slice_members(0, count)
    frozen.groups = [replace(g, skeleton=copy.deepcopy(g.skeleton).eval()) for g in frozen.groups]
    frozen.training = False
    return ensemble.slice_members(count, ensemble.members), frozen


_FIRST_OF_ALL = (torch.optim.Adam, torch.optim.SGD)
"""Optimisers whose weight decay is a part of the gradient."""


def hand_over(
    posterior: Posterior,
    repulsion: Repulsion | None,
    settings: Settings,
    optimizer: torch.optim.Optimizer,
) -> Posterior:
    """Let the optimiser apply the prior, and return the posterior without it.

    Where it cannot, because the prior's part of the velocity changes from step to step or someone
    looks at it, the posterior is returned as it was.
    """
    prior = posterior.prior
    if not isinstance(prior, Gaussian) or _is_needed(repulsion, settings):
        return posterior
    groups = optimizer.param_groups
    decoupled = any(group.get("decoupled_weight_decay") for group in groups)
    if type(optimizer) not in _FIRST_OF_ALL or decoupled:
        return posterior
    for group in groups:
        group["weight_decay"] += 1 / (posterior.n * prior.std**2)
    return replace(posterior, prior=Flat())


def _is_needed(repulsion: Repulsion | None, settings: Settings) -> bool:
    """Annealing and the Stein flow scale it; clipping and repulsion of weights measure it."""
    if settings.annealing is not None or settings.options.clip is not None:
        return True
    if repulsion is None:
        return False
    return repulsion.space.base == "weights" or isinstance(repulsion.flow, Stein)


AXES = "axes.safetensors"
"""Principal components, or other axes and units, in the folder of a run."""

_ROWS = 4096


def prepared(
    method: Method,
    batches: ArrayBatches | LoaderBatches,
    folder: Path | None,
    dtype: torch.dtype,
) -> tuple[Repulsion | None, Tree]:
    """The repulsion with axes and units as tensors where the members are, and those tensors.

    A run that is resumed reads those it began with.
    """
    repulsion = method.repulsion
    if repulsion is None or repulsion.space.base != "gradients":
        return repulsion, {}
    inputs = Inputs(lambda: _inputs(batches))
    device = batches.first()[0].device
    path = None if folder is None else folder / AXES
    if path is not None and path.exists() and needs_data(repulsion.space):
        tensors = read_tensors(path)
    else:
        tensors = learned(fitted(repulsion.space, inputs))
    tensors = {name: tensor.to(device, dtype).contiguous() for name, tensor in tensors.items()}
    return replace(repulsion, space=with_learned(repulsion.space, tensors)), tensors


def keep(folder: Path, axes: Tree) -> None:
    """Write the axes, if there are any, before the run is said to have begun."""
    if axes:
        write_tensors(folder / AXES, axes)


def _inputs(batches: ArrayBatches | LoaderBatches) -> Iterator[Tensor]:
    if isinstance(batches, ArrayBatches):
        yield from batches.x.split(_ROWS)
        return
    for x, _ in batches.sweep():
        yield x
