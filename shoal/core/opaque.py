"""Batch objects that only their network understands, such as batches of graphs."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import DataError

__all__ = ["Opaque", "first_tensor", "is_batch_object"]


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
        raise DataError(
            f"single data points of a {type(self.value).__name__} cannot be selected; "
            f"use a loader of such batches and a method that compares whole batches"
        )

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
        found = first_tensor(self.value)
        return torch.device("cpu") if found is None else found.device

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


def is_batch_object(value: Any) -> bool:
    """Whether a value is an object that can be moved to a device, such as a batch of graphs."""
    if isinstance(value, Tensor) or hasattr(value, "__array__"):
        return False
    return callable(getattr(value, "to", None)) and first_tensor(value) is not None


def first_tensor(value: Any) -> Tensor | None:
    """The first tensor in an object; None without any."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list)):
        inside = value
    elif hasattr(value, "to_dict"):  # graph libraries store tensors outside of __dict__
        inside = value.to_dict().values()
    else:
        inside = getattr(value, "__dict__", {}).values()
    for item in inside:
        if isinstance(item, (Tensor, Mapping, tuple, list)):
            found = first_tensor(item)
            if found is not None:
                return found
    return None
