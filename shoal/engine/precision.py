"""Precision inside the networks; weights, distances, norms and states keep their precision."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.core.types import Tree

__all__ = [
    "Computes",
    "calculating_in",
    "full_precision",
    "lowered",
    "lowered_inputs",
    "rough_products",
]


def lowered(module: nn.Module, state: Tree, dtype: torch.dtype, own: bool = True) -> Tree:
    """Weights and buffers in the type of the arithmetic: [M, ...], or [...] without `own`."""
    kept = _kept(module)
    return {
        name: t if name in kept or not t.is_floating_point() else _cast(t, dtype, own)
        for name, t in state.items()
    }


def lowered_inputs(x: Tensor, dtype: torch.dtype, own_inputs: bool = False) -> Tensor:
    """Real inputs in the type of the arithmetic; images on a GPU have channels last."""
    if not x.is_floating_point():
        return x
    if x.is_cuda and x.ndim == 4 + own_inputs:
        last = x.movedim(-3, -1).to(dtype, memory_format=torch.contiguous_format)
        return last.contiguous().movedim(-1, -3)
    return x.to(dtype)


def _cast(tensor: Tensor, dtype: torch.dtype, own: bool) -> Tensor:
    if tensor.is_cuda and tensor.ndim == 4 + own:
        # The cast also lays out filters [..., out, in, h, w] with channels last, in one pass.
        last = tensor.movedim(-3, -1).to(dtype, memory_format=torch.contiguous_format)
        return last.movedim(-1, -3)
    return tensor.to(dtype)


def _kept(module: nn.Module) -> frozenset[str]:
    """Names of batch normalisation tensors, found once per module."""
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
    """Networks with a selectable type of arithmetic."""

    @property
    def compute(self) -> torch.dtype | None:
        """Type of the networks' arithmetic; None for the type of the weights."""
        ...

    def compute_in(self, dtype: torch.dtype | None) -> object:
        """Set the type of the networks' arithmetic; None for the type of the weights."""
        ...


@contextmanager
def full_precision(tensor_float: bool = False) -> Iterator[None]:
    """A block, or a function, in which float32 means float32 on a GPU.

    By default torch computes float32 convolutions on a GPU in TensorFloat, with three digits.

    Args:
        tensor_float: compute convolutions and matrix products in TensorFloat instead.
    """
    matmul: Any = torch.backends.cuda.matmul
    convolution: Any = torch.backends.cudnn
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = tensor_float
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before


@contextmanager
def calculating_in(precision: str | None, networks: Computes) -> Iterator[None]:
    """Run networks in the given precision; TensorFloat only for "tf32"."""
    compute = networks.compute
    networks.compute_in(torch.bfloat16 if precision == "bfloat16" else None)
    try:
        with full_precision(tensor_float=precision == "tf32"):
            yield
    finally:
        networks.compute_in(compute)


@contextmanager
def rough_products(compute: torch.dtype | None) -> Iterator[None]:
    """A block with TensorFloat matrix products, if networks run in bfloat16.

    TensorFloat keeps eleven bits of a number, bfloat16 eight. Products of bfloat16 results lose
    almost nothing and are seven times faster.
    """
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = before or compute == torch.bfloat16
    try:
        yield
    finally:
        matmul.allow_tf32 = before
