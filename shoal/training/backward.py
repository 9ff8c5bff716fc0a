"""Through the networks and back."""

import torch
from torch import Tensor

from shoal.core.types import Tree

__all__ = ["pull_back"]


def pull_back(outputs: Tensor, cotangent: Tensor, inputs: Tree, keep_graph: bool = False) -> Tree:
    """J^T cotangent for the tensors the outputs were made of: one backward pass."""
    gradients = torch.autograd.grad(
        outputs,
        list(inputs.values()),
        cotangent.to(outputs.dtype),
        retain_graph=keep_graph,
        allow_unused=True,
    )
    pairs = zip(inputs.items(), gradients, strict=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in pairs}
