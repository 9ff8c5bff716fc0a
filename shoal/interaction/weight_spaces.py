"""Parts of the weights as spaces: few enough numbers for a score to be estimated."""

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.tree import rows
from shoal.core.types import Leaves, Tree
from shoal.interaction.space import Base, registry

__all__ = ["LastLayer", "Layerwise"]


@registry.register("last-layer")
@dataclass(frozen=True)
class LastLayer:
    """The weights of the last layer alone, S = 1: few enough for a score to be estimated.

    Attributes:
        tensors: how many parameter tensors, from the last one on; a weight and a bias are two.
    """

    tensors: int = 2
    base: Base = field(default="weights", init=False, repr=False)
    isometric: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tensors < 1:
            raise ConfigError(f"a last layer has at least one tensor, not {self.tensors}")

    def __call__(self, base: Tree) -> Leaves:
        """The last tensors, flattened behind their member axis."""
        return [rows(tensor).unsqueeze(1) for tensor in list(base.values())[-self.tensors :]]


@registry.register("layerwise")
@dataclass(frozen=True)
class Layerwise:
    """Every parameter tensor by itself: S = the number of tensors, each with its own bandwidth."""

    base: Base = field(default="weights", init=False, repr=False)
    isometric: bool = field(default=False, init=False, repr=False)

    def __call__(self, base: Tree) -> Leaves:
        """One leaf [M, S, D]; tensors smaller than the largest end in zeros."""
        flat = [rows(tensor) for tensor in base.values()]
        widest = max(matrix.shape[1] for matrix in flat)
        return [torch.stack([F.pad(matrix, (0, widest - matrix.shape[1])) for matrix in flat], 1)]
