"""Work that runs at the same time on a GPU; on a CPU everything here does nothing.

Streams of their own belong to each stream that work branches off from, so that two branches never
wait for each other.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["lanes"]


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
