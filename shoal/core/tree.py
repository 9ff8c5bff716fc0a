"""Arithmetic on trees stacked over members: dicts of tensors [M, ...]."""

import torch
from torch import Tensor

from shoal.core.types import Tree

__all__ = ["add_scaled", "member_norms", "mixed", "per_member"]


def per_member(values: Tensor, like: Tensor) -> Tensor:
    """Values [M] shaped to multiply a tensor [M, ...]."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


def member_norms(tree: Tree) -> Tensor:
    """Euclidean norm of each member over all tensors [M].

    >>> member_norms({"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([4.0, 1.0])})
    tensor([5., 1.])
    """
    norms = [torch.linalg.vector_norm(t.reshape(len(t), -1), dim=1) for t in tree.values()]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def mixed(matrix: Tensor | None, tree: Tree) -> Tree:
    """sum_j matrix_ij tree_j for every tensor; None is the identity."""
    if matrix is None:
        return tree
    return {
        name: (matrix.to(t.dtype) @ t.reshape(len(t), -1)).reshape(-1, *t.shape[1:])
        for name, t in tree.items()
    }


def add_scaled(tree: Tree, other: Tree | None, scale: Tensor | float) -> Tree:
    """tree + scale * other, with one scale for all or one a member [M]."""
    if other is None:
        return tree
    if isinstance(scale, Tensor):
        return {
            name: t + per_member(scale, t).to(t.dtype) * other[name] for name, t in tree.items()
        }
    return {name: torch.add(t, other[name], alpha=scale) for name, t in tree.items()}
