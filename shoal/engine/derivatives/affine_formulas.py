"""A layer that scales and shifts every channel by given numbers: value, gradient and the next.

See `affine` for the equations. Sums are taken in single precision or better, and results have the
type of what they belong to.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.engine.derivatives.layout import all_but_channels, per_channel, wide

__all__ = ["Channels", "pass_back", "pass_twice", "shift", "sums"]


class Channels(NamedTuple):
    """What a layer does to its channels when that does not depend on its input.

    Attributes:
        weight: γ [C], or None for ones.
        bias: β [C], or None for zeros.
        mean: taken away from each channel [C]; None, as 1 / std, where nothing is normalised.
        rstd: 1 / std of each channel [C].
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None

    @property
    def scaled(self) -> bool:
        """Channels are multiplied by something."""
        return self.rstd is not None

    def reduced(self, t: Tensor) -> Tensor:
        """r t."""
        t = wide(t)
        return t if self.rstd is None else t * per_channel(self.rstd, t)

    def normalised(self, x: Tensor) -> Tensor:
        """h = r (x - mean)."""
        x = wide(x)
        return self.reduced(x if self.mean is None else x - per_channel(self.mean, x))

    def weighted(self, t: Tensor) -> Tensor:
        """γ t."""
        return t if self.weight is None else t * per_channel(self.weight, t)


def shift(x: Tensor, layer: Channels, residual: Tensor | None, rectified: bool) -> Tensor:
    """γ r (x - mean) + β + residual, rectified if wanted."""
    y = layer.weighted(layer.normalised(x))
    y = y if layer.bias is None else y + per_channel(layer.bias, y)
    y = y if residual is None else y + residual
    return (y.relu() if rectified else y).to(x.dtype)


def pass_back(
    t: Tensor, beside: Tensor | None, out: Tensor | None, layer: Channels, both: bool
) -> tuple[Tensor, Tensor | None]:
    """γ r t + beside behind the rectifier; and t behind it, if both are wanted."""
    gradient = layer.weighted(layer.reduced(t))
    gradient = gradient if beside is None else gradient + beside
    return _where_passed(gradient, out).to(t.dtype), _where_passed(t, out) if both else None


def pass_twice(
    u: Tensor,
    beside: Tensor | None,
    gradient: Tensor,
    out: Tensor | None,
    layer: Channels,
    summed: bool,
) -> tuple[Tensor, Tensor | None]:
    """The derivative of `pass_back` at the cotangents of its results.

    It is taken with respect to the gradient and, if `summed`, to γ and 1 / std, together [2, C].
    """
    at_g, _ = pass_back(u, beside, out, layer, both=False)
    if not summed:
        return at_g, None
    product = wide(_where_passed(gradient, out)) * u
    both = layer.reduced(product), layer.weighted(product)
    return at_g, torch.stack([sums(each) for each in both])


def sums(t: Tensor) -> Tensor:
    """Of every channel [C], over the batch and its pixels."""
    return t.sum(all_but_channels(t))


def _where_passed(t: Tensor, out: Tensor | None) -> Tensor:
    return t if out is None else torch.where(out > 0, t, 0.0)
