"""What torch hides: the tensors of all members inside `vmap`, and the cost of own gradients."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["Operation", "functorch", "unwrapped"]

functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009


def unwrapped(tensor: Tensor, level: int | None) -> tuple[Tensor, Any]:
    """The tensor of all members and the place of its member axis; None without such an axis."""
    if level is None or not functorch.is_batchedtensor(tensor):
        return tensor, None
    return functorch._unwrap_batched(tensor, level)


class Operation(Function):
    """A function with its own gradient.

    At every call torch asks for the signature of `forward`. To find it takes longer than the rest
    of the call, so it is kept.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward: Any = cls.forward
        forward.__signature__ = inspect.signature(forward)
