"""Multilayer perceptrons, and the linear model, whose posterior is known exactly."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.models.blueprint import registry
from shoal.models.parts import ACTIVATIONS, check_parts, check_widths, normalisation

__all__ = ["MLP", "LinearModel", "Periodic", "PeriodicMLP"]


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


class Periodic(nn.Module):
    r"""Numbers x [B, D], and behind them learned sines and cosines of the first ones.

    Number j has the frequencies $c_j$ and becomes
    $\mathrm{relu}(W_j [\sin(2 \pi c_j x_j), \cos(2 \pi c_j x_j)] + b_j)$.

    Args:
        columns: how many numbers are encoded.
        frequencies: frequencies of a number.
        width: outputs of a number.
        scale: standard deviation of the first frequencies.
    """

    def __init__(self, columns: int, frequencies: int, width: int, scale: float) -> None:
        super().__init__()
        bound = (2 * frequencies) ** -0.5
        self.frequency = nn.Parameter(scale * torch.randn(columns, frequencies))
        self.weight = nn.Parameter(bound * (2 * torch.rand(columns, 2 * frequencies, width) - 1))
        self.bias = nn.Parameter(bound * (2 * torch.rand(columns, 1, width) - 1))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, D] and the encoding, [B, D + columns * width]."""
        angle = 2 * math.pi * x[:, : len(self.frequency), None] * self.frequency
        waves = torch.cat([angle.sin(), angle.cos()], -1).transpose(0, 1)
        encoded = (waves @ self.weight + self.bias).relu()
        return torch.cat([x, encoded.transpose(0, 1).flatten(1)], 1)


@registry.register("periodic-mlp", cite=("gorishniy2022embeddings",))
@dataclass(frozen=True)
class PeriodicMLP(MLP):
    """A perceptron on standardised numbers and learned sines and cosines of them.

    Gorishniy et al. (2022), arXiv 2203.05556; the numbers themselves stay beside their encoding.

    >>> PeriodicMLP(hidden=(50,), columns=2, width=8).build((3,), 1)[2]
    Linear(in_features=19, out_features=50, bias=True)

    Attributes:
        columns: how many of the inputs are encoded, from the first on; None for all.
        frequencies: frequencies of an input.
        width: width of the encoding of an input.
        scale: standard deviation of the first frequencies, in periods per unit of the input.
    """

    columns: int | None = None
    frequencies: int = 16
    width: int = 8
    scale: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = 1 if self.columns is None else self.columns
        if min(columns, self.frequencies, self.width) < 1 or not self.scale > 0:
            raise ConfigError(
                f"periodic-mlp needs columns, frequencies, width of at least 1 and a scale above "
                f"0, not {self.columns}, {self.frequencies}, {self.width} and {self.scale}"
            )

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network from inputs of this shape to this many outputs."""
        inputs = math.prod(input_shape)
        columns = inputs if self.columns is None else self.columns
        if columns > inputs:
            raise ConfigError(f"periodic-mlp encodes {columns} inputs, but there are {inputs}")
        layer = Periodic(columns, self.frequencies, self.width, self.scale)
        flat, *rest = super().build((inputs + columns * self.width,), outputs).children()
        return nn.Sequential(flat, layer, *rest)


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
