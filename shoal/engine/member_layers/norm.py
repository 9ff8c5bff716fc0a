r"""Layer and RMS normalisation of members' rows, with the sum before them, twice differentiable.

$$ s = x + residual + bias, \quad y = γ (s - \bar s) / \sqrt{\operatorname{var}(s) + ε} + β $$

(Ba, Kiros & Hinton, 2016, arXiv 1607.06450; Zhang & Sennrich, 2019, arXiv 1910.07467.) Rows are
[M, N, C]; γ, β and bias are [M, C].
"""

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.engine.derivatives.demand import refuse_third, wanted
from shoal.engine.functorch import Operation
from shoal.engine.member_layers.rows import Strips

__all__ = ["NormSettings", "add_norm", "norm"]

PROGRAMS, TILE = 528, 2048
"""Programs of a pass, four for each multiprocessor of a large GPU; numbers that each holds."""

WIDEST = 8192
"""Columns of rows that a program can hold."""


class NormSettings(NamedTuple):
    """Attributes: `eps` is added to the variance; `centred` is False for RMS normalisation."""

    eps: float
    centred: bool


def norm(s: Tensor, weight: Tensor | None, shift: Tensor | None, how: NormSettings) -> Tensor:
    """γ h + β for rows s [M, N, C]."""
    return _Norm.apply(s, weight, shift, how)  # pyright: ignore[reportReturnType]


def add_norm(
    x: Tensor,
    residual: Tensor | None,
    bias: Tensor | None,
    weight: Tensor | None,
    shift: Tensor | None,
    how: NormSettings,
) -> tuple[Tensor, Tensor]:
    """s = x + residual + bias, and γ h + β of it."""
    if residual is None and bias is None:
        return x, norm(x, weight, shift, how)
    return _AddNorm.apply(x, residual, bias, weight, shift, how)  # pyright: ignore


