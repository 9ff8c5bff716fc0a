"""Perceptrons on tables: learned sines and cosines of numbers, learned embeddings of categories."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.models.blueprint import registry
from shoal.models.mlp import MLP

__all__ = ["Embedded", "Periodic", "PeriodicMLP", "TableMLP", "embedding_width"]

WIDEST = 32
"""Largest width of the embedding of a category."""


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


def embedding_width(categories: int) -> int:
    """Width of the embedding of one of n categories: 1.6 n^0.56, at most 32, the rule of fastai.

    >>> embedding_width(33), embedding_width(10_000)
    (11, 32)
    """
    return min(WIDEST, round(1.6 * categories**0.56))


class Embedded(nn.Module):
    r"""Inputs x [B, D], whose last columns hold categories, each replaced by its embedding.

    Category c of n is the number (c + 1/2) / n. So columns of categories have unit scale as others
    have, and methods that look at the scale of the inputs treat all alike.

    Args:
        categories: number of categories of each of the last columns.
    """

    def __init__(self, categories: tuple[int, ...]) -> None:
        super().__init__()
        self.categories = categories
        self.tables = nn.ModuleList(nn.Embedding(n, embedding_width(n)) for n in categories)
        for weight in self.tables.parameters():
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Other columns, then the embeddings."""
        others = x.shape[1] - len(self.tables)
        parts, columns = [x[:, :others]], x[:, others:].unbind(1)
        for n, table, column in zip(self.categories, self.tables, columns, strict=True):
            if n * torch.finfo(x.dtype).eps > 0.5:
                raise ConfigError(
                    f"{str(x.dtype).removeprefix('torch.')} cannot number the {n} categories of a "
                    f"column; leave out precision, or set it to 'float32'"
                )
            parts.append(table((column * n).long().clamp(0, n - 1)))
        return torch.cat(parts, 1)


@registry.register("table-mlp", cite=("gorishniy2022embeddings",))
@dataclass(frozen=True)
class TableMLP(MLP):
    """A perceptron on a table: numbers first, other inputs, and categories as the last columns.

    The first numbers get learned sines and cosines beside them (`Periodic`; Gorishniy et al., 2022,
    arXiv 2203.05556). The last columns hold categories, which get embeddings (`Embedded`).

    >>> TableMLP(hidden=(50,), embeddings=(40, 3)).build((5,), 1)[2]
    Linear(in_features=19, out_features=50, bias=True)

    Attributes:
        columns: how many of the inputs get sines and cosines, from the first on; None for all
            that are no categories.
        frequencies: frequencies of an input.
        width: width of the encoding of an input.
        scale: standard deviation of the first frequencies, in periods per unit of the input.
        embeddings: number of categories of each of the last columns.
    """

    columns: int | None = 0
    frequencies: int = 16
    width: int = 8
    scale: float = 0.3
    embeddings: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.frequencies, self.width) < 1 or (self.columns or 0) < 0 or not self.scale > 0:
            raise ConfigError(
                f"a table network needs columns from 0 on, frequencies and width of at least 1 and "
                f"a scale above 0, not {self.columns}, {self.frequencies}, {self.width} and "
                f"{self.scale}"
            )
        if min(self.embeddings, default=1) < 1:
            raise ConfigError(
                f"embeddings are numbers of categories, at least 1, not {self.embeddings}"
            )

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network from inputs of this shape to this many outputs."""
        inputs = math.prod(input_shape) - len(self.embeddings)
        columns = inputs if self.columns is None else self.columns
        if columns > inputs or inputs < 0:
            raise ConfigError(
                f"a table network encodes {columns} numbers and {len(self.embeddings)} categories, "
                f"but there are {math.prod(input_shape)} inputs"
            )
        inputs += sum(map(embedding_width, self.embeddings))
        layers: list[nn.Module] = [Embedded(self.embeddings)] if self.embeddings else []
        if columns:
            layers.append(Periodic(columns, self.frequencies, self.width, self.scale))
            inputs += columns * self.width
        flat, *rest = super().build((inputs,), outputs).children()
        return nn.Sequential(flat, *layers, *rest)


@registry.register("periodic-mlp", cite=("gorishniy2022embeddings",))
@dataclass(frozen=True)
class PeriodicMLP(TableMLP):
    """`TableMLP` with learned sines and cosines of all numbers.

    >>> PeriodicMLP(hidden=(50,), columns=2, width=8).build((3,), 1)[2]
    Linear(in_features=19, out_features=50, bias=True)
    """

    columns: int | None = None
