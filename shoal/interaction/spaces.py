"""Spaces: what it means for two members to be near each other.

A space turns the tensors in which it lives, its *base*, into coordinates: leaves [M, S, D]. The
base is a dict of tensors [M, ...]: the weights, `{"outputs": [M, B, C]}`, or the gradients with
respect to the inputs, `{"gradients": [M, B, ...]}`. Member i's coordinates depend on member i's
tensors alone. A wrapper (see `shoal.interaction.space`) is a space around a space, never a new
kernel.
"""

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.core.tree import rows
from shoal.core.types import Leaves, Tree
from shoal.interaction.space import (
    Base,
    Normalised,
    Projected,
    Rotated,
    Scaled,
    Space,
    innermost,
    registry,
)

__all__ = [
    "InputGradients",
    "LastLayer",
    "Layerwise",
    "Normalised",
    "Outputs",
    "Projected",
    "Rotated",
    "Scaled",
    "Space",
    "Weights",
    "innermost",
    "registry",
]


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


_TARGETS = ("logit", "log-probability")


@registry.register("weights", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class Weights:
    """The weights themselves: S = 1, one leaf for each parameter tensor, nothing is copied."""

    base: Base = field(default="weights", init=False, repr=False)
    isometric: bool = field(default=True, init=False, repr=False)

    def __call__(self, base: Tree) -> Leaves:
        """Each tensor flattened behind its member axis."""
        return [rows(tensor).unsqueeze(1) for tensor in base.values()]


@registry.register("outputs", cite=("wang2019function", "dangelo2021repulsive"))
@dataclass(frozen=True)
class Outputs:
    """The function: outputs on the batch, S = 1 and D = B C.

    Attributes:
        probabilities: softmax of the outputs instead of the outputs.
    """

    probabilities: bool = False
    base: Base = field(default="outputs", init=False, repr=False)

    @property
    def isometric(self) -> bool:
        """Unless they are turned into probabilities."""
        return not self.probabilities

    def __call__(self, base: Tree) -> Leaves:
        """All outputs of a member as one vector."""
        outputs = base["outputs"]
        values = outputs.softmax(-1) if self.probabilities else outputs
        return [values.flatten(1).unsqueeze(1)]


@registry.register("input-gradients", cite=("trinh2024input",))
@dataclass(frozen=True)
class InputGradients:
    """What a member looks at: the gradient at each input, S = B sites of D = input coordinates.

    It tells a function up to a constant, and has far fewer numbers than the weights. For classes it
    is the gradient of the true class; for real targets, of the predicted means, summed. Trinh et
    al. (2024), arXiv 2306.02775.

    Attributes:
        target: `logit`, the raw output, or `log-probability`, the log likelihood of the target.
        fraction: share of each batch, drawn anew at every step, on which members are compared. The
            kernel is a mean over sites, of which the part gives an unbiased estimate; its logarithm
            is biased, as it is for any batch. Below 1, batch normalisation takes the statistics of
            the whole batch, in which the points of the part have no say (tokens: of the part).
        own_statistics: it takes those of the part instead, by which its points act on each other,
            as those of a whole batch do. On a GPU that costs nearly as much as the whole batch.
    """

    target: str = "logit"
    fraction: float = 1.0
    own_statistics: bool = False
    base: Base = field(default="gradients", init=False, repr=False)
    isometric: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.target not in _TARGETS:
            raise ConfigError(
                f"input gradients have no target '{self.target}'; "
                f"{nearest(str(self.target), _TARGETS)}"
            )
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction is a share above 0 and up to 1, not {self.fraction}")

    def __call__(self, base: Tree) -> Leaves:
        """One vector for each member and point."""
        return [base["gradients"].flatten(2)]
