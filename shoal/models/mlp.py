"""Multilayer perceptrons, and the linear model, whose posterior is known exactly."""

import math
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from shoal.models.blueprint import registry
from shoal.models.parts import ACTIVATIONS, check_parts, check_widths, normalisation

__all__ = ["MLP", "LinearModel"]


@registry.register("mlp")
@dataclass(frozen=True)
class MLP:
    """Fully connected layers on the flattened input.

    Each hidden layer is linear map, normalisation, activation, dropout, in this order.

    >>> sum(p.numel() for p in MLP(hidden=(50,)).build((2,), 5).parameters())
    405

    Attributes:
        hidden: widths of the hidden layers; an empty tuple gives a linear model.
        activation: `relu`, `tanh`, `gelu`, `silu`, `elu` or `softplus`.
        norm: None, `batch` or `layer`.
        dropout: dropout probability of hidden units.
    """

    hidden: tuple[int, ...] = (100, 100)
    activation: str = "relu"
    norm: str | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_widths("hidden", self.hidden)
        check_parts(self.activation, self.norm, self.dropout)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network from inputs of this shape to this many outputs."""
        layers: list[nn.Module] = [nn.Flatten()]
        widths = (math.prod(input_shape), *self.hidden)
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), *normalisation(self.norm, after)]
            layers += [ACTIVATIONS[self.activation]()]
            layers += [nn.Dropout(self.dropout)] if self.dropout else []
        return nn.Sequential(*layers, nn.Linear(widths[-1], outputs))


@registry.register("linear")
@dataclass(frozen=True)
class LinearModel:
    """One affine map of the flattened input, f(x) = W x + b.

    >>> sum(p.numel() for p in LinearModel().build((1, 8, 8), 10).parameters())
    650

    Attributes:
        bias: whether the map has a bias b.
    """

    bias: bool = True

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network from inputs of this shape to this many outputs."""
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs, self.bias))
