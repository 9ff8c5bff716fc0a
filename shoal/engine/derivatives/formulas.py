r"""Batch normalisation in training mode: its value, gradient and second derivative in closed form.

With h = (x - mean) r the normalised input, r = 1 / std, ⟨.⟩ the mean over batch and space,
$y = γ h + β + residual$, out = y or max(y, 0), g the gradient at y and u the cotangent of the
gradient at x:

$$ ∂x = γ r (g - ⟨g⟩ - h ⟨g h⟩), \quad ∂γ = \sum g h, \quad ∂β = \sum g $$
$$ d g = γ r (u - ⟨u⟩ - h ⟨u h⟩), \quad
   d γ = \sum r a, \quad a = ⟨(g - ⟨g⟩ - h ⟨g h⟩) u⟩ = ⟨g u⟩ - ⟨g⟩⟨u⟩ - ⟨g h⟩⟨u h⟩ $$
$$ d x = γ r^2 \left( - h a - ⟨u h⟩ (g - ⟨g⟩) - ⟨g h⟩ (u - ⟨u⟩) + 2 h ⟨g h⟩ ⟨u h⟩ \right). $$

Who uses mean and r elsewhere, and has the gradients m and q there, adds to ∂x the mean over n
pixels: $(m - r^2 h q) / n$.

Sums are taken in single precision or better, and results have the type of what they belong to.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.engine.derivatives.layout import all_but_channels, per_channel, wide

__all__ = [
    "AtMoments",
    "BackwardPass",
    "DoubleBackward",
    "Layer",
    "Running",
    "backward_pass",
    "differentiate",
    "moments",
    "normalise",
    "with_parameters",
]


class Layer(NamedTuple):
    """One normalised layer at one batch.

    Attributes:
        x: inputs [B, C, ...].
        weight: γ [C], or None for ones.
        bias: β [C], or None for zeros.
        out: outputs where the signs of its rectifier have to be read off them, else None.
        mean: of each channel [C].
        rstd: 1 / sqrt(variance + eps) of each channel [C].
        rectified: the outputs have passed a rectifier.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    out: Tensor | None
    mean: Tensor
    rstd: Tensor
    rectified: bool


class BackwardPass(NamedTuple):
    """Gradients of a layer: at its input, the sums of g h and of g, and g itself."""

    x: Tensor
    gh: Tensor
    g: Tensor
    residual: Tensor


class DoubleBackward(NamedTuple):
    """Second derivatives of a layer: with respect to the gradient, the input (if asked) and γ."""

    g: Tensor
    x: Tensor | None
    weight: Tensor


Running = tuple[Tensor | None, Tensor | None]
"""Running mean and running variance of each channel."""

AtMoments = tuple[Tensor | None, Tensor | None]
"""Gradients at mean and 1 / std of each channel, from wherever else these are used."""


