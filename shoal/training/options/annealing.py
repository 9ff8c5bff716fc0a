"""Annealing: a factor of the driving force, or of the repulsive force, that changes with the step.

A factor of the drive multiplies likelihood and prior: members sample p(theta | D)^factor, and
training can start from repulsion alone. A factor of the push multiplies the strength: training can
start as a plain ensemble, and the repulsion grows. The shapes are those of the code released with
D'Angelo & Fortuin (2021), arXiv 2106.11642. There they rise to 1 whatever gamma is (`legacy`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry, later_field

__all__ = [
    "Annealing",
    "Constant",
    "Cyclic",
    "Hyperbolic",
    "LinearAnnealing",
    "multiplies_push",
    "registry",
    "stored_annealing",
]

registry = Registry("annealing")


class Annealing(Protocol):
    """A factor of one of the two forces for each step."""

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


@dataclass(frozen=True)
class _Rise:
    """What all rises have in common.

    Attributes:
        gamma: the factor at the end of the rise, and after it.
        share: share of the steps during which the factor rises.
        of: the force that the factor multiplies: "drive" or "push".
    """

    gamma: float = 1.0
    share: float = 0.5
    of: str = later_field("drive")

    def __post_init__(self) -> None:
        if self.of not in ("drive", "push"):
            raise ConfigError(f"annealing is of the 'drive' or of the 'push', not of '{self.of}'")

    def __call__(self, step: int, steps: int) -> float:
        """The shape of T = share * steps points, then gamma."""
        rise = round(self.share * steps)
        return self.gamma if step >= rise else self._rising(step, rise)

    def _rising(self, step: int, rise: int) -> float:
        raise NotImplementedError


@registry.register("linear", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class LinearAnnealing(_Rise):
    """Rises linearly from 0 to gamma, then stays constant.

    Attributes:
        gamma: the factor at the end.
        share: share of the steps during which the factor rises.
        of: the force that the factor multiplies: "drive" or "push".
    """

    def _rising(self, step: int, rise: int) -> float:
        """gamma * t / (T - 1) for T points from 0 to gamma."""
        return self.gamma * step / max(rise - 1, 1)


@registry.register("hyperbolic", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class Hyperbolic(_Rise):
    """Stays near 0 and rises steeply: gamma tanh((1.3 t / (T - 1))^10) / tanh(1.3^10), then gamma.

    Attributes:
        gamma: the factor at the end of the rise, and after it.
        share: share of the steps during which the factor rises.
        of: the force that the factor multiplies: "drive" or "push".
        legacy: the released form, tanh((1.3 t / (T - 1))^10): it rises to 1, then jumps to gamma.
    """

    legacy: bool = False

    def _rising(self, step: int, rise: int) -> float:
        released = math.tanh((1.3 * step / max(rise - 1, 1)) ** 10)
        return released if self.legacy else self.gamma * released / math.tanh(1.3**10)


@registry.register("cyclic", cite=("dangelo2021repulsive",))
@dataclass(frozen=True)
class Cyclic(_Rise):
    """Five rises in sequence, each gamma (t / (T - 1))^10 for its own T points, then gamma.

    Attributes:
        gamma: the factor at the end of each rise, and after the last one.
        share: share of the steps during which the factor rises.
        of: the force that the factor multiplies: "drive" or "push".
        cycles: number of rises.
        legacy: the released form, ((t mod P) / P)^10 with the period P = T / 5: a rise ends below
            1, whatever gamma is, and the factor then jumps to gamma.
    """

    cycles: int = 5
    legacy: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cycles < 1:
            raise ConfigError(f"cycles must be at least 1, not {self.cycles}")

    def _rising(self, step: int, rise: int) -> float:
        if self.legacy:
            period = rise / self.cycles
            return ((step % period) / period) ** 10
        cycle = step * self.cycles // rise
        first, following = (-(-each * rise // self.cycles) for each in (cycle, cycle + 1))
        return self.gamma * ((step - first) / max(following - 1 - first, 1)) ** 10


def multiplies_push(annealing: object) -> bool:
    """Whether a factor is that of the push; a function of the user's own is that of the drive."""
    return getattr(annealing, "of", "drive") == "push"


def stored_annealing(spec: Any) -> Any:
    """The annealing of a stored config; one without `legacy` is older than the mended rises."""
    old = isinstance(spec, Mapping) and spec.get("name") in ("hyperbolic", "cyclic")
    return {**spec, "legacy": True} if old and "legacy" not in spec else spec
