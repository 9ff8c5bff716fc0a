"""Arithmetic on lists of tensors: on a GPU one kernel for all of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["add", "mul"]

_torch: Any = torch


def add(ours: Sequence[Tensor], others: Sequence[Tensor], alpha: float = 1.0) -> list[Tensor]:
    """a + alpha b for each pair.

    >>> add([torch.ones(1)], [torch.ones(1)], alpha=2.0)
    [tensor([3.])]
    """
    return list(_torch._foreach_add(list(ours), list(others), alpha=alpha))


def mul(ours: Sequence[Tensor], factor: Tensor | Sequence[float]) -> list[Tensor]:
    """Each tensor times one scalar for all, or one number for each.

    >>> mul([torch.ones(1), torch.ones(1)], [2.0, 3.0])
    [tensor([2.]), tensor([3.])]
    """
    return list(_torch._foreach_mul(list(ours), factor))
