"""The kernels of `batchnorm_kernels`, started on the tensors that `formulas` takes."""

from typing import Any

import torch
from torch import Tensor

from shoal.engine.derivatives import batchnorm_kernels as kernels
from shoal.engine.derivatives.formulas import (
    AtMoments,
    BackwardPass,
    DoubleBackward,
    Layer,
    Running,
)
from shoal.engine.derivatives.layout import alike
from shoal.engine.derivatives.matrix_kernels import SHARES, Matrix, grid_of_shares

__all__ = ["backward_pass", "differentiate", "moments", "normalise"]


def moments(x: Tensor, eps: float, running: Running, momentum: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of each channel; running statistics follow, in place."""
    matrix, followed = Matrix(x), running[0] is not None and running[1] is not None
    shares = matrix.shares(2, x)
    kernels.sums_of_moments[matrix.sums](x, shares, *matrix.size, matrix.strip, **matrix.sum_tile)
    found = shares.new_empty(2, matrix.width)
    kernels.settle_moments[grid_of_shares(matrix.width)](
        x, shares, *running, found, len(shares), *matrix.size, eps, momentum,
        FOLLOWED=followed, **SHARES,
    )  # fmt: skip
    mean, rstd = found
    return mean, rstd


def normalise(layer: Layer, residual: Tensor | None) -> Tensor:
    """γ h + β + residual, rectified if wanted."""
    matrix, out = Matrix(layer.x), torch.empty_like(layer.x)
    beside = None if residual is None else alike(residual, layer.x)
    kernels.normalise[matrix.passes](
        layer.x, beside, out, layer.weight, layer.bias, layer.mean, layer.rstd, *matrix.size,
        AFFINE=layer.weight is not None, RESIDUAL=residual is not None,
        RECTIFIED=layer.rectified, **matrix.pass_tile,
    )  # fmt: skip
    return out


def backward_pass(
    layer: Layer, gradient: Tensor, more: Tensor | None, moments: AtMoments = (None, None)
) -> BackwardPass:
    """The gradient at `x`, to which `more` and that of the moments are added, and the others."""
    matrix, gradient = Matrix(layer.x), alike(gradient, layer.x)
    shares = matrix.shares(2, layer.x)
    state, how = _state(layer), _how(layer)
    kernels.sums_of_pull[matrix.sums](
        gradient, *state, shares, *matrix.size, matrix.strip, **how, **matrix.sum_tile
    )
    sums, at_x = matrix.summed(shares), torch.empty_like(layer.x)
    # Where nothing is rectified, the gradient at the residual is the gradient itself.
    at_residual = torch.empty_like(gradient) if layer.out is not None else gradient
    more = None if more is None else alike(more, layer.x)
    kernels.backward_pass[matrix.passes](
        gradient, *state[:2], more, *state[2:], sums, *moments, at_x, at_residual, *matrix.size,
        MORE=more is not None, CENTRED=moments[0] is not None, SPREAD=moments[1] is not None,
        RESIDUAL=layer.out is not None, **how, **matrix.pass_tile,
    )  # fmt: skip
    return BackwardPass(at_x, sums[0], sums[1], at_residual)


def differentiate(
    layer: Layer,
    gradient: Tensor,
    sums: tuple[Tensor, Tensor],
    u: Tensor,
    at_residual: Tensor | None,
    at_input: bool = True,
) -> DoubleBackward:
    """The derivative of `backward_pass`, at cotangents of `BackwardPass.x` and of the residual."""
    x = layer.x
    matrix, gradient, u = Matrix(x), alike(gradient, x), alike(u, x)
    beside = None if at_residual is None else alike(at_residual, x)
    shares = matrix.shares(3, x)
    state, how = _state(layer), _how(layer)
    kernels.sums_of_second[matrix.sums](
        u, gradient, *state, *sums, shares, *matrix.size, matrix.strip, **how, **matrix.sum_tile
    )
    at_g, at_x = torch.empty_like(gradient), torch.empty_like(x) if at_input else None
    at_weight = torch.empty_like(sums[0])
    kernels.second[matrix.passes](
        u, beside, gradient, *state, *sums, matrix.summed(shares), at_g, at_x, at_weight,
        *matrix.size, RESIDUAL=beside is not None, INPUT=at_input, **how, **matrix.pass_tile,
    )  # fmt: skip
    return DoubleBackward(at_g, at_x, at_weight)


def _state(layer: Layer) -> tuple[Tensor | None, ...]:
    return layer.x, layer.out, layer.weight, layer.bias, layer.mean, layer.rstd


def _how(layer: Layer) -> dict[str, Any]:
    signs = 0 if not layer.rectified else 2 if layer.out is None else 1
    return {"AFFINE": layer.weight is not None, "SIGNS": signs}
