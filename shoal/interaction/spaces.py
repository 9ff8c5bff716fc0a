"""Spaces: what it means for two members to be near each other.

A space turns the tensors in which it lives, its *base*, into coordinates: leaves [M, S, D]. The
base is a dict of tensors [M, ...]: the weights, or `{"outputs": [M, B, C]}`. Member i's coordinates
depend on member i's tensors alone. A wrapper is a space around a space, never a new kernel.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.random import hashed, key, normal
from shoal.core.registry import Registry, part
from shoal.core.tree import rows
from shoal.core.types import Leaves, Tree

__all__ = [
    "LastLayer",
    "Layerwise",
    "Normalised",
    "Outputs",
    "Projected",
    "Rotated",
    "Scaled",
    "Space",
    "Weights",
    "registry",
]

Base = Literal["weights", "outputs"]

registry = Registry("space")


class Space(Protocol):
    """Coordinates of the members."""

    @property
    def base(self) -> Base:
        """The tensors the coordinates are made of."""
        ...

    @property
    def isometric(self) -> bool:
        """The coordinates are the numbers of the base, tensor by tensor, at one site."""
        ...

    def __call__(self, base: Tree) -> Leaves:
        """Leaves [M, S, D]."""
        ...


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


@registry.register("normalised")
@dataclass(frozen=True)
class Normalised:
    """Coordinates on the unit sphere: z / sqrt(|z|² + eps), with the norm over all leaves.

    Attributes:
        space: the space inside.
        eps: keeps a vanishing vector at zero.
    """

    space: Space = part(registry, Outputs)
    eps: float = 1e-12

    isometric: bool = field(default=False, init=False, repr=False)

    @property
    def base(self) -> Base:
        """That of the space inside."""
        return self.space.base

    def __call__(self, base: Tree) -> Leaves:
        """Leaves of unit length."""
        leaves = self.space(base)
        squares = torch.stack([leaf.square().sum(-1) for leaf in leaves]).sum(0)
        return [leaf * (squares + self.eps).rsqrt().unsqueeze(-1) for leaf in leaves]


@registry.register("rotated")
@dataclass(frozen=True)
class Rotated:
    """Coordinates along other axes: z U with the columns of U orthonormal, for spaces of one leaf.

    Attributes:
        space: the space inside.
        basis: U [D, R], as a tensor; None leaves the axes as they are.
    """

    space: Space = part(registry, Outputs)
    basis: Tensor | None = None

    isometric: bool = field(default=False, init=False, repr=False)

    @property
    def base(self) -> Base:
        """That of the space inside."""
        return self.space.base

    def __call__(self, base: Tree) -> Leaves:
        """Leaves [M, S, R]."""
        basis = self.basis
        leaves = self.space(base)
        return leaves if basis is None else [leaf @ basis.to(leaf) for leaf in leaves]


@registry.register("scaled")
@dataclass(frozen=True)
class Scaled:
    """Coordinates in other units: z_d multiplied by a factor.

    Attributes:
        space: the space inside.
        factor: one number, or a tensor [D] with one for each coordinate.
    """

    space: Space = part(registry, Outputs)
    factor: Tensor | float = 1.0

    isometric: bool = field(default=False, init=False, repr=False)

    @property
    def base(self) -> Base:
        """That of the space inside."""
        return self.space.base

    def __call__(self, base: Tree) -> Leaves:
        """Scaled leaves."""
        factor = self.factor
        leaves = self.space(base)
        if isinstance(factor, Tensor):
            return [leaf * factor.to(leaf) for leaf in leaves]
        return [leaf * factor for leaf in leaves]


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


@registry.register("projected")
@dataclass(frozen=True)
class Projected:
    """A few random directions of a space: z R with R normal and fixed, which keeps distances.

    |z R|² is |z|² on average when the entries of R have variance 1 / directions (Johnson &
    Lindenstrauss).

    Attributes:
        space: the space inside.
        directions: how many.
        seed: chooses R.
    """

    space: Space = part(registry, Weights)
    directions: int = 32
    seed: int = 0

    isometric: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.directions < 1:
            raise ConfigError(f"a projection needs at least one direction, not {self.directions}")

    @property
    def base(self) -> Base:
        """That of the space inside."""
        return self.space.base

    def __call__(self, base: Tree) -> Leaves:
        """One leaf [M, S, directions]: the projections of all leaves, summed."""
        total = []
        for index, leaf in enumerate(self.space(base)):
            start = hashed(key(self.seed, "projection", 0, leaf.device) + index)
            R = normal(start, (leaf.shape[-1], self.directions), leaf.dtype)
            total.append(leaf @ (R / self.directions**0.5))
        return [torch.stack(total).sum(0)]
