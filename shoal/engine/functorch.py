"""What `torch.func` hides: the tensors of all members inside `vmap`."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["functorch", "unwrapped"]

functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009


def unwrapped(tensor: Tensor, level: int | None) -> tuple[Tensor, Any]:
    """The tensor of all members and the place of its member axis; None without such an axis."""
    if level is None or not functorch.is_batchedtensor(tensor):
        return tensor, None
    return functorch._unwrap_batched(tensor, level)