def moments(x: Tensor, eps: float, running: Running, momentum: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of each channel; running statistics follow, in place."""
    variance, mean = torch.var_mean(wide(x), all_but_channels(x), correction=0)
    count = x.numel() // x.shape[1]
    for old, new in zip(running, (mean, variance * (count / (count - 1))), strict=True):
        if old is not None:
            old.mul_(1 - momentum).add_(new, alpha=momentum)
    return mean, (variance + eps).rsqrt()


def normalise(layer: Layer, residual: Tensor | None) -> Tensor:
    """γ h + β + residual, rectified if wanted."""
    y = _scaled(layer, _normalised(layer))
    if layer.bias is not None:
        y = y + per_channel(layer.bias, layer.x)
    y = y if residual is None else y + residual
    return (y.relu() if layer.rectified else y).to(layer.x.dtype)


def backward_pass(
    layer: Layer, gradient: Tensor, more: Tensor | None, moments: AtMoments = (None, None)
) -> BackwardPass:
    """The gradient at `x`, to which `more` and that of the moments are added, and the others."""
    h, g = _normalised(layer), _behind_rectifier(layer, gradient)
    mean_g, mean_gh = _mean(g), _mean(g * h)
    at_x = _scaled(layer, (g - mean_g - h * mean_gh)) * per_channel(layer.rstd, h)
    at_x = at_x if more is None else at_x + more
    count = layer.x.numel() // layer.x.shape[1]
    at_mean, at_rstd = moments
    if at_mean is not None:
        at_x = at_x + per_channel(at_mean / count, h)
    if at_rstd is not None:
        at_x = at_x - h * per_channel(layer.rstd.square() * at_rstd / count, h)
    sums = count * mean_gh.flatten(), count * mean_g.flatten()
    return BackwardPass(at_x.to(layer.x.dtype), *sums, g.to(gradient.dtype))


def differentiate(
    layer: Layer,
    gradient: Tensor,
    sums: tuple[Tensor, Tensor],
    u: Tensor,
    at_residual: Tensor | None,
    at_input: bool = True,
) -> DoubleBackward:
    """The derivative of `backward_pass`, at cotangents of the gradients at x and at the residual.

    Args:
        layer: the layer.
        gradient: what `backward_pass` was given.
        sums: of g h and of g, as `backward_pass` found them.
        u: cotangent of `BackwardPass.x`.
        at_residual: cotangent of `BackwardPass.residual`.
        at_input: also the derivative with respect to x, by h.
    """
    h, g, u = _normalised(layer), _behind_rectifier(layer, gradient), wide(u)
    count = layer.x.numel() // layer.x.shape[1]
    gh, g_mean = (per_channel(each / count, h) for each in sums)
    u_mean, uh = _mean(u), _mean(u * h)
    a = _mean((g - g_mean - h * gh) * u)
    r = per_channel(layer.rstd, h)
    at_g = _scaled(layer, r * (u - u_mean - h * uh))
    at_g = at_g if at_residual is None else at_g + at_residual
    at_x = None
    if at_input:
        inner = h * (2 * gh * uh - a) - uh * (g - g_mean) - gh * (u - u_mean)
        at_x = _scaled(layer, r.square() * inner).to(layer.x.dtype)
    at_gradient = _behind_rectifier(layer, at_g).to(gradient.dtype)
    return DoubleBackward(at_gradient, at_x, (count * r * a).flatten())


def with_parameters(
    layer: Layer, gradient: Tensor, sums: tuple[Tensor, Tensor], at_input: DoubleBackward, at: tuple
) -> DoubleBackward:
    """What cotangents of ∂γ and ∂β, `at` [C] each or None, add to the second derivatives."""
    h, g = _normalised(layer), _behind_rectifier(layer, gradient)
    count = layer.x.numel() // layer.x.shape[1]
    gh, g_mean = (per_channel(each / count, h) for each in sums)
    at_weight, at_bias = (
        torch.zeros_like(h[:1]) if each is None else per_channel(each, h) for each in at
    )
    at_g = _behind_rectifier(layer, at_weight * h + at_bias)
    at_x = at_input.x
    if at_x is not None:
        more = at_weight * per_channel(layer.rstd, h) * (g - g_mean - h * gh)
        at_x = (at_x + more).to(at_x.dtype)
    return DoubleBackward((at_input.g + at_g).to(at_input.g.dtype), at_x, at_input.weight)


def _normalised(layer: Layer) -> Tensor:
    """h."""
    x = wide(layer.x)
    return (x - per_channel(layer.mean, x)) * per_channel(layer.rstd, x)


def _scaled(layer: Layer, t: Tensor) -> Tensor:
    return t if layer.weight is None else t * per_channel(layer.weight, t)


def _behind_rectifier(layer: Layer, t: Tensor) -> Tensor:
    if not layer.rectified:
        return wide(t)
    signs = normalise(layer, None) if layer.out is None else layer.out
    return torch.where(signs > 0, wide(t), 0.0)


def _mean(t: Tensor) -> Tensor:
    return t.mean(all_but_channels(t), keepdim=True)
