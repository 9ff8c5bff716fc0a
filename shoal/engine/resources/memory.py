"""Memory of a step: a limit, smaller chunks when memory runs out, and reuse of freed memory."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch

from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.storage.disk import machine_memory
from shoal.core.types import Tree
from shoal.engine.members.member_runner import MemberRunner

__all__ = [
    "KEPT_FREE",
    "MemoryLimit",
    "free_garbage_if_scarce",
    "free_memory",
    "garbage_kept",
    "keep_freed",
    "lifted",
    "smaller",
    "within_memory",
]

T = TypeVar("T")


def free_garbage_if_scarce(device: torch.device) -> None:
    """Let Python free cycles if less than half of a GPU's memory is left; it takes many steps."""
    free, total = torch.cuda.mem_get_info(device)
    if free < total / 2:
        gc.collect()


@contextmanager
def garbage_kept(device: torch.device | None = None) -> Iterator[None]:
    """A block in which Python frees no cycles: captures and measurements must not see it.

    With a GPU, cycles are freed before the block if its memory is scarce.
    """
    if device is not None:
        free_garbage_if_scarce(device)
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class MemoryLimit:
    """The most that a run may take on its device.

    On a GPU torch's allocator refuses more, and fewer members then run at a time. The limit does
    not count what the process held before the run, nor the driver's own memory. On a CPU nothing
    refuses: the limit holds as far as the footprint of a step is predicted.

    Attributes:
        bytes: the limit.
        device: the device.
    """

    def __init__(self, wanted: int | float, device: torch.device, own: int) -> None:
        """The limit from now on.

        Args:
            wanted: bytes, or a share of the device's memory up to 1.0.
            device: the device.
            own: bytes that the run holds already.
        """
        total = _total_memory(device)
        if isinstance(wanted, float) and total is None:
            raise ConfigError(
                f"the memory of {device} is unknown; give memory as a size such as '8GiB', "
                f"not as the share {wanted:g}"
            )
        self.bytes = int(wanted * (total or 0)) if isinstance(wanted, float) else wanted
        self.device, self._others = device, 0
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            self._others = torch.cuda.memory_reserved(device)
        self.include(own)

    def include(self, own: int) -> None:
        """Count bytes as the run's that were there before it."""
        self._others = max(0, self._others - own)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block in which the allocator refuses to exceed the limit."""
        total = _total_memory(self.device) or 1
        with self._allowed(min(1.0, (self._others + self.bytes) / total)):
            yield

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """A block in which it does not."""
        with self._allowed(1.0):
            yield

    def restart(self) -> None:
        """Return freed memory of a GPU to it, and measure `held` from now on."""
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    @property
    def held(self) -> int:
        """Most bytes of the run that a GPU's allocator has held since `restart`."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device) - self._others

    @property
    def exceeded(self) -> bool:
        """Whether the run holds more than the limit."""
        if self.device.type != "cuda":
            return False
        return torch.cuda.memory_reserved(self.device) - self._others > self.bytes

    @contextmanager
    def _allowed(self, share: float) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        torch.cuda.set_per_process_memory_fraction(share, self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)


def lifted(limit: MemoryLimit | None) -> AbstractContextManager:
    """A block without the limit: a capture must not fail, so that its size is checked after it."""
    return nullcontext() if limit is None else limit.lifted()


def _total_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return machine_memory() if device.type == "cpu" else None


def free_memory(device: torch.device) -> int | None:
    """Bytes that a GPU can still give to this process; None for other devices."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def within_memory(
    step: Callable[[MemberRunner], T],
    buffers: Tree,
    members: int,
    device: torch.device,
    mapping: MemberRunner,
    alone: bool = True,
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
        alone: no other process takes part; with others a step cannot restart on one of them.
    """
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or not alone:
        return step(mapping), mapping
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    while True:
        try:
            return step(mapping), mapping
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            mapping = smaller(mapping, members)
        for name, tensor in buffers.items():
            tensor.copy_(before[name])
        if device.type == "cuda":
            torch.cuda.empty_cache()


def smaller(mapping: MemberRunner, members: int) -> MemberRunner:
    """The member runner with chunks of half the size, with a warning."""
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

KEPT_FREE = 2**26
"""Bytes of freed memory that the C library then keeps at most: twice the largest block."""


def keep_freed() -> None:
    """Let the C library keep up to 64 MiB of freed memory for the next allocations.

    By default glibc returns memory as soon as twice its largest freed block is free, which happens
    at the end of most steps. The system then clears new pages in the next step, which takes longer
    than a matrix product. glibc adapts to the largest block it has freed: this function frees one
    large block, which is never written and costs nothing. Other C libraries ignore it.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
