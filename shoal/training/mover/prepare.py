"""Preparation of a run before its first step.

`destination` finds device and type of the members. `divided` separates frozen from trained members.
`prior_as_weight_decay` lets the optimiser apply a Gaussian prior. `prepared` and `keep` fit and
store the axes of the repulsion's space, and the statistics of its points.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.devices import usable_device
from shoal.core.errors import ConfigError
from shoal.core.opaque import first_tensor
from shoal.core.registry import nearest
from shoal.core.storage.files import read_tensors, write_tensors
from shoal.core.structure import Inputs as AnyInputs
from shoal.core.types import Tree
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import tracked_input
from shoal.inference.posterior import Posterior
from shoal.inference.priors import Flat, Gaussian
from shoal.interaction.axes import Inputs, fitted, learned, needs_data, with_learned
from shoal.interaction.flows import Stein
from shoal.interaction.methods import Method
from shoal.interaction.points import Batch
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import innermost
from shoal.training.options.optim import kind_of
from shoal.training.options.points import needs_statistics, placed, statistics
from shoal.training.options.settings import Settings

__all__ = [
    "AXES",
    "PRECISIONS",
    "Fitted",
    "check_count",
    "destination",
    "divided",
    "keep",
    "nothing_to_prepare",
    "prepared",
    "prior_as_weight_decay",
]


PRECISIONS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "tf32": torch.float32,
    "bfloat16": torch.float32,
}
"""Type of the weights. With "tf32" and "bfloat16" only the networks use lower precision."""


def destination(
    ensemble: Any, device: torch.device | str | None, precision: str | None
) -> tuple[torch.device, torch.dtype]:
    """Device and type in which the members train."""
    if not isinstance(ensemble, Ensemble):
        raise ConfigError(
            f"fit trains an Ensemble, not a {type(ensemble).__name__}; "
            f"type: Ensemble.init(build, members=5)"
        )
    if precision is not None and not (isinstance(precision, str) and precision in PRECISIONS):
        raise ConfigError(
            f"there is no precision '{' '.join(str(precision).split())[:40]}'; "
            f"{nearest(str(precision), PRECISIONS)}"
        )
    dtype = ensemble.dtype if precision is None else PRECISIONS[precision]
    return ensemble.device if device is None else usable_device(device), dtype


def check_count(count: int, members: int) -> None:
    """Refuse to freeze all members."""
    if count >= members:
        raise ConfigError(f"{count} frozen members leave none of {members} to train; freeze fewer")


def divided(ensemble: Ensemble, count: int) -> tuple[Ensemble, Ensemble | None]:
    """The trained members, and the first `count` members, frozen; both on the ensemble's memory.

    Frozen members run in evaluation mode, so batch statistics and dropout do not change them. They
    have networks of their own, since the trained members run in training mode. Tensors that all
    members share are frozen too: moving them would change the frozen members.
    """
    if count == 0:
        return ensemble, None
    check_count(count, ensemble.members)
    frozen = ensemble.slice_members(0, count)
    frozen.groups = [replace(g, skeleton=copy.deepcopy(g.skeleton).eval()) for g in frozen.groups]
    frozen.training = False
    moving = ensemble.slice_members(count, ensemble.members)
    for group in moving.groups:
        group.shared = {name: tensor.detach() for name, tensor in group.shared.items()}
    return moving, frozen


_FIRST_OF_ALL = (torch.optim.Adam, torch.optim.SGD)
"""Optimisers that add weight decay to the gradient."""


def prior_as_weight_decay(
    posterior: Posterior,
    repulsion: Repulsion | None,
    settings: Settings,
    optimizer: torch.optim.Optimizer,
) -> Posterior:
    """Let the optimiser apply the prior, and return the posterior without prior.

    The posterior is returned unchanged if the prior's share of the velocity varies between steps,
    or if another stage needs it.
    """
    prior = posterior.prior
    if not isinstance(prior, Gaussian) or _is_needed(repulsion, settings):
        return posterior
    groups = optimizer.param_groups
    decoupled = any(group.get("decoupled_weight_decay") for group in groups)
    if kind_of(optimizer) not in _FIRST_OF_ALL or decoupled:
        return posterior
    for group in groups:
        group["weight_decay"] += 1 / (posterior.n * prior.std**2)
    return replace(posterior, prior=Flat())


def _is_needed(repulsion: Repulsion | None, settings: Settings) -> bool:
    """Whether a stage needs the prior's gradient.

    Annealing and the Stein flow scale it; clipping and repulsion of weights measure it.
    """
    if settings.annealing is not None or settings.options.clip is not None:
        return True
    if repulsion is None:
        return False
    return repulsion.space.base == "weights" or isinstance(repulsion.flow, Stein)


AXES = "axes.safetensors"
"""File of the fitted axes and units, and of statistics, in the folder of a run."""

SHARED = "shared.safetensors"
"""File of the frozen tensors that all members share."""

_ROWS = 4096


def prepared(
    method: Method,
    batches: ArrayBatches | LoaderBatches,
    folder: Path | None,
    dtype: torch.dtype,
    known: "Fitted | None" = None,
) -> tuple[Repulsion | None, Tree]:
    """The repulsion with axes, units and statistics as tensors on the members' device, and these.

    A resumed run reads the tensors that it began with.

    Args:
        method: the method.
        batches: the training data.
        folder: folder of the run; None for a run in memory.
        dtype: type of the weights.
        known: what was fitted to these data before; it grows.
    """
    repulsion = method.repulsion
    if repulsion is None or nothing_to_prepare(repulsion):
        return repulsion, {}
    device = batches.first()[0].device
    path = None if folder is None else folder / AXES
    fits = needs_data(repulsion.space) or needs_statistics(repulsion.points)
    if path is not None and path.exists() and fits:
        tensors = read_tensors(path)
    else:
        tensors = (Fitted() if known is None else known).tensors(repulsion, batches)
    tensors = {name: tensor.to(device, dtype).contiguous() for name, tensor in tensors.items()}
    space = repulsion.space
    if space.base == "gradients":
        space = with_learned(space, tensors)
    points = placed(repulsion.points, tensors, device, dtype)
    return replace(repulsion, space=space, points=points), tensors


class Fitted:
    """Axes, units and statistics that were fitted to the same data, for runs that differ in more.

    The trials of a search train several strengths in one space: decomposing the covariance of
    inputs with thousands of coordinates takes longer than many of their steps.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Any, Any, Tree]] = []

    def tensors(self, repulsion: Repulsion, batches: ArrayBatches | LoaderBatches) -> Tree:
        """The tensors of this repulsion's space and points; a loader may differ at each reading."""
        space, points = repulsion.space, repulsion.points
        for known_space, known_points, tensors in self._known:
            if known_space is space and known_points is points:
                return tensors
        tensors = _fitted(repulsion, batches)
        if isinstance(batches, ArrayBatches):
            self._known.append((space, points, tensors))
        return tensors


