r"""A layer that scales and shifts every channel by numbers it is given, with what follows it.

Batch normalisation in evaluation mode is such a layer, so is one that takes its statistics from
another batch, and the bias of a convolution:

$$ y = γ r (x - mean) + β + residual, \quad out = y \text{ or } \max(y, 0), \quad r = 1 / std. $$

Its gradient γ r g at x depends on x by nothing but the signs of the rectifier. So the second
derivative ends there: in a network of such layers and convolutions, a push on the input gradients
never goes back through the forward pass. To autograd this has to be said, by a gradient that is
absent; the functions of torch hand a tensor of zeros through all layers instead.
"""

import math
from typing import Any

import torch
from torch import Tensor

from shoal.engine.derivatives import affine_formulas
from shoal.engine.derivatives.affine_formulas import Channels
from shoal.engine.derivatives.backend import arithmetic, by_kernels
from shoal.engine.derivatives.demand import refuse_third, wanted
from shoal.engine.derivatives.known_rows import Known
from shoal.engine.derivatives.layout import alike
from shoal.engine.functorch import Operation

__all__ = ["Channels", "affine"]


def affine(
    x: Tensor,
    channels: Channels,
    residual: Tensor | None = None,
    rectified: bool = False,
    known: Known | None = None,
) -> Tensor:
    """The layer, plus a residual and rectified if wanted, for x [B, C, ...]; or its known value."""
    arguments = x, *channels, residual, rectified, known
    if not torch.is_grad_enabled():  # as in predictions: a node of autograd costs as much as it
        return _Affine.forward(*arguments)
    applied: Any = _Affine.apply(*arguments)
    return applied


class _Affine(Operation):
    """The layer."""

    @staticmethod
    def forward(x: Tensor, *rest: Any) -> Tensor:
        *channels, residual, rectified, known = rest
        if known is not None:
            return known.here()
        return arithmetic(x, "affine").shift(x, Channels._make(channels), residual, rectified)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, *channels, residual, ctx.rectified, _ = inputs
        ctx.residual = residual is not None
        layer = Channels._make(channels)
        # Only the gradients of γ and r need x: a bias alone would keep tensors that nothing reads.
        kept = x if layer.scaled or layer.weight is not None else None
        ctx.save_for_backward(kept, output if ctx.rectified else None, *channels)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        gradient = gradients[0]
        if gradient is None:
            return (None,) * 8
        x, out, *channels = ctx.saved_tensors
        layer = Channels._make(channels)
        asked = _asked(ctx, layer, first=1, tensors=1)
        like = out if x is None else x
        if like is not None and by_kernels(like):
            gradient = alike(gradient, like)
        at_x, passed = _passed_back(gradient, out, layer, ctx.residual or any(asked))
        at_channels = _at_channels(x, passed, layer, asked)
        return at_x, *at_channels, passed if ctx.residual else None, None, None


def _asked(ctx: Any, layer: Channels, first: int, tensors: int) -> list[bool]:
    """Whether somebody waits for the gradient of each of the numbers.

    Args:
        ctx: of a function.
        layer: the numbers, which are inputs of it.
        first: the place of γ among the inputs.
        tensors: how many of those before are tensors.
    """
    asked = []
    for index, numbers in enumerate(layer):
        asked.append(numbers is not None and wanted(ctx, first + index, tensors))
        tensors += numbers is not None
    return asked


def _at_channels(
    x: Tensor | None, passed: Tensor, layer: Channels, asked: list[bool]
) -> list[Tensor | None]:
    """First derivatives with respect to γ, β, mean and r, where they are asked for."""
    scale, shift, centre, spread = asked
    at: list[Tensor | None] = [None, None, None, None]
    if shift or centre:
        total = _sums(passed)
        at[1] = total if shift else None
        at[2] = -total * _factor(layer.weight, layer.rstd) if centre else None
    if (scale or spread) and x is not None:
        along = _sums(passed * layer.normalised(x))
        at[0] = along if scale else None
        at[3] = along * _factor(layer.weight) / _factor(layer.rstd) if spread else None
    pairs = zip(at, layer, strict=True)
    return [None if gradient is None else gradient.to(numbers) for gradient, numbers in pairs]


def _factor(*numbers: Tensor | None) -> Any:
    """The product of those that are given."""
    return math.prod(each for each in numbers if each is not None)


def _sums(t: Tensor) -> Tensor:
    """Of every channel; by operations of torch where they will be differentiated."""
    functions = affine_formulas if torch.is_grad_enabled() else arithmetic(t, "affine")
    return functions.sums(t)


def _passed_back(
    gradient: Tensor, out: Tensor | None, layer: Channels, both: bool
) -> tuple[Tensor, Tensor]:
    """The gradient at x, and that behind the rectifier if both are wanted."""
    if out is None and not layer.scaled:
        return gradient, gradient
    separate = both and layer.scaled and out is not None
    gradients: Any = _PassBack.apply(gradient, out, separate, *layer)
    return gradients[0], gradient if out is None else gradients[-1]


class _PassBack(Operation):
    """γ r g behind the rectifier, and g behind it if both are wanted."""

    @staticmethod
    def forward(gradient: Tensor, out: Tensor | None, both: bool, *layer: Any) -> tuple:
        at_x, passed = arithmetic(gradient, "affine").pass_back(
            gradient, None, out, Channels._make(layer), both
        )
        return (at_x, passed) if both else (at_x,)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        gradient, out, _, *channels = inputs
        ctx.save_for_backward(gradient, out, *channels)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        refuse_third()
        gradient, out, *channels = ctx.saved_tensors
        layer = Channels._make(channels)
        u, beside = cotangents if len(cotangents) == 2 else (cotangents[0], None)
        if u is None and beside is None:
            return (None,) * 7
        u = torch.zeros_like(gradient) if u is None else u
        scale, _, _, spread = _asked(ctx, layer, first=3, tensors=1 + (out is not None))
        at_g, both = arithmetic(gradient, "affine").pass_twice(
            u, beside, gradient, out, layer, scale or spread
        )
        at_weight = both[0].to(layer.weight) if scale else None
        at_rstd = both[1].to(layer.rstd) if spread else None
        return at_g, None, None, at_weight, None, None, at_rstd
