"""What a repulsion takes from the training data, found once and kept beside the run."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shoal.core.files import read_tensors, write_tensors
from shoal.core.types import Tree
from shoal.data.sources import ArrayBatches, LoaderBatches
from shoal.interaction.bases import Inputs
from shoal.interaction.fitting import fitted, learned, needs_data, with_learned
from shoal.interaction.methods import Method
from shoal.interaction.repulsion import Repulsion

__all__ = ["AXES", "keep", "prepared"]

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
