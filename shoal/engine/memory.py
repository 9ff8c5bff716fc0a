"""Memory of a step: fewer members at a time when it runs out, and freed blocks that are kept."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from shoal.core.errors import DataError, ShoalWarning
from shoal.core.types import Tree
from shoal.engine.member_runner import MemberRunner

__all__ = ["keep_freed", "within_memory"]

T = TypeVar("T")


def within_memory(
    step: Callable[[MemberRunner], T],
    buffers: Tree,
    members: int,
    device: torch.device,
    mapping: MemberRunner,
) -> tuple[T, MemberRunner]:
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


def _smaller(mapping: MemberRunner, members: int) -> MemberRunner:
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


_LARGEST = 2**25 - 2**14
"""Bytes in the largest block that glibc learns from, less room for its own notes."""


def keep_freed() -> None:
    """Let the C library keep up to 64 MiB that have been freed, for what is allocated next.

    Otherwise glibc gives memory back as soon as twice its largest block so far lies free, which is
    at the end of most steps. In the next step the system has to find and clear it again page by
    page, which takes longer than a matrix product writes to it. The C library goes by the largest
    block that it has seen freed: this is one, which costs nothing since nobody touches it. With
    other C libraries nothing happens.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
