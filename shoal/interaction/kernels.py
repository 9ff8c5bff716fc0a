"""Kernels between members.

A radial kernel is a function of the scaled squared distance alone, $k = φ(u)$ with $u = d² / h²$,
so its summed gradient needs only $φ'$ (see `shoal.interaction.repulsion`).
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry
from shoal.interaction.bandwidths import Fixed, Median

__all__ = [
    "IMQ",
    "RBF",
    "Fixed",
    "Kernel",
    "Laplace",
    "LinearKernel",
    "Matern",
    "Median",
    "RadialKernel",
    "registry",
]

registry = Registry("kernel")


@runtime_checkable
class RadialKernel(Protocol):
    """A positive definite kernel of scaled squared distances."""

    def value(self, u: Tensor) -> Tensor:
        """φ(u), with φ(0) = 1."""
        ...

    def slope(self, u: Tensor) -> Tensor:
        """φ'(u); 0 for a singular derivative at 0, since coincident members exert no force."""
        ...


@registry.register("rbf", cite=("liu2016stein",))
@dataclass(frozen=True)
class RBF:
    """Gaussian kernel, k = exp(-d² / 2h²)."""

    def value(self, u: Tensor) -> Tensor:
        """exp(-u / 2)."""
        return (-0.5 * u).exp()

    def slope(self, u: Tensor) -> Tensor:
        """-exp(-u / 2) / 2."""
        return -0.5 * (-0.5 * u).exp()


@registry.register("laplace")
@dataclass(frozen=True)
class Laplace:
    """Exponential kernel, k = exp(-d / h); its force does not vanish at short distance."""

    def value(self, u: Tensor) -> Tensor:
        """exp(-√u)."""
        return (-u.sqrt()).exp()

    def slope(self, u: Tensor) -> Tensor:
        """-exp(-√u) / (2√u), and 0 where u = 0."""
        r = torch.where(u > 0, u, 1.0).sqrt()
        return torch.where(u > 0, -(-r).exp() / (2 * r), 0.0)


@registry.register("imq", cite=("gorham2017measuring",))
@dataclass(frozen=True)
class IMQ:
    """Inverse multiquadric, k = (1 + d² / h²)^(-1/2), with heavy tails.

    Gorham & Mackey (2017), arXiv 1703.01717.
    """

    def value(self, u: Tensor) -> Tensor:
        """(1 + u)^(-1/2)."""
        return (1 + u).rsqrt()

    def slope(self, u: Tensor) -> Tensor:
        """-(1 + u)^(-3/2) / 2."""
        return -0.5 * (1 + u).pow(-1.5)


@registry.register("matern")
@dataclass(frozen=True)
class Matern:
    """Matérn kernel, once (nu = 3/2) or twice (nu = 5/2) differentiable.

    k = (1 + √3 r) exp(-√3 r), or k = (1 + √5 r + 5r²/3) exp(-√5 r), with r = d / h.

    Attributes:
        nu: smoothness, 1.5 or 2.5.
    """

    nu: float = 1.5

    def __post_init__(self) -> None:
        if self.nu not in (1.5, 2.5):
            raise ConfigError(f"a Matern kernel has nu = 1.5 or 2.5, not {self.nu}")

    def value(self, u: Tensor) -> Tensor:
        """φ(u)."""
        r = (2 * self.nu * u).sqrt()
        polynomial = 1 + r if self.nu == 1.5 else 1 + r + r.square() / 3
        return polynomial * (-r).exp()

    def slope(self, u: Tensor) -> Tensor:
        """-(3/2) exp(-r), or -(5/6) (1 + r) exp(-r), with r = √(2 nu u)."""
        r = (2 * self.nu * u).sqrt()
        return -1.5 * (-r).exp() if self.nu == 1.5 else -5 / 6 * (1 + r) * (-r).exp()


@registry.register("linear", cite=("liu2016stein",))
@dataclass(frozen=True)
class LinearKernel:
    """Polynomial kernel of degree one, k(x, y) = 1 + x·y: not radial, for the Stein flow.

    With it SVGD fits the mean and the covariance of a Gaussian target exactly.
    """

    def matrices(self, gram: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
        """K = 1 + x x^T, and L with L z = -sum_j ∇_j k(z_j, z_i), that is L = -M 1."""
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return 1 + gram, -members * identity.expand_as(gram)


Kernel = RadialKernel | LinearKernel
