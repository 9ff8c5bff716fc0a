"""Work that runs at the same time on a GPU; on a CPU everything here does nothing.

Streams of their own belong to each stream that work branches off from, so that two branches never
wait for each other.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Branch", "lanes"]


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


class Branch:
    """A block of work beside what follows it, until it is joined.

    What was made before the block and is read in it has to be held until then.

    >>> branch = Branch(torch.device("cpu"))
    >>> with branch:
    ...     product = torch.ones(2) @ torch.ones(2)
    >>> branch.join()

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._here = torch.cuda.current_stream(device) if on_gpu else None
        self._side = None if self._here is None else _sides(self._here, 1)[0]
        self._block = torch.cuda.stream(self._side)

    def __enter__(self) -> None:
        if self._here is not None and self._side is not None:
            self._side.wait_stream(self._here)
        self._block.__enter__()

    def __exit__(self, *error: object) -> None:
        self._block.__exit__(*error)

    def join(self) -> None:
        """Wait for the block."""
        if self._here is not None and self._side is not None:
            self._here.wait_stream(self._side)


@functools.lru_cache(maxsize=16)
def _sides(here: torch.cuda.Stream, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(here.device) for _ in range(count)]
