"""Precision inside the networks; weights, distances, norms and states keep their precision."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.core.types import Tree
from shoal.engine.functorch import Operation

__all__ = [
    "Computes",
    "calculating_in",
    "full_precision",
    "lowered",
    "lowered_inputs",
    "rough_products",
]


def lowered(
    module: nn.Module,
    state: Tree,
    dtype: torch.dtype,
    own: bool = True,
    apart: Collection[str] = (),
) -> Tree:
    """Weights and buffers in the type of the arithmetic: [M, ...], or [...] without `own`.

    Tensors named in `apart` are cast one by one: a backward pass to these alone stays short.
    """
    kept = _kept(module)
    tensors = dict(state)
    cast = {n: t for n, t in state.items() if n not in kept and t.is_floating_point()}
    axes = _axes(module)
    images = {name for name, t in cast.items() if t.is_cuda and t.ndim - own in axes}
    tensors |= {name: _channels_last(cast[name], dtype, own) for name in images}
    tensors |= {name: cast[name].to(dtype) for name in apart if name in cast and name not in images}
    rest = {n: t for n, t in cast.items() if tensors[n] is t and t.dtype != dtype}
    if rest:
        together = _Together.apply(dtype, *rest.values())
        tensors |= dict(zip(rest, together, strict=True))  # pyright: ignore[reportArgumentType]
    return tensors


def lowered_inputs(
    x: Tensor, module: nn.Module, dtype: torch.dtype, own_inputs: bool = False
) -> Tensor:
    """Real inputs in the type of the arithmetic; images and videos on a GPU have channels last."""
    if not x.is_floating_point():
        return x
    if x.is_cuda and x.ndim - own_inputs in _axes(module):
        return _channels_last(x, dtype, own_inputs)
    return x.to(dtype)


def _channels_last(tensor: Tensor, dtype: torch.dtype, own: bool) -> Tensor:
    """Batches [B, C, ...] or filters [out, in, ...], cast and laid out in one pass."""
    channels = 1 + own
    last = tensor.movedim(channels, -1).to(dtype, memory_format=torch.contiguous_format)
    return last.contiguous().movedim(-1, channels)


def _axes(module: nn.Module) -> frozenset[int]:
    """How many axes images have, and videos if a layer takes them; found once per module."""
    if "_shoal_axes" not in module.__dict__:
        videos = any(isinstance(layer, nn.Conv3d) for layer in module.modules())
        module.__dict__["_shoal_axes"] = frozenset({4, 5} if videos else {4})
    return module.__dict__["_shoal_axes"]


class _Together(Operation):
    """Casts of many tensors by a few kernels, and those of their gradients."""

    @staticmethod
    def forward(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _cast(tensors, [dtype] * len(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.dtypes = [tensor.dtype for tensor in inputs[1:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        pairs = zip(gradients, ctx.dtypes, strict=True)
        if torch.is_grad_enabled():
            return None, *(None if g is None else g.to(dtype) for g, dtype in pairs)
        present = [(i, g, dtype) for i, (g, dtype) in enumerate(pairs) if g is not None]
        at_inputs: list[Tensor | None] = [None] * len(gradients)
        cast = _cast([g for _, g, _ in present], [dtype for *_, dtype in present])
        for (i, *_), gradient in zip(present, cast, strict=True):
            at_inputs[i] = gradient
        return None, *at_inputs


def _cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, ...]:
    pairs = zip(tensors, dtypes, strict=True)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in pairs]
    torch._foreach_copy_(copies, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return tuple(copies)


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
