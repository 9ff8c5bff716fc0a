"""Spaces: the coordinates in which members are compared.

A space turns its *base* into coordinates: leaves [M, S, D]. The base is a dict of tensors [M, ...]:
the weights, `{"outputs": [M, B, C]}`, or the input gradients, `{"gradients": [M, B, ...]}`. Beside
the outputs, `"weight"` may hold the weight of each row. The coordinates of member i depend on the
tensors of member i alone. A wrapper, which changes units or
axes, is a space around another space, never a new kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.random import hashed, key, normal
from shoal.core.registry import Registry, nearest, nested_field
from shoal.core.tree import rows
from shoal.core.types import Leaves, Tree

__all__ = [
    "BASES",
    "FACTORS",
    "Base",
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


Base = Literal["weights", "outputs", "gradients"]

registry = Registry("space")


class Space(Protocol):
    """Coordinates of the members."""

    @property
    def base(self) -> Base:
        """The tensors that give the coordinates: weights, outputs or gradients."""
        ...

    @property
    def isometric(self) -> bool:
        """Whether the coordinates are the numbers of the base, tensor by tensor, at one site."""
        ...

    def __call__(self, base: Tree) -> Leaves:
        """Leaves [M, S, D]."""
        ...


BASES = ("identity", "pca", "pca-uncentred", "dct")
"""Axes by name: unchanged, principal components, axes of the second moments, cosines."""

FACTORS = ("identity", "eigenvalues", "tuned")
"""Units by name: unchanged, standard deviation of the training data, between the two."""


def _outputs() -> Space:
    return registry.make("outputs")


def _weights() -> Space:
    return registry.make("weights")


def innermost(space: Any) -> Any:
    """The space inside all wrappers."""
    while hasattr(space, "space"):
        space = space.space
    return space


@registry.register("normalised")
@dataclass(frozen=True)
class Normalised:
    """Coordinates on the unit sphere: z / sqrt(|z|² + eps), with the norm over all leaves.

    A vector of length zero has no direction: it does not change, and no force acts on it.

    Attributes:
        space: the inner space.
        eps: avoids division by zero.
    """

    space: Space = nested_field(registry, _outputs)
    eps: float = 1e-12

    isometric: bool = field(default=False, init=False, repr=False)

    @property
    def base(self) -> Base:
        """The base of the inner space."""
        return self.space.base

    def __call__(self, base: Tree) -> Leaves:
        """Leaves of unit length."""
        leaves = self.space(base)
        squares = torch.stack([leaf.square().sum(-1) for leaf in leaves]).sum(0)
        inverse = torch.where(squares > 0, (squares + self.eps).rsqrt(), 0.0)
        return [leaf * inverse.unsqueeze(-1) for leaf in leaves]


@registry.register("rotated")
@dataclass(frozen=True)
class Rotated:
    """Coordinates along other axes: z U with the columns of U orthonormal, for spaces of one leaf.

    Attributes:
        space: the inner space.
        basis: U [D, R] as a tensor, or a name: `identity`, `pca` (principal components of the
            training inputs), `pca-uncentred` (components of their second moments, without
            subtracting the mean), or `dct` (cosines of rising frequency along the image sides).
    """

    space: Space = nested_field(registry, _outputs)
    basis: Tensor | str = "identity"

    isometric: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.basis, str) and self.basis not in BASES:
            raise ConfigError(
                f"there is no basis called '{self.basis}'; {nearest(self.basis, BASES)}"
            )

    @property
    def base(self) -> Base:
        """The base of the inner space."""
        return self.space.base

    def __call__(self, base: Tree) -> Leaves:
        """Leaves [M, S, R]."""
        leaves, basis = self.space(base), self.basis
        if isinstance(basis, str):
            return leaves if basis == "identity" else _unfitted(basis)
        _check_axes("basis", basis, (leaves[0].shape[-1], *basis.shape[1:2]))
        return [leaf @ basis.to(leaf) for leaf in leaves]


@registry.register("scaled", cite=("trinh2024input",))
@dataclass(frozen=True)
class Scaled:
    """Coordinates in other units: z_d multiplied by a factor.

    λ_d is the variance of the training inputs along axis d, divided by its mean over the axes.
    `eigenvalues` multiplies by √λ_d: members repel most along axes of large data variance. `tuned`
    multiplies by √(λ_d / (alpha + (1 - alpha) λ_d)), from `identity` at alpha = 0 to `eigenvalues`
    at alpha = 1. Trinh et al. (2024), arXiv 2306.02775.

    Attributes:
        space: the inner space.
        factor: a number, a tensor [D] with one number per coordinate, or a name.
        alpha: parameter of `tuned`.
    """

    space: Space = nested_field(registry, _outputs)
    factor: Tensor | float | str = 1.0
    alpha: float = 1.0

    isometric: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.factor, str) and self.factor not in FACTORS:
            raise ConfigError(
                f"there is no scaling called '{self.factor}'; {nearest(self.factor, FACTORS)}"
            )
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha must lie between 0 and 1, not {self.alpha}")

    @property
    def base(self) -> Base:
        """The base of the inner space."""
        return self.space.base

    def __call__(self, base: Tree) -> Leaves:
        """Scaled leaves."""
        leaves, factor = self.space(base), self.factor
        if isinstance(factor, str):
            return leaves if factor == "identity" else _unfitted(factor)
        if isinstance(factor, Tensor) and factor.ndim:
            _check_axes("factor", factor, leaves[0].shape[-1:])
        if isinstance(factor, Tensor):
            return [leaf * factor.to(leaf) for leaf in leaves]
        return [leaf * factor for leaf in leaves]


def _check_axes(name: str, tensor: Tensor, wanted: Sequence[int]) -> None:
    if tuple(tensor.shape) != tuple(wanted) or tensor.ndim != (2 if name == "basis" else 1):
        raise ConfigError(
            f"{name} has shape {tuple(tensor.shape)}, but the space has {wanted[0]} coordinates"
        )


def _unfitted(name: str) -> Leaves:
    raise ConfigError(
        f"'{name}' must be fitted to the training data; train with shoal.fit, or call "
        f"shoal.interaction.axes.fitted first"
    )


@registry.register("projected")
@dataclass(frozen=True)
class Projected:
    """Random projection of a space: z R with R normal and fixed, which preserves distances.

    |z R|² is |z|² on average when the entries of R have variance 1 / directions (Johnson &
    Lindenstrauss).

    Attributes:
        space: the inner space.
        directions: number of directions.
        seed: fixes R.
    """

    space: Space = nested_field(registry, _weights)
    directions: int = 32
    seed: int = 0

    isometric: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.directions < 1:
            raise ConfigError(f"a projection needs at least one direction, not {self.directions}")

    @property
    def base(self) -> Base:
        """The base of the inner space."""
        return self.space.base

    def __call__(self, base: Tree) -> Leaves:
        """One leaf [M, S, directions]: the projections of all leaves, summed."""
        total = []
        for index, leaf in enumerate(self.space(base)):
            start = hashed(key(self.seed, "projection", 0, leaf.device) + index)
            R = normal(start, (leaf.shape[-1], self.directions), leaf.dtype)
            total.append(leaf @ (R / self.directions**0.5))
        return [torch.stack(total).sum(0)]


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
