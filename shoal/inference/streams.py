"""Work that runs at the same time on a GPU; on a CPU everything here does nothing.

Streams of their own belong to each stream that work branches off from, so that two branches never
wait for each other.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["lanes", "open_queues"]

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


def open_queues(device: torch.device | str | None) -> None:
    """Before the first work on a GPU, ask its driver for 32 queues instead of 8.

    Members run side by side on several streams, and those that share a queue wait for each other.
    The driver reads the variable when it starts: afterwards, and where somebody has chosen a
    number, nothing is changed.
    """
    on_gpu = device is not None and str(device).startswith("cuda")
    if on_gpu and not torch.cuda.is_initialized():
        os.environ.setdefault(QUEUES, "32")


@contextmanager
def lanes(count: int, device: torch.device, read: Sequence[Tensor]) -> Iterator[list]:
    """Side streams that start after what has been queued, and that everything later waits for.

    Args:
        count: how many.
        device: where the work runs.
        read: what was made here and is read on the side streams, now or in a backward pass.
    """
    if count == 1 or device.type != "cuda":
        yield [None]
        return
    here = torch.cuda.current_stream(device)
    sides = _sides(here, count)
    for side in sides:
        side.wait_stream(here)
        # Backward passes read these after the host has let go of them: without a note of it,
        # what is made here meanwhile would be given the same memory.
        for tensor in read:
            tensor.record_stream(side)
    yield sides
    for side in sides:
        here.wait_stream(side)


@functools.lru_cache(maxsize=16)
def _sides(here: torch.cuda.Stream, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(here.device) for _ in range(count)]
