"""Counts the memory that autograd keeps between a forward and its backward pass."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SavedBytes", "counted"]


class SavedBytes:
    """Counts the bytes that autograd saves for backward passes, inside a `with` block.

    A saved tensor counts by its memory, once, from the forward pass until its backward pass. Known
    tensors, such as weights and inputs, do not count.

    >>> x, w = torch.ones(8, 4), torch.ones(4, 4, requires_grad=True)
    >>> with SavedBytes([x, w]) as saved:
    ...     y = ((x @ w).tanh() @ w).sum()
    >>> saved.peak  # the outputs of tanh, in single precision
    128
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self.known = {_place(tensor) for tensor in known}
        self.alive: dict[int, int] = {}
        self.now = self.peak = self.largest = 0

    def __enter__(self) -> "SavedBytes":
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Saved(self, tensor), lambda saved: saved.tensor
        )
        self._hooks.__enter__()
        _counting.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _counting.remove(self)
        self._hooks.__exit__(*exception)

    def add(self, place: int, size: int) -> None:
        """One more reference to memory."""
        self.alive[place] = self.alive.get(place, 0) + 1
        if self.alive[place] == 1:
            self.now += size
            self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)

    def remove(self, place: int, size: int) -> None:
        """One reference less."""
        self.alive[place] -= 1
        if not self.alive[place]:
            self.now -= size


_counting: list[SavedBytes] = []
"""The open counts."""


class _Saved:
    """A tensor that autograd saved; autograd deletes this object after the backward pass."""

    __slots__ = ("counts", "place", "size", "tensor", "to")

    def __init__(self, to: SavedBytes, tensor: Tensor) -> None:
        # Detached: an output that holds its own graph would never be deleted.
        self.to, self.tensor, self.place = to, tensor.detach(), _place(tensor)
        self.size = tensor.untyped_storage().nbytes()
        self.counts = self.place not in to.known
        if self.counts:
            to.add(self.place, self.size)

    def __del__(self) -> None:
        if self.counts:
            self.to.remove(self.place, self.size)


def counted(tensors: Iterable[Tensor]) -> list[object]:
    """Objects that let open counts count these tensors, as long as the objects exist.

    For tensors that are kept for the backward pass by other means than autograd's.
    """
    return [_Saved(_counting[-1], tensor) for tensor in tensors if _counting]


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
