"""The linear model: what everything else should beat, and where posteriors are exact."""

import math
from dataclasses import dataclass

from torch import nn

from shoal.models.registry import registry

__all__ = ["Linear"]


@registry.register("linear")
@dataclass(frozen=True)
class Linear:
    """One affine map of the flattened input, f(x) = W x + b.

    >>> sum(p.numel() for p in Linear().build((1, 8, 8), 10).parameters())
    650

    Attributes:
        bias: whether there is a b.
    """

    bias: bool = True

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network from inputs of this shape to this many outputs."""
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs, self.bias))
