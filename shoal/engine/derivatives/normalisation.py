r"""Batch normalisation in training mode, with what follows it, as one function of autograd.

The second derivative ends at the input x, where the first-order gradient ends as well. Both are
brought there in one pass: beside its output the layer has a *port*, an empty tensor in the shape of
x whose gradient is by definition added to that of x. What the second derivative asks of x is sent
into the port, so that autograd itself brings it to the place where the first-order gradient is
written, and no tensor is read and written again for a sum.

Mean and 1 / std are outputs as well, for those who normalise something else by them; what comes
back to them is added in the same pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal.engine.derivatives import formulas
from shoal.engine.derivatives.backend import arithmetic
from shoal.engine.derivatives.demand import refuse_another, refuse_third
from shoal.engine.derivatives.formulas import BackwardPass, Layer

__all__ = ["normalise"]


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: tuple[Tensor, Tensor],
    residual: Tensor | None = None,
    rectified: bool = False,
    note: Callable[[tuple[Tensor, Tensor]], None] | None = None,
) -> Tensor:
    """γ h + β, plus a residual and rectified if wanted.

    Args:
        x: inputs [B, C, ...].
        weight: γ [C].
        bias: β [C].
        moments: mean of x and 1 / sqrt(variance + eps), whose dependence on x the derivatives know.
        residual: added before the rectifier.
        rectified: max(., 0) at the end.
        note: called with the moments as functions of x, which have a first derivative.
    """
    mean, rstd = moments
    applied: Any = _Normalise.apply(x, weight, bias, residual, mean, rstd, rectified)
    if note is not None:
        note(applied[2:])
    return applied[0]


class _Normalise(Function):
    """The layer; outputs are what it is for, its port, and its moments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        rectified: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = Layer(x, weight, bias, None, mean, rstd, rectified)
        out = arithmetic(x, "batchnorm").normalise(layer, residual)
        return out, x.new_empty(()).expand(x.shape), mean.detach(), rstd.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        x, weight, bias, residual, mean, rstd, ctx.rectified = inputs
        ctx.residual = residual is not None
        # Without a residual the signs of the rectifier follow from x, which is kept anyway.
        out = output[0] if ctx.rectified and ctx.residual else None
        ctx.save_for_backward(x, weight, bias, out, mean, rstd, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        gradient, more, *moments = gradients
        *layer, port = ctx.saved_tensors
        elsewhere = any(each is not None for each in moments)
        if gradient is None and not elsewhere:
            return more, *[None] * 6
        if elsewhere:
            found = _with_moments(layer, ctx.rectified, gradient, more, moments)
        else:
            found: Any = _BackwardPass.apply(gradient, more, port, ctx.rectified, *layer)
        weight, bias = layer[1:3]
        at_weight = None if weight is None else found[1].to(weight)
        at_bias = None if bias is None else found[2].to(bias)
        # Without a rectifier the residual receives the gradient as it is.
        at_residual = found[-1] if ctx.rectified else gradient
        return found[0], at_weight, at_bias, at_residual if ctx.residual else None, *[None] * 3


def _with_moments(
    layer: list[Tensor], rectified: bool, gradient: Tensor | None, more: Tensor | None, moments: Any
) -> BackwardPass:
    """The gradient of the layer where its moments have been used elsewhere."""
    refuse_another()
    x = layer[0]
    gradient = torch.zeros_like(x) if gradient is None else gradient
    here = Layer._make((*layer, rectified))
    return arithmetic(x, "batchnorm").backward_pass(here, gradient, more, tuple(moments))


class _BackwardPass(Function):
    """The gradient of the layer; its own gradient is the second derivative in closed form."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        gradient: Tensor,
        more: Tensor | None,
        port: Tensor,
        rectified: bool,
        x: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        layer = Layer._make((x, *rest, rectified))
        found = arithmetic(x, "batchnorm").backward_pass(layer, gradient, more)
        return tuple(found[:3] if layer.out is None else found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        gradient, _, _, ctx.rectified, *layer = inputs
        ctx.save_for_backward(gradient, *output[1:3], *layer)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        refuse_third()
        u, at_gh, at_sum, *at_residual = cotangents
        gradient, gh, g, *rest = ctx.saved_tensors
        layer = Layer._make((*rest, ctx.rectified))
        twice = arithmetic(layer.x, "batchnorm").differentiate(
            layer, gradient, (gh, g), torch.zeros_like(layer.x) if u is None else u,
            at_residual[0] if at_residual else None,
        )  # fmt: skip
        if at_gh is not None or at_sum is not None:
            twice = formulas.with_parameters(layer, gradient, (gh, g), twice, (at_gh, at_sum))
        at_more = u if ctx.needs_input_grad[1] else None
        at_weight = None if layer.weight is None else twice.weight.to(layer.weight)
        return twice.g, at_more, twice.x, None, None, at_weight, *[None] * 4
