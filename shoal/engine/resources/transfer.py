"""Transfers between host and GPU that run beside the computation.

Inputs of the next batch go to the GPU, and outputs of the last batch come back, while the present
batch is computed. Both need streams of their own: a copy waits for earlier work on its stream.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from shoal.core.opaque import tensors_in
from shoal.core.structure import Inputs

__all__ = ["through_gpu"]


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
