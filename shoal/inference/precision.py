"""Lower precision inside the networks, with weights, distances, norms and states as they were.

`torch.autocast` does not reach every operation under `vmap`, so the types are set here: weights and
inputs are cast before the networks, and batch normalisation keeps its own numbers, which its
kernels accept beside lower-precision activations. Outputs are cast back before anything is computed
of them.
"""

import torch
from torch import Tensor, nn

from shoal.core.types import Tree

__all__ = ["lowered", "lowered_inputs"]


def lowered(module: nn.Module, state: Tree, dtype: torch.dtype) -> Tree:
    """Weights and buffers [M, ...] in the type of the calculation."""
    kept = _kept(module)
    return {
        name: tensor if name in kept or not tensor.is_floating_point() else _cast(tensor, dtype)
        for name, tensor in state.items()
    }


def lowered_inputs(x: Tensor, dtype: torch.dtype, own_inputs: bool = False) -> Tensor:
    """Real inputs in the type of the calculation, images with their channels last on a GPU."""
    if not x.is_floating_point():
        return x
    if x.is_cuda and x.ndim == 4 + own_inputs:
        last = x.movedim(-3, -1).to(dtype, memory_format=torch.contiguous_format)
        return last.contiguous().movedim(-1, -3)
    return x.to(dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_cuda and tensor.ndim == 5:
        # Filters [M, out, in, h, w] laid out with channels last, in the one pass that casts them.
        last = tensor.permute(0, 1, 3, 4, 2).to(dtype, memory_format=torch.contiguous_format)
        return last.permute(0, 1, 4, 2, 3)
    return tensor.to(dtype)


def _kept(module: nn.Module) -> frozenset[str]:
    """Names of what belongs to batch normalisation, found once for each module."""
    if "_shoal_kept" not in module.__dict__:
        norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
        module.__dict__["_shoal_kept"] = frozenset(
            f"{owner}.{name}" if owner else name
            for owner, layer in module.named_modules()
            if isinstance(layer, norms)
            for name, _ in [*layer.named_parameters(), *layer.named_buffers()]
        )
    return module.__dict__["_shoal_kept"]
