"""Batch objects that only their network understands, such as batches of graphs."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import DataError

__all__ = [
    "Opaque",
    "OpaqueBatches",
    "by_point",
    "first_tensor",
    "is_batch_object",
    "tensors_in",
    "with_attribute",
]


class Opaque:
    """A batch object that only its network understands, such as a batch of graphs.

    Attributes:
        value: the object; it has a method `to(device)`.
        points: number of data points, which is that of the targets.
    """

    __slots__ = ("points", "value")

    def __init__(self, value: Any, points: int) -> None:
        self.value, self.points = value, points

    def original(self) -> Any:
        """The object."""
        return self.value

    def __len__(self) -> int:
        return self.points

    def __getitem__(self, rows: Any) -> "Opaque":
        if isinstance(rows, slice) and rows in (slice(None), slice(None, 2), slice(None, 1)):
            return self  # the first points are asked for only to try the network
        if isinstance(rows, slice) and rows == slice(None, 0):
            return Opaque(self.value, 0)  # no data, but their kind
        raise DataError(
            f"single data points of a {type(self.value).__name__} cannot be selected; "
            f"use a loader of such batches and a method that compares whole batches"
        )

    def split(self, size: int) -> Iterator["Opaque"]:
        """The object as one batch, whatever the size."""
        yield self

    def head(self, count: int) -> "Opaque":
        """The first batches with at most `count` data points, at least one batch."""
        return self

    def __repr__(self) -> str:
        return f"Opaque({type(self.value).__name__}, {self.points} points)"

    @property
    def shape(self) -> torch.Size:
        """The number of data points."""
        return torch.Size([self.points])

    @property
    def ndim(self) -> int:
        """One."""
        return 1

    @property
    def device(self) -> torch.device:
        """Device of the object's first tensor."""
        tensor = first_tensor(self.value)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def is_cuda(self) -> bool:
        """Whether the object is on a GPU."""
        return self.device.type == "cuda"

    def is_floating_point(self) -> bool:
        """False: an object is never converted."""
        return False

    def to(self, device: Any = None, *_: Any, **__: Any) -> "Opaque":
        """The object on a device."""
        if device is None or isinstance(device, torch.dtype):
            return self
        return Opaque(self.value.to(device), self.points)

    def cpu(self) -> "Opaque":
        """The object on the CPU."""
        return self.to("cpu")

    def detach(self) -> "Opaque":
        """The object itself."""
        return self


class OpaqueBatches(Opaque):
    """Several batches in order that are not one tensor, as the inputs of a whole data set.

    They are batch objects, or batches of sequences that are padded to different lengths.

    Attributes:
        batches: the batches, `Opaque` or structured inputs; `value` is the first.
    """

    __slots__ = ("batches",)

    def __init__(self, batches: Sequence[Any]) -> None:
        first = batches[0]
        value = first.value if isinstance(first, Opaque) else first
        super().__init__(value, sum(len(batch) for batch in batches))
        self.batches = list(batches)

    def __getitem__(self, rows: Any) -> Any:
        return self if rows == slice(None) else self.batches[0][rows]

    def original(self) -> Any:
        """Refused: a network takes one batch at a time."""
        raise DataError(f"a network takes one batch, not {self}; use split")

    def __repr__(self) -> str:
        return f"{len(self.batches)} batches of {type(self.value).__name__}, {self.points} points"

    def split(self, size: int) -> Iterator[Any]:
        """The batches as they are, whatever the size."""
        yield from self.batches

    def head(self, count: int) -> Opaque:
        """The first batches with at most `count` data points, at least one batch."""
        ends = accumulate(len(batch) for batch in self.batches)
        kept = sum(end <= count for end in ends)
        return OpaqueBatches(self.batches[: max(kept, 1)])

    def to(self, device: Any = None, *_: Any, **__: Any) -> "OpaqueBatches":
        """The objects on a device."""
        return OpaqueBatches([batch.to(device) for batch in self.batches])

    def tensors(self) -> Iterator[Tensor]:
        """All tensors of all batches."""
        for batch in self.batches:
            yield from tensors_in(batch)


def with_attribute(value: Any, name: str, tensor: Tensor) -> Any:
    """A copy of an object with another tensor of this name; it shares all others."""
    other = copy.copy(value)
    setattr(other, name, tensor)
    return other


def by_point(value: Any, rows: Tensor, points: int, fill: float, axis: int = 0) -> Tensor:
    """Rows [..., A, ...] of a batch object by data point [..., B, n, ...].

    The attribute `batch` [A] of the object says to which data point a row belongs, such as an atom
    to a molecule. Data points with fewer than n rows end in `fill`.

    Args:
        value: the object.
        rows: a tensor with A rows on `axis`.
        points: number of data points B.
        fill: what a data point without a row has.
        axis: the axis of the rows.

    >>> from types import SimpleNamespace
    >>> by_point(SimpleNamespace(batch=torch.tensor([0, 1, 1])), torch.arange(3.0), 2, -1.0)
    tensor([[ 0., -1.],
            [ 1.,  2.]])
    """
    owner, count = getattr(value, "batch", None), rows.shape[axis]
    if not isinstance(owner, Tensor):
        if count != points and points != 1:
            raise DataError(
                f"a {type(value).__name__} of {points} data points has {count} rows; it needs an "
                f"attribute `batch` with the data point of each row"
            )
        return rows if count == points > 1 else rows.unsqueeze(axis)
    owner = owner.to(rows.device)
    if len(owner) != count == points:
        return rows  # one row for every data point, such as a strain
    if len(owner) != count:
        raise DataError(
            f"the attribute `batch` of a {type(value).__name__} has {len(owner)} rows, "
            f"but the tensor has {count}"
        )
    counts, order = owner.bincount(minlength=points), owner.argsort(stable=True)
    place = torch.empty_like(owner)
    starts = counts.cumsum(0) - counts
    place[order] = torch.arange(count, device=rows.device) - starts[owner[order]]
    most = int(counts.max())
    index = owner * most + place
    shape = [*rows.shape[:axis], points * most, *rows.shape[axis + 1 :]]
    filled = rows.new_full(shape, fill).index_copy(axis, index, rows)
    return filled.unflatten(axis, (points, most))


def is_batch_object(value: Any) -> bool:
    """Whether a value is an object that can be moved to a device, such as a batch of graphs."""
    if isinstance(value, Tensor) or hasattr(value, "__array__"):
        return False
    return callable(getattr(value, "to", None)) and first_tensor(value) is not None


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in an object; None without any."""
    return next(tensors_in(value), None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in an object, in the order of its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, OpaqueBatches):
        yield from value.tensors()
    elif isinstance(value, Opaque):
        yield from tensors_in(value.value)
    else:
        for item in _inside(value):
            if isinstance(item, (Tensor, Mapping, tuple, list)):
                yield from tensors_in(item)


def _inside(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list)):
        return value
    if hasattr(value, "to_dict"):  # graph libraries store tensors outside of __dict__
        return list(value.to_dict().values())
    if isinstance(getattr(value, "tensors", None), Mapping):  # structured inputs
        return list(value.tensors.values())
    return list(getattr(value, "__dict__", {}).values())
