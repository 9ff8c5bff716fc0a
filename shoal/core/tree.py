"""Trees of tensors: arithmetic on all tensors of all members at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.types import Tree

__all__ = [
    "add_each",
    "add_into",
    "add_scaled",
    "finite",
    "member_norms",
    "mixed",
    "mul_each",
    "per_member",
    "rows",
    "spaced",
]

Spans = Sequence[slice] | None


def per_member(values: Tensor, like: Tensor) -> Tensor:
    """Values [M] shaped to multiply a tensor [M, ...]."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def finite(values: Tensor) -> Tensor:
    """Which values are finite, with two kernels; `isfinite` takes four.

    >>> finite(torch.tensor([1.0, float("inf"), float("nan"), -float("inf")])).tolist()
    [True, False, False, False]
    """
    return values.abs() < torch.inf


def rows(tensor: Tensor) -> Tensor:
    """A tensor [M, ...] as a matrix [M, D].

    >>> rows(torch.zeros(2, 3, 4)).shape, rows(torch.zeros(2)).shape
    (torch.Size([2, 12]), torch.Size([2, 1]))
    """
    return tensor.reshape(len(tensor), tensor[0].numel())


def member_norms(tree: Tree, spans: Spans = None) -> Tensor:
    """Euclidean norm of each member over all tensors [M].

    >>> member_norms({"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([4.0, 1.0])})
    tensor([5., 1.])
    """
    norms = [torch.linalg.vector_norm(rows(t), dim=1) for t in tree.values()]
    if spans is None:
        return torch.linalg.vector_norm(torch.stack(norms), dim=0)
    squares = norms[0].new_zeros(max(span.stop for span in spans))
    for norm, span in zip(norms, spans, strict=True):
        squares[span] += norm.square()
    return squares.sqrt()


def mixed(matrix: Tensor | None, tree: Tree) -> Tree:
    """sum_j matrix_ij tree_j for every tensor; None is the identity."""
    if matrix is None:
        return tree
    return {
        name: (matrix.to(t.dtype) @ rows(t)).reshape(-1, *t.shape[1:]) for name, t in tree.items()
    }


def add_scaled(tree: Tree, other: Tree | None, scale: Tensor | float, spans: Spans = None) -> Tree:
    """tree + scale * other, with one scale for all (a number or a scalar) or one per member [M]."""
    if other is None:
        return tree
    ours, others = list(tree.values()), [other[name] for name in tree]
    if isinstance(scale, Tensor) and scale.ndim:
        spans = spans or [slice(None)] * len(others)
        others = [
            t * per_member(scale[span], t).to(t.dtype)
            for t, span in zip(others, spans, strict=True)
        ]
    elif isinstance(scale, Tensor):
        others = mul_each(others, scale)
    alpha = 1.0 if isinstance(scale, Tensor) else scale
    return dict(zip(tree, add_each(ours, others, alpha=alpha), strict=True))


_torch: Any = torch


def add_each(ours: Sequence[Tensor], others: Sequence[Tensor], alpha: float = 1.0) -> list[Tensor]:
    """a + alpha b for each pair.

    >>> add_each([torch.ones(1)], [torch.ones(1)], alpha=2.0)
    [tensor([3.])]
    """
    return list(_torch._foreach_add(list(ours), list(others), alpha=alpha))


def add_into(ours: Sequence[Tensor], others: Sequence[Tensor], alpha: float) -> list[Tensor]:
    """a + alpha b for each pair, in the memory of a, since new memory for all weights is slow.

    Compiled code gets new tensors, which the compiler can remove.

    >>> a = torch.ones(1)
    >>> add_into([a], [torch.ones(1)], alpha=2.0)[0] is a
    True
    """
    if torch.compiler.is_compiling():
        return add_each(ours, others, alpha)
    _torch._foreach_add_(list(ours), list(others), alpha=alpha)
    return list(ours)


def mul_each(ours: Sequence[Tensor], factor: Tensor | Sequence[float]) -> list[Tensor]:
    """Each tensor times one scalar for all, or one number per tensor.

    >>> mul_each([torch.ones(1), torch.ones(1)], [2.0, 3.0])
    [tensor([2.]), tensor([3.])]
    """
    return list(_torch._foreach_mul(list(ours), factor))


def spaced(total: int, most: int) -> list[int]:
    """At most so many of the numbers 0 to total - 1, evenly spaced from the first to the last.

    >>> spaced(9, 3), spaced(2, 3)
    ([0, 4, 8], [0, 1])
    """
    if total <= most:
        return list(range(total))
    return [round(place * (total - 1) / max(most - 1, 1)) for place in range(most)]
