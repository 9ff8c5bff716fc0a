"""Memory of a step: smaller chunks when memory runs out, and reuse of freed memory."""

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
    """The step's result, and the member runner that fitted into memory.

    Each time memory runs out, the step restarts with chunks of half the size and the previous
    running statistics.

    Args:
        step: computes one step.
        buffers: running statistics that the step changes in place.
        members: number of members.
        device: device of the members.
        mapping: the member runner to start with.
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
        raise DataError("memory is too small for one member; lower batch_size")
    chunk = (now + 1) // 2
    warnings.warn(
        f"memory ran out with {now} members at a time: members now run in chunks of {chunk}",
        ShoalWarning,
        stacklevel=3,
    )
    return replace(mapping, chunk=chunk)


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)


_LARGEST = 2**25 - 2**14
"""Bytes of the largest block that glibc adapts to, minus its header."""


def keep_freed() -> None:
    """Let the C library keep up to 64 MiB of freed memory for the next allocations.

    By default glibc returns memory as soon as twice its largest freed block is free, which happens
    at the end of most steps. The system then clears new pages in the next step, which takes longer
    than a matrix product. glibc adapts to the largest block it has freed: this function frees one
    large block, which is never written and costs nothing. Other C libraries ignore it.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