class _Norm(Operation):
    @staticmethod
    def forward(s: Tensor, weight: Any, shift: Any, how: NormSettings) -> Tensor:
        return _forward(s, None, None, weight, shift, how)[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        s, weight, shift, ctx.how = inputs
        ctx.save_for_backward(s, weight)
        ctx.shifted = shift is not None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        s, weight = ctx.saved_tensors
        scale = weight is not None and wanted(ctx, 1, 1)
        shift = ctx.shifted and wanted(ctx, 2, 1 + (weight is not None))
        asked = scale, shift, False
        at_s, *sums = _back(s, gradients[0], None, weight, ctx.how, asked)
        return at_s, sums[0], sums[1], None


class _AddNorm(Operation):
    @staticmethod
    def forward(
        x: Tensor, residual: Any, bias: Any, weight: Any, shift: Any, how: NormSettings
    ) -> tuple[Tensor, Tensor]:
        return _forward(x, residual, bias, weight, shift, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        _, residual, bias, weight, shift, ctx.how = inputs
        ctx.given = [each is not None for each in (residual, bias, weight, shift)]
        ctx.save_for_backward(output[0], weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        at_s, at_y = gradients
        s, weight = ctx.saved_tensors
        place, asked = 1, []
        for index, present in enumerate(ctx.given, start=1):
            asked.append(present and wanted(ctx, index, place))
            place += present
        _, offset, scale, shift = asked
        if at_y is None:  # nobody uses the normalised rows
            total = at_s.sum(1) if offset and at_s is not None else None
            return at_s, at_s if ctx.given[0] else None, total, None, None, None
        sums = scale, shift, offset
        at_x, at_weight, at_shift, at_bias = _back(s, at_y, at_s, weight, ctx.how, sums)
        return at_x, at_x if ctx.given[0] else None, at_bias, at_weight, at_shift, None


def _back(
    s: Tensor,
    at_y: Tensor,
    at_s: Tensor | None,
    weight: Tensor | None,
    how: NormSettings,
    asked: tuple[bool, bool, bool],
) -> tuple:
    """Gradient at s, and those at γ, β and bias where they are asked for."""
    at_y, at_s = at_y.contiguous(), None if at_s is None else at_s.contiguous()
    differentiable = torch.is_grad_enabled()
    summed = any(asked) and not differentiable
    at_inputs: Any = _NormBack.apply(s, at_y, at_s, weight, how, summed)
    at_x, sums = at_inputs
    if not any(asked):
        return at_x, None, None, None
    if differentiable:  # sums that may be differentiated again are left to torch
        sums = [(at_y * _normalised(s, how)).sum(1), at_y.sum(1), at_x.sum(1)]
    kind = s if weight is None else weight
    pairs = zip(sums, asked, strict=True)
    return at_x, *(total.to(kind.dtype) if want else None for total, want in pairs)


class _NormBack(Operation):
    """Gradient at s, and the sums over rows [3, M, C]."""

    @staticmethod
    def forward(
        s: Tensor, at_y: Tensor, at_s: Any, weight: Any, how: NormSettings, summed: bool
    ) -> tuple:
        strips, launch = _strips(s, warps=2)
        at_x = torch.empty_like(s)
        shares = strips.shares(3, s) if summed else s
        _kernels().norm_back[strips.programs, strips.members](
            s, at_y, s if at_s is None else at_s, s if weight is None else weight, at_x, shares,
            *strips.size, how.eps, BESIDE=at_s is not None, SUMMED=summed,
            SCALED=weight is not None, CENTRED=how.centred, **launch,
        )  # fmt: skip
        return at_x, strips.summed(shares) if summed else None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        s, at_y, at_s, weight, ctx.how, _ = inputs
        ctx.beside = at_s is not None
        ctx.save_for_backward(s, at_y, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        refuse_third()
        u = cotangents[0]
        if u is None:
            return (None,) * 6
        s, at_y, weight = ctx.saved_tensors
        strips, launch = _strips(s)
        u, at_g, at_s = u.contiguous(), torch.empty_like(s), torch.empty_like(s)
        shares = strips.shares(1, s)
        _kernels().norm_twice[strips.programs, strips.members](
            s, at_y, u, s if weight is None else weight, at_g, at_s, shares, *strips.size,
            ctx.how.eps, SCALED=weight is not None, CENTRED=ctx.how.centred, **launch,
        )  # fmt: skip
        at_weight = None if weight is None else strips.summed(shares)[0].to(weight.dtype)
        return at_s, at_g, u if ctx.beside else None, at_weight, None, None


def _forward(
    x: Tensor, residual: Any, bias: Any, weight: Any, shift: Any, how: NormSettings
) -> tuple[Tensor, Tensor]:
    strips, launch = _strips(x)
    added = residual is not None or bias is not None
    s, y = torch.empty_like(x) if added else x, torch.empty_like(x)
    tensors = [x if each is None else each for each in (residual, bias, weight, shift)]
    _kernels().add_norm[strips.programs, strips.members](
        x, *tensors, s, y, *strips.size, how.eps, RESIDUAL=residual is not None,
        BIASED=bias is not None, SCALED=weight is not None, SHIFTED=shift is not None,
        CENTRED=how.centred, **launch,
    )  # fmt: skip
    return s, y


def _strips(rows: Tensor, warps: int = 4) -> tuple[Strips, dict[str, int]]:
    width = max(16, 1 << (rows.shape[-1] - 1).bit_length())
    height = max(1, TILE // width)
    return Strips(rows, height, PROGRAMS), {"ROWS": height, "C": width, "num_warps": warps}


def _normalised(s: Tensor, how: NormSettings) -> Tensor:
    s = s.float()
    s = s - s.mean(-1, keepdim=True) if how.centred else s
    return s * (s.square().mean(-1, keepdim=True) + how.eps).rsqrt()


def _kernels() -> Any:
    return importlib.import_module("shoal.engine.member_layers.norm_kernels")
