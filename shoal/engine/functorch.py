"""What torch hides: the tensors of all members inside `vmap`, and the cost of own gradients."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import Function

__all__ = ["Operation", "functorch", "unwrapped"]

functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009


def unwrapped(tensor: Tensor, level: int | None) -> tuple[Tensor, Any]:
    """The tensor of all members and the place of its member axis; None without such an axis."""
    if level is None or not functorch.is_batchedtensor(tensor):
        return tensor, None
    return functorch._unwrap_batched(tensor, level)


class Operation(Function):
    """A function with its own gradient, whose `forward` has no defaults.

    At every call torch finds the signature of `forward` and binds the arguments to it, for defaults
    and names. That takes longer than the rest of the call. So the signature is kept, and outside of
    `vmap` and the like nothing is bound.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward: Any = cls.forward
        forward.__signature__ = inspect.signature(forward)

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """See `torch.autograd.Function`."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        plain: Any = super(Function, cls)
        return plain.apply(*unwrap_dead_wrappers(args))
