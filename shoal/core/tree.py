"""Arithmetic on trees stacked over members: dicts of tensors [M, ...].

Where members are of several architectures a tensor belongs to some of them; `spans` says which.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core import foreach
from shoal.core.types import Tree

__all__ = ["add_scaled", "finite", "member_norms", "mixed", "per_member", "rows"]

Spans = Sequence[slice] | None


def per_member(values: Tensor, like: Tensor) -> Tensor:
    """Values [M] shaped to multiply a tensor [M, ...]."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def finite(values: Tensor) -> Tensor:
    """Which values are neither infinite nor undefined, by two kernels where `isfinite` takes four.

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
    """tree + scale * other, with one scale for all (a number or a scalar) or one a member [M]."""
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
        others = foreach.mul_each(others, scale)
    alpha = 1.0 if isinstance(scale, Tensor) else scale
    return dict(zip(tree, foreach.add_each(ours, others, alpha=alpha), strict=True))
