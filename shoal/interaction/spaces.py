"""Spaces: the coordinates in which members are compared.

A space turns its *base* into coordinates: leaves [M, S, D]. The base is a dict of tensors [M, ...]:
the weights, `{"outputs": [M, B, C]}`, or the input gradients, `{"gradients": [M, B, ...]}`. Beside
the outputs, `"weight"` may hold the weight of each row. The coordinates of member i depend on the
tensors of member i alone. A wrapper (see `shoal.interaction.space`) is a space around another
space, never a new kernel.
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
    """The weights of the last layer alone, S = 1: few enough to estimate a score.

    Attributes:
        tensors: number of parameter tensors, counted from the last; a weight and a bias are two.
    """

    tensors: int = 2
    base: Base = field(default="weights", init=False, repr=False)
    isometric: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.tensors < 1:
            raise ConfigError(f"a last layer needs at least one tensor, not {self.tensors}")

    def __call__(self, base: Tree) -> Leaves:
        """The last tensors, flattened behind their member axis."""
        return [rows(tensor).unsqueeze(1) for tensor in list(base.values())[-self.tensors :]]


@registry.register("layerwise")
@dataclass(frozen=True)
class Layerwise:
    """Every parameter tensor separately: S tensors, each with its own bandwidth."""

    base: Base = field(default="weights", init=False, repr=False)
    isometric: bool = field(default=False, init=False, repr=False)

    def __call__(self, base: Tree) -> Leaves:
        """One leaf [M, S, D]; smaller tensors are padded with zeros."""
        flat = [rows(tensor) for tensor in base.values()]
        widest = max(matrix.shape[1] for matrix in flat)
        return [torch.stack([F.pad(matrix, (0, widest - matrix.shape[1])) for matrix in flat], 1)]


_TARGETS = ("logit", "log-probability")


@registry.register("weights", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class Weights:
    """The weights: S = 1, one leaf per parameter tensor, without copies."""

    base: Base = field(default="weights", init=False, repr=False)
    isometric: bool = field(default=True, init=False, repr=False)

    def __call__(self, base: Tree) -> Leaves:
        """Each tensor flattened behind its member axis."""
        return [rows(tensor).unsqueeze(1) for tensor in base.values()]


@registry.register("outputs", cite=("wang2019function", "dangelo2021repulsive"))
@dataclass(frozen=True)
class Outputs:
    """The function: outputs on the batch, S = 1 and D = B C.

    With weights w of the rows, coordinates are multiplied by sqrt(w): a row of weight two repels
    like the same row twice, and a row of weight zero does not count.

    Attributes:
        probabilities: softmax of the outputs instead of the outputs.
        published: with probabilities, the driving forces and a functional prior act on them too, as
            in released code (`shoal.training.step.probabilities`). Not for points of your own.
    """

    probabilities: bool = False
    published: bool = False
    base: Base = field(default="outputs", init=False, repr=False)

    @property
    def isometric(self) -> bool:
        """Whether the coordinates are the outputs themselves, not probabilities."""
        return not self.probabilities

    def __call__(self, base: Tree) -> Leaves:
        """All outputs of a member as one vector."""
        outputs = base["outputs"]
        values = outputs.softmax(-1) if self.probabilities else outputs
        if "weight" in base:
            values = values * base["weight"].sqrt().unsqueeze(-1)
        return [values.flatten(1).unsqueeze(1)]


@registry.register("input-gradients", cite=("trinh2024input",))
@dataclass(frozen=True)
class InputGradients:
    """Input gradients: one gradient per input, S = B sites of D = input coordinates.

    Input gradients determine a function up to a constant, with far fewer numbers than the weights.
    For classes they are gradients of the true class; for real targets, of the summed predicted
    means. Trinh et al. (2024), arXiv 2306.02775.

    Attributes:
        target: `logit`, the raw output, or `log-probability`, the log-likelihood of the target.
        fraction: batch fraction on which members are compared, drawn anew at every step. The kernel
            is a mean over sites, and the fraction gives an unbiased estimate of it. Its logarithm
            is biased, as for any batch. Below 1, batch normalisation uses the statistics of the
            whole batch (tokens: the fraction's statistics).
        gradients_of: name of the input, for a network with several; by default the only real input,
            or the first embedding.
        own_statistics: batch normalisation uses the fraction's own statistics instead. On a GPU
            this costs nearly as much as the whole batch.
        coupled: the fraction's points act on each other's input gradients through batch
            normalisation, as points of a whole batch do. The second derivative holds normalised
            activations fixed. False: the gradient at a point depends on no other point.
    """

    target: str = "logit"
    fraction: float = 1.0
    own_statistics: bool = False
    coupled: bool = True
    gradients_of: str | None = None
    base: Base = field(default="gradients", init=False, repr=False)
    isometric: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.target not in _TARGETS:
            raise ConfigError(
                f"input gradients have no target '{self.target}'; "
                f"{nearest(str(self.target), _TARGETS)}"
            )
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction must be above 0 and at most 1, not {self.fraction}")

    def __call__(self, base: Tree) -> Leaves:
        """One vector per member and data point."""
        return [base["gradients"].flatten(2)]
