"""Precision inside the networks; weights, distances, norms and states keep their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.core.types import Tree

__all__ = ["Computes", "calculating_in", "lowered", "lowered_inputs", "rough_products"]


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


class Computes(Protocol):
    """Networks whose type of calculation can be chosen."""

    @property
    def compute(self) -> torch.dtype | None:
        """Type the networks calculate in, when it is not that of the weights."""
        ...

    def compute_in(self, dtype: torch.dtype | None) -> object:
        """Calculate the networks in another type than that of the weights; None undoes it."""
        ...


@contextmanager
def calculating_in(precision: str | None, networks: Computes) -> Iterator[None]:
    """Networks in bfloat16, or everything in the type of the weights; TensorFloat only if asked.

    A GPU would otherwise convolve in TensorFloat, with three digits, under the name of float32.
    """
    matmul: Any = torch.backends.cuda.matmul
    convolution: Any = torch.backends.cudnn
    before, compute = (matmul.allow_tf32, convolution.allow_tf32), networks.compute
    matmul.allow_tf32 = convolution.allow_tf32 = precision == "tf32"
    networks.compute_in(torch.bfloat16 if precision == "bfloat16" else None)
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before
        networks.compute_in(compute)


@contextmanager
def rough_products(compute: torch.dtype | None) -> Iterator[None]:
    """A block in which single-precision products go through TensorFloat, if networks are rougher.

    TensorFloat keeps eleven bits of a number. What networks calculate in bfloat16 has eight, so
    that products of their results lose next to nothing by it, and are seven times faster.
    """
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = before or compute == torch.bfloat16
    try:
        yield
    finally:
        matmul.allow_tf32 = before
