"""The kernels of `depthwise_kernels`, started on the tensors of a convolution."""

from typing import Any

import torch
from torch import Tensor

from shoal.engine.derivatives import depthwise_kernels as kernels
from shoal.engine.derivatives.layout import alike
from shoal.engine.derivatives.matrix_kernels import Matrix

__all__ = ["at_input", "at_weight", "outputs"]

TILE = 1024
"""Numbers of a point of the filter that a program holds at a time."""


def outputs(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any) -> Tensor:
    """conv(x, w) + b."""
    shape, layout = geometry.outputs(x, weight), torch.channels_last
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    matrix = Matrix(out)
    kernels.outputs[matrix.passes](
        x, weight.reshape(len(weight), -1), bias, out, *matrix.size, *x.shape[2:], *out.shape[2:],
        **_filter(weight, geometry), BIASED=bias is not None, **matrix.pass_tile,
    )  # fmt: skip
    return out


def at_input(g: Tensor, like: Tensor, weight: Tensor, geometry: Any) -> Tensor:
    """dgrad(g, w), in the shape of `like`."""
    g, out, matrix = alike(g, like), torch.empty_like(like), Matrix(like)
    kernels.at_input[matrix.passes](
        g, weight.reshape(len(weight), -1), out, *matrix.size, *like.shape[2:], *g.shape[2:],
        **_filter(weight, geometry), **matrix.pass_tile,
    )  # fmt: skip
    return out


def at_weight(g: Tensor, x: Tensor, weight: Tensor, geometry: Any) -> Tensor:
    """wgrad(x, g), in the shape of the weight."""
    g = alike(g, x)
    matrix, (deep, long) = Matrix(g), weight.shape[2:]
    shares = matrix.shares(deep * long, g)
    kernels.sums_at_weight[(*matrix.sums, deep)](
        x, g, shares, *matrix.size, matrix.strip, *x.shape[2:], *g.shape[2:],
        **_filter(weight, geometry), ROWS=TILE // matrix.columns, COLUMNS=matrix.columns,
        num_warps=4,
    )  # fmt: skip
    sums = matrix.summed(shares)
    return weight.new_empty(weight.shape).copy_(sums.mT.reshape(weight.shape))


def _filter(weight: Tensor, geometry: Any) -> dict[str, int]:
    stride, padding, dilation, _ = geometry
    names = ("DEEP", "LONG"), ("STRIDE_DOWN", "STRIDE_ACROSS"), ("PAD_DOWN", "PAD_ACROSS"), (
        "GAP_DOWN", "GAP_ACROSS",
    )  # fmt: skip
    sizes = weight.shape[2:], stride, padding, dilation
    return {
        name: size
        for pair, both in zip(names, sizes, strict=True)
        for name, size in zip(pair, both, strict=True)
    }
