"""Target densities for plain particles, with exact samples for comparison.

`log_density` takes one particle [D] and gives a scalar, so that `vmap(grad(log_density))` is the
score of many particles.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry

__all__ = ["Funnel", "Gaussian2D", "Mixture", "StandardGaussian", "Target", "registry"]

registry = Registry("target")

Pair = tuple[float, float]
Square = tuple[Pair, Pair]


class Target(Protocol):
    """A normalised density that can be evaluated, sampled exactly and drawn."""

    @property
    def dimension(self) -> int:
        """Coordinates D of a particle."""
        ...

    @property
    def bounds(self) -> tuple[Pair, ...]:
        """The range of each coordinate in a figure."""
        ...

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of one particle [D], a scalar."""
        ...

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent exact samples [n, D]."""
        ...


@registry.register("standard")
@dataclass(frozen=True)
class StandardGaussian:
    """A round Gaussian about the origin, N(0, std² I).

    >>> StandardGaussian(2).log_density(torch.zeros(2))
    tensor(-1.8379)

    Attributes:
        dimension: coordinates of a particle.
        std: standard deviation of each coordinate.
    """

    dimension: int = 2
    std: float = 1.0

    def __post_init__(self) -> None:
        if self.dimension < 1:
            raise ConfigError(f"dimension must be at least 1, not {self.dimension}")
        _check_std(self.std)

    @property
    def bounds(self) -> tuple[Pair, ...]:
        """Three standard deviations."""
        return ((-3.0 * self.std, 3.0 * self.std),) * self.dimension

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of one particle [D]."""
        return _normal(x, self.std).sum()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent samples [n, D]."""
        return self.std * torch.randn(n, self.dimension, generator=generator)


@registry.register("gaussian", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class Gaussian2D:
    """A tilted Gaussian in the plane, N(mean, covariance).

    The defaults are those of D'Angelo & Fortuin (2021), arXiv 2106.11642.

    Attributes:
        mean: its centre.
        covariance: a symmetric positive definite matrix, as rows.
    """

    mean: Pair = (-0.68, 0.80)
    covariance: Square = ((1.10, 0.80), (0.80, 3.35))

    def __post_init__(self) -> None:
        _check_hill(self.mean, self.covariance)

    @property
    def dimension(self) -> int:
        """Two coordinates."""
        return 2

    @property
    def bounds(self) -> tuple[Pair, ...]:
        """Three standard deviations."""
        return _box([self.mean], [self.covariance])

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of one particle [2]."""
        return _tilted(x, self.mean, self.covariance)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent samples [n, 2]."""
        noise = torch.randn(n, 2, generator=generator)
        return torch.tensor(self.mean) + noise @ _cholesky(self.covariance).T


@registry.register("mixture")
@dataclass(frozen=True)
class Mixture:
    """Three unequal Gaussian hills in the plane, sum_k weight_k N(mean_k, covariance_k).

    Attributes:
        weights: share of each hill; they sum to one.
        means: centre of each hill.
        covariances: symmetric positive definite matrix of each hill, as rows.
    """

    weights: tuple[float, ...] = (0.5, 0.3, 0.2)
    means: tuple[Pair, ...] = ((-2.0, -1.0), (2.0, -1.5), (0.5, 2.5))
    covariances: tuple[Square, ...] = (
        ((1.0, 0.5), (0.5, 0.8)),
        ((0.5, -0.2), (-0.2, 0.6)),
        ((0.9, 0.0), (0.0, 0.3)),
    )

    def __post_init__(self) -> None:
        if not len(self.weights) == len(self.means) == len(self.covariances):
            raise ConfigError(
                f"a mixture needs as many weights as means and covariances, not "
                f"{len(self.weights)}, {len(self.means)} and {len(self.covariances)}"
            )
        if min(self.weights, default=0.0) <= 0 or not math.isclose(sum(self.weights), 1.0):
            raise ConfigError(f"weights must be positive and sum to one, not {self.weights}")
        for mean, covariance in zip(self.means, self.covariances, strict=True):
            _check_hill(mean, covariance)

    @property
    def dimension(self) -> int:
        """Two coordinates."""
        return 2

    @property
    def bounds(self) -> tuple[Pair, ...]:
        """Three standard deviations around every hill."""
        return _box(self.means, self.covariances)

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of one particle [2]."""
        hills = zip(self.weights, self.means, self.covariances, strict=True)
        logs = [
            math.log(weight) + _tilted(x, mean, covariance) for weight, mean, covariance in hills
        ]
        return torch.stack(logs).logsumexp(0)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent samples [n, 2]."""
        weights = torch.tensor(self.weights)
        hill = torch.multinomial(weights, n, replacement=True, generator=generator)
        factors = torch.stack([_cholesky(covariance) for covariance in self.covariances])[hill]
        noise = torch.randn(n, 2, 1, generator=generator)
        return torch.tensor(self.means)[hill] + (factors @ noise).squeeze(-1)


@registry.register("funnel", cite=("neal2003slice", "dangelo2021repulsive"))
@dataclass(frozen=True)
class Funnel:
    """A funnel whose neck is exponentially narrow: v ~ N(0, std²), x_i | v ~ N(0, exp(v)).

    Neal (2003). A particle is (x_1, ..., v), with v last, so that the funnel is upright in a
    figure.

    Attributes:
        dimension: coordinates of a particle, v included.
        std: standard deviation of v.
    """

    dimension: int = 2
    std: float = 3.0

    def __post_init__(self) -> None:
        if self.dimension < 2:
            raise ConfigError(f"a funnel needs at least 2 dimensions, not {self.dimension}")
        _check_std(self.std)

    @property
    def bounds(self) -> tuple[Pair, ...]:
        """Two standard deviations of v, and the width of the funnel at v = std."""
        mouth = 3.0 * math.exp(self.std / 2)
        return ((-mouth, mouth),) * (self.dimension - 1) + ((-2.0 * self.std, 2.0 * self.std),)

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of one particle [D]."""
        v = x[-1]
        given_v = _normal(x[:-1] * (-v / 2).exp(), 1.0) - v / 2
        return _normal(v, self.std) + given_v.sum()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent samples [n, D]."""
        noise = torch.randn(n, self.dimension, generator=generator)
        v = self.std * noise[:, -1:]
        return torch.cat([noise[:, :-1] * (v / 2).exp(), v], -1)


def _normal(x: Tensor, std: float) -> Tensor:
    return -0.5 * (x / std).square() - math.log(std * math.sqrt(2 * math.pi))


def _tilted(x: Tensor, mean: Pair, covariance: Square) -> Tensor:
    """Log density of N(mean, covariance) in the plane, by the explicit inverse."""
    (a, b), (_, c) = covariance
    determinant = a * c - b * b
    u, w = x[0] - mean[0], x[1] - mean[1]
    square = (c * u * u - 2 * b * u * w + a * w * w) / determinant
    return -0.5 * square - math.log(2 * math.pi * math.sqrt(determinant))


def _cholesky(covariance: Square) -> Tensor:
    return torch.linalg.cholesky(torch.tensor(covariance))


def _box(means: Sequence[Pair], covariances: Sequence[Square]) -> tuple[Pair, ...]:
    centres, matrices = torch.tensor(means), torch.tensor(covariances)
    reach = 3.0 * matrices.diagonal(dim1=-2, dim2=-1).sqrt()
    low, high = (centres - reach).amin(0).tolist(), (centres + reach).amax(0).tolist()
    return tuple(zip(low, high, strict=True))


def _check_std(std: float) -> None:
    if not std > 0:
        raise ConfigError(f"std must be positive, not {std}")


def _check_hill(mean: Pair, covariance: Square) -> None:
    try:
        _, _ = mean
        (a, b), (b_too, c) = covariance
    except (TypeError, ValueError):
        raise ConfigError(
            f"a Gaussian in the plane has a mean of 2 numbers and a covariance of 2 rows of 2, "
            f"not {mean} and {covariance}"
        ) from None
    if not (b == b_too and a > 0 and a * c - b * b > 0):
        raise ConfigError(f"a covariance must be symmetric positive definite, not {covariance}")
