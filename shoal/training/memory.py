"""When memory runs out: fewer members at a time, with the same result."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from shoal.core.errors import DataError, ShoalWarning
from shoal.core.types import Tree
from shoal.inference.mapping import Mapping

__all__ = ["within_memory"]

T = TypeVar("T")


def within_memory(
    step: Callable[[Mapping], T],
    buffers: Tree,
    members: int,
    device: torch.device,
    mapping: Mapping,
) -> tuple[T, Mapping]:
    """The step's result, and the mapping that fitted into memory.

    Each time memory runs out the members go through the networks in chunks of half the size, from
    the running statistics they had before; everything else of a step is computed anew anyway.

    Args:
        step: computes one step.
        buffers: running statistics that it changes in place.
        members: how many there are.
        device: where they are.
        mapping: how they are to run.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing:
        return step(mapping), mapping
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    while True:
        try:
            return step(mapping), mapping
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            mapping = _smaller(mapping, members)
        for name, tensor in buffers.items():
            tensor.copy_(before[name])
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _smaller(mapping: Mapping, members: int) -> Mapping:
    now = members if mapping.chunk is None else min(mapping.chunk, members)
    if now == 1:
        raise DataError("there is not enough memory for one member; make batch_size smaller")
    chunk = (now + 1) // 2
    warnings.warn(
        f"memory ran out with {now} members at a time: they go in chunks of {chunk} from here on",
        ShoalWarning,
        stacklevel=3,
    )
    return replace(mapping, chunk=chunk)


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
