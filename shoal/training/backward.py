"""Through the networks and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.types import Tree

__all__ = ["pull_back"]


def pull_back(
    outputs: Tensor | Sequence[Tensor],
    cotangents: Tensor | Sequence[Tensor],
    inputs: Tree,
    keep_graph: bool = False,
) -> Tree:
    """J^T cotangent for the tensors the outputs were made of: one backward pass."""
    if isinstance(outputs, Tensor) or isinstance(cotangents, Tensor):
        outputs, cotangents = [outputs], [cotangents]  # pyright: ignore
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    try:
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            list(inputs.values()),
            [cotangent.to(output.dtype) for output, cotangent in pairs],
            retain_graph=keep_graph,
            allow_unused=True,
        )
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"a layer of the network cannot be differentiated twice, as input gradients need: "
            f"{reason}; use a method such as 'f-kde'"
        ) from error
    named = zip(inputs.items(), gradients, strict=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in named}
