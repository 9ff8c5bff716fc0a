r"""Convolution whose derivatives of every order run on the library's own convolution kernels.

One trilinear form of input, weight and the gradient of the output stands behind the three products,

$$ T(x, w, g) = ⟨conv(x, w), g⟩, \quad dgrad(g, w) = ∂T/∂x, \quad wgrad(x, g) = ∂T/∂w, $$

so that the derivative of each is made of the other two: for gx = dgrad(g, w) with cotangent u,
d g = conv(u, w) and d w = wgrad(u, g). The second derivative of torch goes another way, through
convolutions with batch and channels exchanged, which no library is fast at.

Where nothing comes back to an output, nothing is computed: autograd would fill in zeros.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.engine.derivatives.again import again_of
from shoal.engine.derivatives.backend import by_kernels, launchers
from shoal.engine.derivatives.demand import wanted
from shoal.engine.derivatives.known_rows import Known
from shoal.engine.derivatives.layout import all_but_channels
from shoal.engine.functorch import Operation

__all__ = ["Geometry", "convolve"]

LONGEST = 5
"""Longest side of a filter for each channel that has kernels; they unroll its points."""


class Geometry(NamedTuple):
    """How the filters move, one number for each axis of the image.

    Attributes:
        stride: step of the filter.
        padding: zeros on both sides.
        dilation: distance of the filter's points.
        groups: parts into which the channels are divided.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, stride: Any, padding: Any, dilation: Any, groups: int, axes: int) -> "Geometry":
        """Numbers or sequences, as the functions of torch take them."""
        return cls(_each(stride, axes), _each(padding, axes), _each(dilation, axes), groups)

    def depthwise(self, weight: Tensor) -> bool:
        """Whether every channel of an image has a filter of its own."""
        return weight.ndim == 4 and 1 < self.groups == len(weight) and weight.shape[1] == 1

    def outputs(self, x: Tensor, weight: Tensor) -> tuple[int, ...]:
        """Shape of the convolution of x."""
        each = zip(x.shape[2:], weight.shape[2:], *self[:3], strict=True)
        sides = ((n + 2 * pad - gap * (k - 1) - 1) // step + 1 for n, k, step, pad, gap in each)
        return (len(x), len(weight), *sides)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    known: Known | None = None,
) -> Tensor:
    """conv(x, w) + b, for images [B, C, ...] of one, two or three axes, or its known value."""
    if not torch.is_grad_enabled():
        return _Convolution.forward(x, weight, bias, geometry, known)
    applied: Any = _Convolution.apply(x, weight, bias, geometry, known)
    return applied


class _Convolution(Operation):
    """conv(x, w) + b."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        known: Known | None,
    ) -> Tensor:
        if known is not None:
            return known.here()
        if _has_kernels(x, weight, geometry):
            return launchers("depthwise").outputs(x, weight, bias, geometry)
        x, (stride, padding, dilation, groups) = _without_gaps(x, weight, geometry)
        none = (0,) * len(stride)
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, none, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, weight, bias, ctx.geometry, _ = inputs
        ctx.has_bias, ctx.again = bias is not None, again_of(x)
        ctx.save_for_backward(x if ctx.again is None else None, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        g, (x, weight) = gradients[0], ctx.saved_tensors
        if g is None:
            return (None,) * 5
        x = x if ctx.again is None else ctx.again()
        at_x = _InputGradient.apply(g, weight, x, ctx.geometry) if wanted(ctx, 0) else None
        at_weight = _WeightGradient.apply(x, g, weight, ctx.geometry) if wanted(ctx, 1) else None
        at_bias = None
        if ctx.has_bias and wanted(ctx, 2):
            at_bias = g.sum(all_but_channels(g))
        return at_x, at_weight, at_bias, None, None


class _InputGradient(Operation):
    """dgrad(g, w), in the shape of an input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, weight: Tensor, like: Tensor, geometry: Geometry) -> Tensor:
        return _native_gradients(g, like, weight, geometry, at_input=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        g, weight, _, ctx.geometry = inputs
        ctx.save_for_backward(g, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        u, (g, weight) = gradients[0], ctx.saved_tensors
        if u is None:
            return None, None, None, None
        at_g = _Convolution.apply(u, weight, None, ctx.geometry, None) if wanted(ctx, 0) else None
        at_weight = _WeightGradient.apply(u, g, weight, ctx.geometry) if wanted(ctx, 1) else None
        return at_g, at_weight, None, None


class _WeightGradient(Operation):
    """wgrad(x, g), in the shape of a weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, g: Tensor, like: Tensor, geometry: Geometry) -> Tensor:
        return _native_gradients(g, x, like, geometry, at_input=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, g, _, ctx.geometry = inputs
        ctx.save_for_backward(x, g)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        u, (x, g) = gradients[0], ctx.saved_tensors
        if u is None:
            return None, None, None, None
        at_x = _InputGradient.apply(g, u, x, ctx.geometry) if wanted(ctx, 0) else None
        at_g = _Convolution.apply(x, u, None, ctx.geometry, None) if wanted(ctx, 1) else None
        return at_x, at_g, None, None


def _has_kernels(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Whether there are kernels for such a layer."""
    small = geometry.depthwise(weight) and max(weight.shape[2:]) <= LONGEST
    return small and weight.dtype == x.dtype and by_kernels(x)


def _native_gradients(
    g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, at_input: bool
) -> Tensor:
    stride, padding, dilation, groups = geometry
    if _has_kernels(x, weight, geometry) and g.dtype == x.dtype:
        kernels = launchers("depthwise")
        gradient = kernels.at_input if at_input else kernels.at_weight
        return gradient(g, x, weight, geometry)
    none = [0] * len(stride)
    mask = [at_input, not at_input, False]
    gradients = torch.ops.aten.convolution_backward(
        g, x, weight, None, stride, padding, dilation, False, none, groups, mask
    )
    return gradients[0] if at_input else gradients[1]


def _without_gaps(x: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """Of a filter of one point that jumps, the pixels that it touches.

    Taking them out first can be four times faster on a GPU than to let the library skip the rest.
    """
    pointwise = all(side == 1 for side in weight.shape[2:]) and not any(geometry.padding)
    if not pointwise or max(geometry.stride) == 1:
        return x, geometry
    touched = (slice(None), slice(None), *(slice(None, None, step) for step in geometry.stride))
    return x[touched], geometry._replace(stride=(1,) * len(geometry.stride))


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers
