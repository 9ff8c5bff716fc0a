r"""Batch normalisation in training mode: its value, gradient and second derivative in closed form.

With h = (x - mean) r the normalised input, r = 1 / std, ⟨.⟩ the mean over batch and space,
$y = γ h + β + residual$, out = y or max(y, 0), g the gradient at y and u the cotangent of the
gradient at x:

$$ ∂x = γ r (g - ⟨g⟩ - h ⟨g h⟩), \quad ∂γ = \sum g h, \quad ∂β = \sum g $$
$$ d g = γ r (u - ⟨u⟩ - h ⟨u h⟩), \quad
   d γ = \sum r a, \quad a = ⟨(g - ⟨g⟩ - h ⟨g h⟩) u⟩ = ⟨g u⟩ - ⟨g⟩⟨u⟩ - ⟨g h⟩⟨u h⟩ $$
$$ d x = γ r^2 \left( - h a - ⟨u h⟩ (g - ⟨g⟩) - ⟨g h⟩ (u - ⟨u⟩) + 2 h ⟨g h⟩ ⟨u h⟩ \right). $$

Sums are taken in single precision or better, and results have the type of what they belong to.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Channels",
    "Layer",
    "Pulled",
    "PulledTwice",
    "Running",
    "differentiate",
    "moments",
    "normalise",
    "pass_back",
    "pass_twice",
    "pull",
    "shift",
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


class Pulled(NamedTuple):
    """Gradients of a layer: at its input, the sums of g h and of g, and g itself."""

    x: Tensor
    gh: Tensor
    g: Tensor
    residual: Tensor


class PulledTwice(NamedTuple):
    """Second derivatives of a layer: with respect to the gradient, the input and γ."""

    g: Tensor
    x: Tensor
    weight: Tensor


class Channels(NamedTuple):
    """What a layer does to its channels when that does not depend on the batch.

    Attributes:
        weight: γ [C], or None for ones.
        bias: β [C], or None for zeros.
        mean: taken away from each channel [C]; None, as the variance, where nothing is normalised.
        variance: of each channel [C].
        eps: added to it.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    mean: Tensor | None = None
    variance: Tensor | None = None
    eps: float = 0.0

    @property
    def scaled(self) -> bool:
        """Channels are multiplied by something."""
        return self.variance is not None

    def normalised(self, x: Tensor) -> Tensor:
        """h = r (x - mean)."""
        x = _wide(x)
        if self.mean is None or self.variance is None:
            return x
        return (x - _channels(self.mean, x)) * _channels((self.variance + self.eps).rsqrt(), x)

    def times(self, t: Tensor) -> Tensor:
        """γ r t."""
        t = _wide(t)
        t = t if self.variance is None else t * _channels((self.variance + self.eps).rsqrt(), t)
        return t if self.weight is None else t * _channels(self.weight, t)


Running = tuple[Tensor | None, Tensor | None]
"""Running mean and running variance of each channel."""


def moments(x: Tensor, eps: float, running: Running, momentum: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of each channel; running statistics follow, in place."""
    variance, mean = torch.var_mean(_wide(x), _axes(x), correction=0)
    count = x.numel() // x.shape[1]
    for old, new in zip(running, (mean, variance * (count / (count - 1))), strict=True):
        if old is not None:
            old.mul_(1 - momentum).add_(new, alpha=momentum)
    return mean, (variance + eps).rsqrt()


def normalise(layer: Layer, residual: Tensor | None) -> Tensor:
    """γ h + β + residual, rectified if wanted."""
    y = _scaled(layer, _normalised(layer))
    if layer.bias is not None:
        y = y + _channels(layer.bias, layer.x)
    y = y if residual is None else y + residual
    return (y.relu() if layer.rectified else y).to(layer.x.dtype)


def pull(layer: Layer, gradient: Tensor, more: Tensor | None) -> Pulled:
    """The gradient at `x`, to which `more` is added, and what else comes with it."""
    h, g = _normalised(layer), _behind_rectifier(layer, gradient)
    mean_g, mean_gh = _mean(g), _mean(g * h)
    at_x = _scaled(layer, (g - mean_g - h * mean_gh)) * _channels(layer.rstd, h)
    at_x = at_x if more is None else at_x + more
    count = layer.x.numel() // layer.x.shape[1]
    sums = count * mean_gh.flatten(), count * mean_g.flatten()
    return Pulled(at_x.to(layer.x.dtype), *sums, g.to(gradient.dtype))


def differentiate(
    layer: Layer,
    gradient: Tensor,
    sums: tuple[Tensor, Tensor],
    u: Tensor,
    at_residual: Tensor | None,
) -> PulledTwice:
    """The derivative of `pull` at the cotangents u of the gradient at x and that at the residual.

    Args:
        layer: the layer.
        gradient: what `pull` was given.
        sums: of g h and of g, as `pull` found them.
        u: cotangent of `Pulled.x`.
        at_residual: cotangent of `Pulled.residual`.
    """
    h, g, u = _normalised(layer), _behind_rectifier(layer, gradient), _wide(u)
    count = layer.x.numel() // layer.x.shape[1]
    gh, g_mean = (_channels(each / count, h) for each in sums)
    u_mean, uh = _mean(u), _mean(u * h)
    a = _mean((g - g_mean - h * gh) * u)
    r = _channels(layer.rstd, h)
    at_g = _scaled(layer, r * (u - u_mean - h * uh))
    at_g = at_g if at_residual is None else at_g + at_residual
    inner = h * (2 * gh * uh - a) - uh * (g - g_mean) - gh * (u - u_mean)
    at_x = _scaled(layer, r.square() * inner)
    at_gradient = _behind_rectifier(layer, at_g).to(gradient.dtype)
    return PulledTwice(at_gradient, at_x.to(layer.x.dtype), (count * r * a).flatten())


def with_parameters(
    layer: Layer, gradient: Tensor, sums: tuple[Tensor, Tensor], found: PulledTwice, at: tuple
) -> PulledTwice:
    """What cotangents of ∂γ and ∂β, `at` [C] each or None, add to the second derivatives."""
    h, g = _normalised(layer), _behind_rectifier(layer, gradient)
    count = layer.x.numel() // layer.x.shape[1]
    gh, g_mean = (_channels(each / count, h) for each in sums)
    at_weight, at_bias = (
        torch.zeros_like(h[:1]) if each is None else _channels(each, h) for each in at
    )
    at_g = _behind_rectifier(layer, at_weight * h + at_bias)
    at_x = at_weight * _channels(layer.rstd, h) * (g - g_mean - h * gh)
    return PulledTwice(
        (found.g + at_g).to(found.g.dtype), (found.x + at_x).to(found.x.dtype), found.weight
    )


def shift(x: Tensor, layer: Channels, residual: Tensor | None, rectified: bool) -> Tensor:
    """γ r (x - mean) + β + residual, rectified if wanted."""
    y = layer.normalised(x)
    y = y if layer.weight is None else y * _channels(layer.weight, y)
    y = y if layer.bias is None else y + _channels(layer.bias, y)
    y = y if residual is None else y + residual
    return (y.relu() if rectified else y).to(x.dtype)


def pass_back(
    t: Tensor, beside: Tensor | None, out: Tensor | None, layer: Channels, both: bool
) -> tuple[Tensor, Tensor | None]:
    """γ r t + beside behind the rectifier; and t behind it, if both are wanted."""
    found = layer.times(t)
    found = found if beside is None else found + beside
    return _where_passed(found, out).to(t.dtype), _where_passed(t, out) if both else None


def pass_twice(
    u: Tensor,
    beside: Tensor | None,
    gradient: Tensor,
    out: Tensor | None,
    layer: Channels,
    summed: bool,
) -> tuple[Tensor, Tensor | None]:
    """The derivative of `pass_back` at the cotangents of its results: at the gradient and at γ."""
    at_g, _ = pass_back(u, beside, out, layer, both=False)
    if not summed:
        return at_g, None
    product = layer._replace(weight=None).times(_where_passed(_wide(gradient), out)) * u
    return at_g, product.sum(_axes(product))


def _where_passed(t: Tensor, out: Tensor | None) -> Tensor:
    return t if out is None else torch.where(out > 0, t, 0.0)


def _normalised(layer: Layer) -> Tensor:
    """h."""
    x = _wide(layer.x)
    return (x - _channels(layer.mean, x)) * _channels(layer.rstd, x)


def _scaled(layer: Layer, t: Tensor) -> Tensor:
    return t if layer.weight is None else t * _channels(layer.weight, t)


def _behind_rectifier(layer: Layer, t: Tensor) -> Tensor:
    if not layer.rectified:
        return _wide(t)
    signs = normalise(layer, None) if layer.out is None else layer.out
    return torch.where(signs > 0, _wide(t), 0.0)


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.ndim - 2))


def _mean(t: Tensor) -> Tensor:
    return t.mean(_axes(t), keepdim=True)


def _axes(t: Tensor) -> list[int]:
    return [axis for axis in range(t.ndim) if axis != 1]


def _wide(t: Tensor) -> Tensor:
    """Half precision as single, everything else as it is."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()
