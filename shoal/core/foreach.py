"""Arithmetic on lists of tensors: on a GPU one kernel for all of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["add_each", "add_into", "mul_each"]

_torch: Any = torch


def add_each(ours: Sequence[Tensor], others: Sequence[Tensor], alpha: float = 1.0) -> list[Tensor]:
    """a + alpha b for each pair.

    >>> add_each([torch.ones(1)], [torch.ones(1)], alpha=2.0)
    [tensor([3.])]
    """
    return list(_torch._foreach_add(list(ours), list(others), alpha=alpha))


def add_into(ours: Sequence[Tensor], others: Sequence[Tensor], alpha: float) -> list[Tensor]:
    """a + alpha b for each pair, in the memory of a: new memory for all the weights is slow.

    What is compiled gets new tensors, which need not exist once the compiler has seen what follows.

    >>> a = torch.ones(1)
    >>> add_into([a], [torch.ones(1)], alpha=2.0)[0] is a
    True
    """
    if torch.compiler.is_compiling():
        return add_each(ours, others, alpha)
    _torch._foreach_add_(list(ours), list(others), alpha=alpha)
    return list(ours)


def mul_each(ours: Sequence[Tensor], factor: Tensor | Sequence[float]) -> list[Tensor]:
    """Each tensor times one scalar for all, or one number for each.

    >>> mul_each([torch.ones(1), torch.ones(1)], [2.0, 3.0])
    [tensor([2.]), tensor([3.])]
    """
    return list(_torch._foreach_mul(list(ours), factor))
