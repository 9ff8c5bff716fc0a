"""The kernels of `batchnorm_kernels`, started on the tensors that `formulas` takes."""

from typing import Any

import torch
from torch import Tensor

from shoal.inference.second_order import affine_kernels
from shoal.inference.second_order import batchnorm_kernels as kernels
from shoal.inference.second_order.backend import alike
from shoal.inference.second_order.formulas import Channels, Layer, Pulled, PulledTwice, Running

__all__ = ["differentiate", "moments", "normalise", "pass_back", "pass_twice", "pull", "shift"]

TILE = 2048
"""Numbers that a program holds at a time."""

COLUMNS = 64
"""Of a tile: so many numbers of half precision are one line of the cache."""

PROGRAMS = 528
"""That sum over rows: four for each multiprocessor of a large GPU."""


class _Matrix:
    """How a batch of images is divided: rows are pixels, columns channels, channels last."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.width = x.shape, x.shape[1]
        self.height = x.numel() // self.width
        self.columns = min(COLUMNS, 1 << (self.width - 1).bit_length())
        self.rows = TILE // self.columns
        self.across = -(-self.width // self.columns)
        tiles = -(-self.height // self.rows)
        wanted = max(PROGRAMS // self.across, 1)
        self.strip = -(-tiles // min(tiles, wanted)) * self.rows
        self.programs = -(-self.height // self.strip)
        self.tile: dict[str, Any] = {"ROWS": self.rows, "COLUMNS": self.columns}
        self.elementwise = (tiles, self.across)
        self.strips = (self.programs, self.across)
        self.size = (self.height, self.width)

    def shares(self, count: int, like: Tensor) -> Tensor:
        """Room for what the programs have summed."""
        return like.new_empty(self.programs, count, self.width, dtype=torch.float32)

    def summed(self, shares: Tensor) -> Tensor:
        """[count, C]."""
        programs, count, width = shares.shape
        sums = shares.new_empty(count, width)
        grid = (-(-count * width // 16),)
        kernels.add_shares[grid](shares, sums, programs, count * width, PROGRAMS=64, COLUMNS=16)
        return sums


def moments(x: Tensor, eps: float, running: Running, momentum: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of each channel; running statistics follow, in place."""
    matrix, followed = _Matrix(x), running[0] is not None and running[1] is not None
    shares = matrix.shares(2, x)
    kernels.sums_of_moments[matrix.strips](x, shares, *matrix.size, matrix.strip, **matrix.tile)
    found = shares.new_empty(2, matrix.width)
    grid = (-(-matrix.width // 16),)
    kernels.settle_moments[grid](
        x, shares, *running, found, matrix.programs, *matrix.size, eps, momentum,
        FOLLOWED=followed, PROGRAMS=64, COLUMNS=16,
    )  # fmt: skip
    mean, rstd = found
    return mean, rstd


def normalise(layer: Layer, residual: Tensor | None) -> Tensor:
    """γ h + β + residual, rectified if wanted."""
    matrix, out = _Matrix(layer.x), torch.empty_like(layer.x)
    beside = None if residual is None else alike(residual, layer.x)
    kernels.normalise[matrix.elementwise](
        layer.x, beside, out, layer.weight, layer.bias, layer.mean, layer.rstd, *matrix.size,
        AFFINE=layer.weight is not None, RESIDUAL=residual is not None,
        RECTIFIED=layer.rectified, **matrix.tile,
    )  # fmt: skip
    return out


def pull(layer: Layer, gradient: Tensor, more: Tensor | None) -> Pulled:
    """The gradient at `x`, to which `more` is added, and what else comes with it."""
    matrix, gradient = _Matrix(layer.x), alike(gradient, layer.x)
    shares = matrix.shares(2, layer.x)
    state, how = _state(layer), _how(layer)
    kernels.sums_of_pull[matrix.strips](
        gradient, *state, shares, *matrix.size, matrix.strip, **how, **matrix.tile
    )
    sums, at_x = matrix.summed(shares), torch.empty_like(layer.x)
    # Where nothing is rectified, the gradient at the residual is the gradient itself.
    at_residual = torch.empty_like(gradient) if layer.out is not None else gradient
    more = None if more is None else alike(more, layer.x)
    kernels.pull[matrix.elementwise](
        gradient, *state[:2], more, *state[2:], sums, at_x, at_residual, *matrix.size,
        MORE=more is not None, RESIDUAL=layer.out is not None, **how, **matrix.tile,
    )  # fmt: skip
    return Pulled(at_x, sums[0], sums[1], at_residual)


def differentiate(
    layer: Layer,
    gradient: Tensor,
    sums: tuple[Tensor, Tensor],
    u: Tensor,
    at_residual: Tensor | None,
) -> PulledTwice:
    """The derivative of `pull` at the cotangents u of `Pulled.x` and that of the residual."""
    x = layer.x
    matrix, gradient, u = _Matrix(x), alike(gradient, x), alike(u, x)
    beside = None if at_residual is None else alike(at_residual, x)
    shares = matrix.shares(3, x)
    state, how = _state(layer), _how(layer)
    kernels.sums_of_second[matrix.strips](
        u, gradient, *state, *sums, shares, *matrix.size, matrix.strip, **how, **matrix.tile
    )
    at_g, at_x = torch.empty_like(gradient), torch.empty_like(x)
    at_weight = torch.empty_like(sums[0])
    kernels.second[matrix.elementwise](
        u, beside, gradient, *state, *sums, matrix.summed(shares), at_g, at_x, at_weight,
        *matrix.size, RESIDUAL=beside is not None, **how, **matrix.tile,
    )  # fmt: skip
    return PulledTwice(at_g, at_x, at_weight)


def shift(x: Tensor, layer: Channels, residual: Tensor | None, rectified: bool) -> Tensor:
    """γ r (x - mean) + β + residual, rectified if wanted."""
    matrix, out = _Matrix(x), torch.empty_like(x)
    beside = None if residual is None else alike(residual, x)
    affine_kernels.shift[matrix.elementwise](
        x, beside, out, *layer, *matrix.size, AFFINE=layer.weight is not None,
        SHIFTED=layer.bias is not None, SCALED=layer.scaled, RESIDUAL=beside is not None,
        RECTIFIED=rectified, **matrix.tile,
    )  # fmt: skip
    return out


def pass_back(
    t: Tensor, beside: Tensor | None, out: Tensor | None, layer: Channels, both: bool
) -> tuple[Tensor, Tensor | None]:
    """γ r t + beside behind the rectifier; and t behind it, if both are wanted."""
    t = alike(t, t)
    matrix, at_x = _Matrix(t), torch.empty_like(t)
    passed = torch.empty_like(t) if both else None
    beside = None if beside is None else alike(beside, t)
    affine_kernels.pass_back[matrix.elementwise](
        t, beside, out, layer.weight, layer.variance, layer.eps, at_x, passed, *matrix.size,
        AFFINE=layer.weight is not None, SCALED=layer.scaled, RECTIFIED=out is not None,
        BESIDE=beside is not None, BOTH=both, **matrix.tile,
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
    """The derivative of `pass_back` at the cotangents of its results: at the gradient and at γ."""
    if not summed:
        return pass_back(u, beside, out, layer, both=False)
    u = alike(u, gradient)
    matrix, at_g = _Matrix(gradient), torch.empty_like(gradient)
    beside = None if beside is None else alike(beside, gradient)
    shares = matrix.shares(1, gradient)
    affine_kernels.pass_twice[matrix.strips](
        u, beside, gradient, out, layer.weight, layer.variance, layer.eps, at_g, shares,
        *matrix.size, matrix.strip, SCALED=layer.scaled, RECTIFIED=out is not None,
        BESIDE=beside is not None, **matrix.tile,
    )  # fmt: skip
    return at_g, matrix.summed(shares)[0]


def _state(layer: Layer) -> tuple[Tensor | None, ...]:
    return layer.x, layer.out, layer.weight, layer.bias, layer.mean, layer.rstd


def _how(layer: Layer) -> dict[str, Any]:
    signs = 0 if not layer.rectified else 2 if layer.out is None else 1
    return {"AFFINE": layer.weight is not None, "SIGNS": signs}
