"""Outputs of one batch after another in one tensor, without a second copy of the whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.errors import DataError

__all__ = ["CollectedOutputs", "SoundMembers"]


_CHUNK = 1 << 26
"""Bytes of a part, if the length is unknown; the C library gives such blocks back at once."""


class CollectedOutputs:
    """Outputs of members [M, N, ..., C] in memory.

    With a known number of data points the tensor is made once, and batches are copied to their
    places. Otherwise there are parts, and each is freed as soon as it is copied to the result.

    >>> outputs = CollectedOutputs(count=5)
    >>> for batch in torch.arange(5.0).view(1, 5, 1).split(2, dim=1):
    ...     outputs.add(batch)
    >>> outputs.finish([0]).flatten()
    tensor([0., 1., 2., 3., 4.])

    Args:
        count: expected number of data points; None if unknown.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = count or 0
        self.parts: list[Tensor] = []
        self.filled = 0  # data points in the last part

    def add(self, outputs: Tensor) -> None:
        """Take the outputs of the next batch [M, B, ..., C]; a pinned buffer may then change."""
        batch, done = outputs.shape[1], 0
        if not self.parts and batch == self.count:
            self.parts = [outputs.to(_kept_type(outputs), copy=outputs.is_pinned())]
            self.filled = done = batch
        while done < batch:
            if not self.parts or self.filled == self.parts[-1].shape[1]:
                self._more(outputs)
            last = self.parts[-1]
            count = min(batch - done, last.shape[1] - self.filled)
            last[:, self.filled : self.filled + count] = outputs[:, done : done + count]
            self.filled, done = self.filled + count, done + count

    def _more(self, outputs: Tensor) -> None:
        members, batch, *rest = outputs.shape
        dtype = _kept_type(outputs)
        rows = _CHUNK // max(members * torch.Size(rest).numel() * dtype.itemsize, 1)
        rows = self.count if self.count and not self.parts else max(rows, batch)
        self.parts.append(outputs.new_empty(members, rows, *rest, dtype=dtype))
        self.filled = 0

    def finish(self, kept: Sequence[int]) -> Tensor:
        """The outputs of some members, in the given increasing order."""
        whole = self._joined()
        if len(kept) == len(whole):
            return whole
        for new, old in enumerate(kept):  # a copy of the whole would double the memory
            if new != old:
                whole[new] = whole[old]
        return whole[: len(kept)]

    def _joined(self) -> Tensor:
        parts, self.parts = self.parts[::-1], []
        parts[0] = parts[0][:, : self.filled]
        if len(parts) == 1:
            return parts[0].contiguous()
        members, _, *rest = parts[0].shape
        joined = parts[0].new_empty(members, sum(part.shape[1] for part in parts), *rest)
        start = 0
        while parts:
            part = parts.pop()
            joined[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return joined


def _kept_type(outputs: Tensor) -> torch.dtype:
    return torch.float64 if outputs.dtype == torch.float64 else torch.float32


class SoundMembers:
    """Which members are finite, found batch by batch; a logit of -inf is allowed."""

    def __init__(self) -> None:
        self.sound: Tensor | None = None
        self.shape: torch.Size | None = None

    def see(self, outputs: Tensor) -> None:
        """Look at the outputs of a batch [M, B, ..., C], and refuse another shape than before."""
        if self.shape is not None and outputs.shape[2:] != self.shape:
            raise DataError(
                "the batches give outputs of different shapes, such as sequences of different "
                "lengths; pad the inputs to one length, or predict one batch at a time"
            )
        self.shape = outputs.shape[2:]
        finite = (outputs < torch.inf).flatten(1).all(-1)
        self.sound = finite if self.sound is None else self.sound & finite
