"""A layer that scales and shifts every channel by fixed numbers: value, gradient and the next.

See `affine` for the equations. Sums are taken in single precision or better, and results have the
type of what they belong to.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.inference.second_order.layout import all_but_channels, per_channel, wide

__all__ = ["Channels", "pass_back", "pass_twice", "shift"]


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
        x = wide(x)
        if self.mean is None or self.variance is None:
            return x
        return (x - per_channel(self.mean, x)) * per_channel((self.variance + self.eps).rsqrt(), x)

    def times(self, t: Tensor) -> Tensor:
        """γ r t."""
        t = wide(t)
        t = t if self.variance is None else t * per_channel((self.variance + self.eps).rsqrt(), t)
        return t if self.weight is None else t * per_channel(self.weight, t)


def shift(x: Tensor, layer: Channels, residual: Tensor | None, rectified: bool) -> Tensor:
    """γ r (x - mean) + β + residual, rectified if wanted."""
    y = layer.normalised(x)
    y = y if layer.weight is None else y * per_channel(layer.weight, y)
    y = y if layer.bias is None else y + per_channel(layer.bias, y)
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
    product = layer._replace(weight=None).times(_where_passed(wide(gradient), out)) * u
    return at_g, product.sum(all_but_channels(product))


def _where_passed(t: Tensor, out: Tensor | None) -> Tensor:
    return t if out is None else torch.where(out > 0, t, 0.0)
