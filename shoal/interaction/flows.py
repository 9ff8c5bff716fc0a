"""Flows: the M x M matrices that turn kernel and drives into a velocity."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.core.registry import Registry, nested_field
from shoal.interaction import estimators
from shoal.interaction.estimators import KDE, Estimator

__all__ = ["Flow", "Stein", "Wasserstein", "registry"]

registry = Registry("flow")


class Flow(Protocol):
    """From K [M, M] and L [S, M, M] to `mix` [M, M] (None is the identity) and B [S, M, M]."""

    def __call__(self, K: Tensor, L: Tensor, members: Tensor) -> tuple[Tensor | None, Tensor]:
        """`members` is the number of finite members, a tensor, so nothing waits for the device."""
        ...


@registry.register("wasserstein", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class Wasserstein:
    """Wasserstein gradient flow of KL(rho || posterior): mix = 1, B = R(K) L.

    Every member follows its own drive. An estimate of the score of rho repels it from the others.
    D'Angelo & Fortuin (2021), arXiv 2106.11642.

    Attributes:
        estimator: the score estimate.
    """

    estimator: Estimator = nested_field(estimators.registry, KDE)

    def __call__(self, K: Tensor, L: Tensor, members: Tensor) -> tuple[Tensor | None, Tensor]:
        """Identity and R(K) L."""
        return None, self.estimator(K, L)


@registry.register("stein", cite=("liu2016stein",))
@dataclass(frozen=True)
class Stein:
    """Stein variational gradient descent: mix = K / M, B = L / M.

    The kernel mixes the drives of members. Liu & Wang (2016), arXiv 1608.04471.
    """

    def __call__(self, K: Tensor, L: Tensor, members: Tensor) -> tuple[Tensor | None, Tensor]:
        """K / M and L / M."""
        return K / members, L / members
