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

from shoal.engine.derivatives import formulas
from shoal.engine.derivatives.again import DEEPEST, Again, remember
from shoal.engine.derivatives.backend import arithmetic
from shoal.engine.derivatives.demand import refuse_another, refuse_light, refuse_third, wanted
from shoal.engine.derivatives.formulas import BackwardPass, Layer
from shoal.engine.derivatives.known_rows import Known
from shoal.engine.derivatives.layout import all_but_channels, per_channel, wide
from shoal.engine.functorch import Operation

__all__ = ["normalise"]


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: tuple[Tensor, Tensor],
    residual: Tensor | None = None,
    rectified: bool = False,
    note: Callable[[tuple[Tensor, Tensor]], None] | None = None,
    still: bool = False,
    known: Known | None = None,
    light: bool = False,
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
        still: the moments are those of another batch. The points act on each other's gradients as
            if the moments were their own, and h is a constant in the second derivative.
        known: the value, if it need not be computed.
        light: the output may be computed again in the backward pass, which has no second
            derivative then.
    """
    (mean, rstd), again = moments, None
    if light and torch.is_grad_enabled():
        scale, shift = (None if t is None else t.detach() for t in (weight, bias))
        again = Again(Layer(x.detach(), scale, shift, None, mean, rstd, rectified), residual)
        again = again if again.depth <= DEEPEST else None
    applied: Any = _Normalise.apply(
        x, weight, bias, residual, mean, rstd, rectified, still, known, again
    )  # fmt: skip
    if again is not None:
        remember(applied[0], again)
    if note is not None:
        note(applied[2:])
    return applied[0]


class _Normalise(Operation):
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
        still: bool,
        known: Known | None,
        again: Again | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer = Layer(x, weight, bias, None, mean, rstd, rectified)
        if known is not None:
            out = known.here()
        else:
            out = arithmetic(x, "batchnorm").normalise(layer, residual)
        return out, x.new_empty(()).expand(x.shape), mean.detach(), rstd.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        x, weight, bias, residual, mean, rstd, ctx.rectified, ctx.still, _, ctx.again = inputs
        ctx.residual = residual is not None
        # Without a residual the signs of the rectifier follow from x, which is kept anyway.
        ctx.signs = ctx.rectified and ctx.residual
        out = output[0] if ctx.signs and ctx.again is None else None
        ctx.save_for_backward(x, weight, bias, out, mean, rstd, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        gradient, more, *moments = gradients
        *layer, port = ctx.saved_tensors
        if ctx.again is not None:
            refuse_light()
            layer[3] = ctx.again() if ctx.signs else None
            ctx.again.forget()
        elsewhere = any(each is not None for each in moments)
        if gradient is None and not elsewhere:
            return more, *[None] * 9
        if elsewhere:
            at_inputs = _with_moments(layer, ctx.rectified, gradient, more, moments)
        else:
            how = ctx.rectified, ctx.still
            at_inputs: Any = _BackwardPass.apply(gradient, more, port, *how, *layer)
        weight, bias = layer[1:3]
        at_weight = None if weight is None else at_inputs[1].to(weight)
        at_bias = None if bias is None else at_inputs[2].to(bias)
        # Without a rectifier the residual receives the gradient as it is.
        at_residual = at_inputs[-1] if ctx.rectified else gradient
        at_residual = at_residual if ctx.residual else None
        at_moments = _at_moments(ctx, layer, at_inputs[0]) if ctx.still else (None, None)
        return at_inputs[0], at_weight, at_bias, at_residual, *at_moments, *[None] * 4


def _at_moments(ctx: Any, layer: list[Tensor], at_x: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients at mean and r that are given, from that at x: h = r (x - mean)."""
    x, mean, rstd = layer[0], *layer[4:6]
    place = 1 + sum(tensor is not None for tensor in layer[1:3]) + ctx.residual
    at_mean = -wide(at_x).sum(all_but_channels(x)) if wanted(ctx, 4, place) else None
    at_rstd = None
    if wanted(ctx, 5, place + 1):
        centred = wide(x) - per_channel(mean, x)
        at_rstd = (wide(at_x) * centred).sum(all_but_channels(x)) / rstd
    return at_mean, at_rstd


def _with_moments(
    layer: list[Tensor], rectified: bool, gradient: Tensor | None, more: Tensor | None, moments: Any
) -> BackwardPass:
    """The gradient of the layer where its moments have been used elsewhere."""
    refuse_another()
    x = layer[0]
    gradient = torch.zeros_like(x) if gradient is None else gradient
    here = Layer._make((*layer, rectified))
    return arithmetic(x, "batchnorm").backward_pass(here, gradient, more, tuple(moments))


class _BackwardPass(Operation):
    """The gradient of the layer; its own gradient is the second derivative in closed form."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        gradient: Tensor,
        more: Tensor | None,
        port: Tensor,
        rectified: bool,
        still: bool,
        x: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        layer = Layer._make((x, *rest, rectified))
        results = arithmetic(x, "batchnorm").backward_pass(layer, gradient, more)
        return tuple(results[:3] if layer.out is None else results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        gradient, _, _, ctx.rectified, ctx.still, *layer = inputs
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
            at_residual[0] if at_residual else None, at_input=not ctx.still,
        )  # fmt: skip
        if at_gh is not None or at_sum is not None:
            twice = formulas.with_parameters(layer, gradient, (gh, g), twice, (at_gh, at_sum))
        at_more = u if ctx.needs_input_grad[1] else None
        at_weight = None if layer.weight is None else twice.weight.to(layer.weight)
        at_rstd = _at_rstd(layer, twice.weight) if ctx.still else None
        return twice.g, at_more, twice.x, None, None, None, at_weight, *[None] * 3, at_rstd


def _at_rstd(layer: Layer, at_weight: Tensor) -> Tensor:
    """The gradient γ r (...) depends on r as it does on γ."""
    at_rstd = at_weight / layer.rstd
    return at_rstd if layer.weight is None else at_rstd * layer.weight
