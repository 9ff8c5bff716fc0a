r"""A layer that scales and shifts every channel by fixed numbers, with what follows it.

Batch normalisation in evaluation mode is such a layer, and so is the bias of a convolution:

$$ y = γ r (x - mean) + β + residual, \quad out = y \text{ or } \max(y, 0), \quad
   r = 1 / \sqrt{variance + eps}. $$

Its gradient γ r g at x depends on x by nothing but the signs of the rectifier. So the second
derivative ends there: in a network of such layers and convolutions, a push on the input gradients
never goes back through the forward pass. To autograd this has to be said, by a gradient that is
absent; the functions of torch hand a tensor of zeros through all layers instead.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal.inference.second_order import affine_formulas
from shoal.inference.second_order.affine_formulas import Channels
from shoal.inference.second_order.backend import arithmetic, by_kernels
from shoal.inference.second_order.demand import refuse_third, wanted
from shoal.inference.second_order.layout import alike

__all__ = ["Channels", "affine"]


def affine(
    x: Tensor, channels: Channels, residual: Tensor | None = None, rectified: bool = False
) -> Tensor:
    """The layer, plus a residual and rectified if wanted, for x [B, C, ...]."""
    return _Affine.apply(x, *channels, residual, rectified)  # pyright: ignore[reportReturnType]


class _Affine(Function):
    """The layer."""

    @staticmethod
    def forward(x: Tensor, *rest: Any) -> Tensor:
        *channels, residual, rectified = rest
        return arithmetic(x, "affine").shift(x, Channels._make(channels), residual, rectified)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, *channels, ctx.eps, residual, ctx.rectified = inputs
        ctx.residual = residual is not None
        # Only the gradient of γ asks for x: a bias alone would keep what nobody reads.
        kept = None if channels[0] is None else x
        ctx.save_for_backward(kept, output if ctx.rectified else None, *channels)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        gradient = gradients[0]
        if gradient is None:
            return (None,) * 8
        x, out, *channels = ctx.saved_tensors
        layer = Channels._make((*channels, ctx.eps))
        given = x is not None
        scale = given and wanted(ctx, 1)
        shift = layer.bias is not None and wanted(ctx, 2, 1 + given)
        both = ctx.residual or scale or shift
        like = out if x is None else x
        if like is not None and by_kernels(like):
            gradient = alike(gradient, like)
        at_x, passed = _passed_back(gradient, out, layer, both)
        at_weight = _sums(passed * layer.normalised(x)) if scale and x is not None else None
        at_bias = _sums(passed).to(passed) if shift else None
        if at_weight is not None:
            at_weight = at_weight.to(layer.weight)
        at_residual = passed if ctx.residual else None
        return at_x, at_weight, at_bias, None, None, None, at_residual, None


def _sums(t: Tensor) -> Tensor:
    """Of every channel; by operations of torch where they will be differentiated."""
    found = affine_formulas if torch.is_grad_enabled() else arithmetic(t, "affine")
    return found.sums(t)


def _passed_back(
    gradient: Tensor, out: Tensor | None, layer: Channels, both: bool
) -> tuple[Tensor, Tensor]:
    """The gradient at x, and that behind the rectifier if both are wanted."""
    if out is None and not layer.scaled:
        return gradient, gradient
    apart = both and layer.scaled and out is not None
    found: Any = _PassBack.apply(gradient, out, apart, *layer)
    return found[0], gradient if out is None else found[-1]


class _PassBack(Function):
    """γ r g behind the rectifier, and g behind it if both are wanted."""

    @staticmethod
    def forward(gradient: Tensor, out: Tensor | None, both: bool, *layer: Any) -> tuple:
        at_x, passed = arithmetic(gradient, "affine").pass_back(
            gradient, None, out, Channels._make(layer), both
        )
        return (at_x, passed) if both else (at_x,)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        gradient, out, _, *channels, ctx.eps = inputs
        ctx.save_for_backward(gradient, out, *channels)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        refuse_third()
        gradient, out, *channels = ctx.saved_tensors
        layer = Channels._make((*channels, ctx.eps))
        u, beside = cotangents if len(cotangents) == 2 else (cotangents[0], None)
        if u is None and beside is None:
            return (None,) * 8
        u = torch.zeros_like(gradient) if u is None else u
        scale = layer.weight is not None and wanted(ctx, 3, 1 + (out is not None))
        at_g, at_weight = arithmetic(gradient, "affine").pass_twice(
            u, beside, gradient, out, layer, scale
        )
        if at_weight is not None:
            at_weight = at_weight.to(layer.weight)
        return at_g, None, None, at_weight, None, None, None, None
