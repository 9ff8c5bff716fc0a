"""Annealing: factors of the driving force, so that training can start from repulsion alone.

The factor multiplies likelihood and prior, not the push: members sample p(theta | D)^factor.
The shapes are those of the code released with D'Angelo & Fortuin (2021), arXiv 2106.11642.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry

__all__ = ["Annealing", "Constant", "Cyclic", "Hyperbolic", "LinearAnnealing", "registry"]

registry = Registry("annealing")


class Annealing(Protocol):
    """A factor of the driving force for each step."""

    def __call__(self, step: int, steps: int) -> float:
        """Factor at `step` of `steps`."""
        ...


@registry.register("constant")
@dataclass(frozen=True)
class Constant:
    """The same factor at every step; a factor below 1 gives a hot posterior.

    Attributes:
        gamma: the factor.
    """

    gamma: float = 1.0

    def __call__(self, step: int, steps: int) -> float:
        """gamma."""
        return self.gamma


@registry.register("linear", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class LinearAnnealing:
    """Rises linearly from 0 to gamma, then stays constant.

    Attributes:
        gamma: the factor at the end.
        share: share of the steps during which the factor rises.
    """

    gamma: float = 1.0
    share: float = 0.5

    def __call__(self, step: int, steps: int) -> float:
        """gamma * t / (T - 1) for T points from 0 to gamma."""
        rise = round(self.share * steps)
        return self.gamma if step >= rise else self.gamma * step / max(rise - 1, 1)


@registry.register("hyperbolic", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class Hyperbolic:
    """Stays near 0 and then rises steeply: tanh((1.3 t / (T - 1))^10), then gamma.

    Attributes:
        gamma: the factor after the rise.
        share: share of the steps during which the factor rises.
    """

    gamma: float = 1.0
    share: float = 0.5

    def __call__(self, step: int, steps: int) -> float:
        """tanh((1.3 t / (T - 1))^10) for T points, the last of which is the end of the rise."""
        rise = round(self.share * steps)
        return self.gamma if step >= rise else math.tanh((1.3 * step / max(rise - 1, 1)) ** 10)


@registry.register("cyclic", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class Cyclic:
    """Five rises in sequence, each ((t mod T/5) / (T/5))^10, then gamma.

    Attributes:
        gamma: the factor after the last rise.
        share: share of the steps during which the factor rises.
        cycles: number of rises.
    """

    gamma: float = 1.0
    share: float = 0.5
    cycles: int = 5

    def __post_init__(self) -> None:
        if self.cycles < 1:
            raise ConfigError(f"cycles must be at least 1, not {self.cycles}")

    def __call__(self, step: int, steps: int) -> float:
        """A power ramp in each cycle."""
        rise = round(self.share * steps)
        if step >= rise:
            return self.gamma
        period = rise / self.cycles
        return ((step % period) / period) ** 10