def nothing_to_prepare(repulsion: Repulsion) -> bool:
    """Whether the repulsion has neither axes of input gradients nor points of its own."""
    return repulsion.space.base != "gradients" and isinstance(repulsion.points, Batch)


def _fitted(repulsion: Repulsion, batches: ArrayBatches | LoaderBatches) -> Tree:
    """Axes and units of the space, and statistics of the points, by name."""
    tensors = statistics(repulsion.points, lambda: _parts(batches))
    if repulsion.space.base != "gradients":
        return tensors
    name = innermost(repulsion.space).gradients_of
    return tensors | learned(fitted(repulsion.space, Inputs(lambda: _inputs(batches, name))))


def keep(folder: Path, axes: Tree, shared: Tree) -> None:
    """Write axes, statistics and frozen shared tensors, if any, before the run's config."""
    for name, tensors in ((AXES, axes), (SHARED, shared)):
        if tensors:
            write_tensors(folder / name, {key: t.detach() for key, t in tensors.items()})


def _parts(batches: ArrayBatches | LoaderBatches) -> Iterator[AnyInputs]:
    arrays = isinstance(batches, ArrayBatches)
    yield from batches.x.split(_ROWS) if arrays else (x for x, _ in batches.sweep())


def _inputs(batches: ArrayBatches | LoaderBatches, name: str | None) -> Iterator[Tensor]:
    for x in _parts(batches):
        tracked = tracked_input(x, name)
        # Tokens of a structure are as little real as tokens alone, which the axes refuse.
        yield first_tensor(x) if tracked is None else tracked[1]  # pyright: ignore
