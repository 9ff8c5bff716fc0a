"""Transfers between host and GPU that run beside the computation.

Inputs of the next batch go to the GPU, and outputs of the last batch come back, while the present
batch is computed (`through_gpu`). Both need streams of their own: a copy waits for earlier work on
its stream. Blocks of tensors that live on the host come and go in the same way (`BlockTransfer`):
a pass visits one block after another, between pinned memory and two slots on the GPU. On a CPU a
block is a copy.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.opaque import tensors_in
from shoal.core.structure import Inputs

__all__ = ["BlockTransfer", "CpuTransfer", "GpuTransfer", "block_transfer", "through_gpu"]


def through_gpu(
    batches: Iterable[Inputs],
    compute: Callable[[Inputs], Tensor],
    device: torch.device,
) -> Iterator[Tensor]:
    """Outputs of each batch in pinned memory of the host, in order, one batch late.

    A yielded tensor is overwritten two batches later: copy it before the next one.

    Args:
        batches: inputs, on any device.
        compute: from inputs on the GPU to outputs.
        device: the GPU.
    """
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)
    buffers: deque[Tensor] = deque(maxlen=2)
    waiting: tuple[Tensor, torch.cuda.Event] | None = None
    for batch in batches:
        outputs = compute(_uploaded(batch, device, up))
        coming = _downloading(outputs, _buffer(buffers, outputs), down)
        if waiting is not None:
            yield _arrived(*waiting)
        waiting = coming
    if waiting is not None:
        yield _arrived(*waiting)


def _uploaded(x: Inputs, device: torch.device, stream: torch.cuda.Stream) -> Inputs:
    here = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        moved = x.to(device, non_blocking=True)
    here.wait_stream(stream)
    for tensor in tensors_in(moved):
        if tensor.is_cuda:
            tensor.record_stream(here)
    return moved


def _buffer(buffers: deque[Tensor], outputs: Tensor) -> Tensor:
    """One of two pinned buffers in turn, in the shape of the outputs."""
    old = buffers.popleft() if len(buffers) == 2 else None
    if old is None or old.dtype != outputs.dtype or old.numel() < outputs.numel():
        old = torch.empty(outputs.numel(), dtype=outputs.dtype, pin_memory=True)
    buffers.append(old)
    return old[: outputs.numel()].view(outputs.shape)


def _downloading(
    outputs: Tensor, buffer: Tensor, stream: torch.cuda.Stream
) -> tuple[Tensor, torch.cuda.Event]:
    stream.wait_stream(torch.cuda.current_stream(outputs.device))
    with torch.cuda.stream(stream):
        buffer.copy_(outputs, non_blocking=True)
        outputs.record_stream(stream)
        done = torch.cuda.Event()
        done.record()
    return buffer, done


def _arrived(buffer: Tensor, done: torch.cuda.Event) -> Tensor:
    done.synchronize()
    return buffer


Block = Sequence[Tensor]
"""Tensors on the host: rows or columns of the tensors of all members."""

_ALIGNED = 512

_ROWS = 8
"""Rows that are copied from or to a file at a time."""


class BlockTransfer(Protocol):
    """Moves blocks between the host and a device.

    Attributes:
        slots: number of blocks that are on the device at a time.
    """

    slots: int

    def visit(self, blocks: Sequence[Block]) -> Iterator[list[Tensor]]:
        """Copies of the blocks on the device, one after another.

        A copy is valid until the next one is asked for. Blocks of one pass must not overlap. Only
        one pass runs at a time.
        """
        ...

    def store(self, host: Tensor, value: Tensor) -> None:
        """Copy a value of the device to its place on the host; for a block that is being visited.

        The copy is complete after `flush`. Later passes see it in any case.
        """
        ...

    def flush(self) -> None:
        """Wait until everything is stored."""
        ...


def block_transfer(
    device: torch.device, paged: bool, release: Callable[[Tensor], None]
) -> BlockTransfer:
    """The transfer for a device.

    Args:
        device: device of the computation.
        paged: tensors of the host are not pinned, as those of a file are.
        release: called with host tensors that are not needed for a while.
    """
    if device.type == "cuda":
        return GpuTransfer(device, paged, release)
    return CpuTransfer(device, paged, release)


class CpuTransfer:
    """Copies of blocks, made when they are needed; for devices without streams."""

    slots = 1

    def __init__(
        self, device: torch.device, paged: bool, release: Callable[[Tensor], None]
    ) -> None:
        self.device, self.paged, self.release = device, paged, release

    def visit(self, blocks: Sequence[Block]) -> Iterator[list[Tensor]]:
        """See `BlockTransfer`."""
        for block in blocks:
            copies = []
            for tensor in block:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                self._copy(copy, tensor.detach(), tensor)
                copies.append(copy)
            yield copies

    def store(self, host: Tensor, value: Tensor) -> None:
        """See `BlockTransfer`."""
        self._copy(host.detach(), value.detach(), host)

    def flush(self) -> None:
        """Every store is complete when it returns."""

    def _copy(self, target: Tensor, source: Tensor, host: Tensor) -> None:
        """Copy some rows at a time: the system reads more of a file than it is asked for."""
        size = _ROWS if self.paged else max(len(host), 1)
        pieces = zip(target.split(size), source.split(size), host.split(size), strict=True)
        for to, rows, kept in pieces:
            to.copy_(rows)
            self.release(kept)


class GpuTransfer:
    """Blocks through two slots of a GPU, beside the computation.

    The streams wait for each other by events, and the host waits for none of them. A slot is filled
    again when the computation of its last block and the copies to the host are done. Pinned memory
    is read and written by the GPU. Other memory goes through pinned copies: the host makes them
    while the GPU computes the block that has just been launched.
    """

    slots = 2

    def __init__(
        self, device: torch.device, paged: bool, release: Callable[[Tensor], None]
    ) -> None:
        self.device, self.paged, self.release = device, paged, release
        self.up, self.down = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.both = [_Slot(device), _Slot(device)]
        self.waiting: list[tuple[Tensor, Tensor, torch.cuda.Event]] = []
        self.busy = False

    def visit(self, blocks: Sequence[Block]) -> Iterator[list[Tensor]]:
        """See `BlockTransfer`."""
        assert not self.busy, "one pass over the blocks at a time"
        self.busy = True
        here, count = torch.cuda.current_stream(self.device), len(blocks)
        try:
            self._arrived()
            self.up.wait_stream(self.down)  # earlier passes may have stored these blocks
            largest = max((_bytes(block) for block in blocks), default=0)
            for slot in self.both[: min(count, 2)]:
                slot.make_room(largest, here, self.up, self.down)
            coming = self._fetched(blocks[0], self.both[0]) if count else []
            for number in range(count):
                slot, present = self.both[number % 2], coming
                following = number + 1 < count
                if following and not self.paged:
                    coming = self._fetched(blocks[number + 1], self.both[1 - number % 2])
                here.wait_event(slot.filled)
                before = len(self.waiting)
                yield present
                slot.used.record(here)
                slot.stored.record(self.down)
                if following and self.paged:
                    coming = self._fetched(blocks[number + 1], self.both[1 - number % 2])
                    self._arrived(keep=len(self.waiting) - before)
        finally:
            for slot in self.both:
                slot.used.record(here)
                slot.stored.record(self.down)
            self.busy = False

    def store(self, host: Tensor, value: Tensor) -> None:
        """See `BlockTransfer`."""
        host, value = host.detach(), value.detach()
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        target = torch.empty(host.shape, dtype=host.dtype, pin_memory=True) if self.paged else host
        with torch.cuda.stream(self.down):
            _copy(target, value)
            value.record_stream(self.down)
        if self.paged:
            done = torch.cuda.Event()
            done.record(self.down)
            self.waiting.append((host, target, done))

    def flush(self) -> None:
        """Wait until everything is stored."""
        self._arrived()
        self.down.synchronize()

    def _fetched(self, block: Block, slot: "_Slot") -> list[Tensor]:
        self.up.wait_event(slot.used)
        self.up.wait_event(slot.stored)
        copies = slot.tensors(block)
        for tensor, copy in zip(block, copies, strict=True):
            source = tensor.detach()
            if self.paged:
                source = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                source.copy_(tensor.detach())
                self.release(tensor)
            with torch.cuda.stream(self.up):
                _copy(copy, source)
        slot.filled.record(self.up)
        return copies

    def _arrived(self, keep: int = 0) -> None:
        """Copy what has come to pinned memory to its place; the last `keep` may still be coming."""
        ready = len(self.waiting) - keep
        for host, pinned, done in self.waiting[:ready]:
            done.synchronize()
            host.copy_(pinned)
            self.release(host)
        del self.waiting[:ready]


class _Slot:
    """Memory of a GPU for one block, with the events of its use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.filled, self.used, self.stored = (torch.cuda.Event() for _ in range(3))

    def make_room(self, size: int, here: torch.cuda.Stream, *others: torch.cuda.Stream) -> None:
        if size <= len(self.memory):
            return
        for stream in others:  # the old memory is free after their work
            self.memory.record_stream(stream)
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        for stream in others:  # the new memory was free after the work of this stream
            stream.wait_stream(here)

    def tensors(self, block: Block) -> list[Tensor]:
        """Tensors in the shape of the block."""
        tensors, start = [], 0
        for tensor in block:
            size = tensor.numel() * tensor.element_size()
            # `data`: each tensor counts its changes alone, as autograd expects of running
            # statistics beside weights.
            flat = self.memory[start : start + size].data.view(tensor.dtype)
            tensors.append(flat.view(tensor.shape).data)
            start += _aligned(size)
        return tensors


def _bytes(block: Block) -> int:
    return sum(_aligned(tensor.numel() * tensor.element_size()) for tensor in block)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy without waiting; columns go row by row, since a row is one piece of memory."""
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    for to, row in zip(target, source, strict=True):
        to.copy_(row, non_blocking=True)
