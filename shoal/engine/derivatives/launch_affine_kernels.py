"""The kernels of `affine_kernels`, started on the tensors that `affine_formulas` takes."""

import torch
from torch import Tensor

from shoal.engine.derivatives import affine_kernels as kernels
from shoal.engine.derivatives.affine_formulas import Channels
from shoal.engine.derivatives.layout import alike
from shoal.engine.derivatives.matrix_kernels import Matrix

__all__ = ["pass_back", "pass_twice", "shift", "sums"]


def shift(x: Tensor, layer: Channels, residual: Tensor | None, rectified: bool) -> Tensor:
    """γ r (x - mean) + β + residual, rectified if wanted."""
    matrix, out = Matrix(x), torch.empty_like(x)
    beside = None if residual is None else alike(residual, x)
    kernels.shift[matrix.passes](
        x, beside, out, *layer, *matrix.size, AFFINE=layer.weight is not None,
        SHIFTED=layer.bias is not None, SCALED=layer.scaled, RESIDUAL=beside is not None,
        RECTIFIED=rectified, **matrix.pass_tile,
    )  # fmt: skip
    return out


def pass_back(
    t: Tensor, beside: Tensor | None, out: Tensor | None, layer: Channels, both: bool
) -> tuple[Tensor, Tensor | None]:
    """γ r t + beside behind the rectifier; and t behind it, if both are wanted."""
    t = alike(t, t)
    matrix, at_x = Matrix(t), torch.empty_like(t)
    passed = torch.empty_like(t) if both else None
    beside = None if beside is None else alike(beside, t)
    kernels.pass_back[matrix.passes](
        t, beside, out, layer.weight, layer.rstd, at_x, passed, *matrix.size,
        AFFINE=layer.weight is not None, SCALED=layer.scaled, RECTIFIED=out is not None,
        BESIDE=beside is not None, BOTH=both, **matrix.pass_tile,
    )  # fmt: skip
    return at_x, passed


def pass_twice(
    u: Tensor,
    beside: Tensor | None,
    gradient: Tensor,
    out: Tensor | None,
    layer: Channels,
    summed: bool,
) -> tuple[Tensor, Tensor | None]:
    """The derivative of `pass_back`, at the gradient and, if `summed`, at γ and 1 / std [2, C]."""
    if not summed:
        return pass_back(u, beside, out, layer, both=False)
    u = alike(u, gradient)
    matrix, at_g = Matrix(gradient), torch.empty_like(gradient)
    beside = None if beside is None else alike(beside, gradient)
    shares = matrix.shares(2, gradient)
    kernels.pass_twice[matrix.sums](
        u, beside, gradient, out, layer.weight, layer.rstd, at_g, shares, *matrix.size,
        matrix.strip, AFFINE=layer.weight is not None, SCALED=layer.scaled,
        RECTIFIED=out is not None, BESIDE=beside is not None, **matrix.sum_tile,
    )  # fmt: skip
    return at_g, matrix.summed(shares)


def sums(t: Tensor) -> Tensor:
    """Of every channel [C], over the batch and its pixels."""
    t = alike(t, t)
    matrix = Matrix(t)
    shares = matrix.shares(1, t)
    kernels.sums[matrix.sums](t, shares, *matrix.size, matrix.strip, **matrix.sum_tile)
    return matrix.summed(shares)[0]
