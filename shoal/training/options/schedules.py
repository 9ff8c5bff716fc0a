"""Learning rate schedules: a factor of the learning rate for each step.

A schedule is a function of the step and the number of steps. Every named schedule may begin with a
linear warm-up: `warmup` is a share of the steps below 1, and a number of steps from 1 on.
"""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry, later_field

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "FlatThenLinear",
    "LinearDecay",
    "Schedule",
    "Stairs",
    "Steps",
    "Warming",
    "check_warmup",
    "factor_of",
    "schedules",
]

schedules = Registry("schedule")


class Schedule(Protocol):
    """A factor of the learning rate for each step."""

    def __call__(self, step: int, steps: int) -> float:
        """Factor at `step` of `steps`."""
        ...


def factor_of(schedule: Schedule | None, step: int, steps: int) -> float:
    """The factor of a schedule at a step, if it is a number from 0 on; 1 without a schedule."""
    if schedule is None:
        return 1.0
    factor = float(schedule(step, steps))
    if not 0 <= factor < math.inf:
        raise ConfigError(
            f"the schedule gives {factor} at step {step} of {steps}; "
            f"a factor of the learning rate must be finite and not negative"
        )
    return factor


@dataclass(frozen=True)
class Warming:
    """A schedule that may begin with a linear warm-up from 0 to its first factor.

    Attributes:
        warmup: share of the steps for the warm-up; from 1 on, number of steps.
    """

    _: KW_ONLY
    warmup: float = later_field(0.0)

    def __post_init__(self) -> None:
        check_warmup(self.warmup)

    def __call__(self, step: int, steps: int) -> float:
        """(t + 1) / (W + 1) in the W steps of the warm-up; then the schedule over the rest."""
        rise = round(self.warmup * steps) if self.warmup < 1 else min(int(self.warmup), steps)
        if step < rise:
            return (step + 1) / (rise + 1)
        return self.after_warmup(step - rise, steps - rise)

    def after_warmup(self, step: int, steps: int) -> float:
        """The factor after the warm-up."""
        return 1.0


def check_warmup(warmup: float) -> None:
    """Refuse a negative warm-up."""
    if not warmup >= 0:
        raise ConfigError(f"warmup must be a share or a number of steps, not {warmup}")


@schedules.register("constant")
@dataclass(frozen=True)
class Constant(Warming):
    """The same learning rate at every step, after a warm-up if there is one."""


@schedules.register("cosine")
@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 to `floor`, after a linear warm-up.

    Attributes:
        floor: factor at the end.
        warmup: share of the steps for the warm-up; from 1 on, number of steps.
    """

    floor: float = 0.0
    warmup: float = 0.0

    def __post_init__(self) -> None:
        check_warmup(self.warmup)

    def __call__(self, step: int, steps: int) -> float:
        """(1 + cos πt) / 2."""
        t = step / max(steps, 1)
        warmup = self.warmup if self.warmup < 1 else min(self.warmup / max(steps, 1), 1.0)
        if t < warmup:
            return (step + 1) / (warmup * steps + 1)
        t = (t - warmup) / max(1 - warmup, 1e-12)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * t))


@schedules.register("linear")
@dataclass(frozen=True)
class LinearDecay(Warming):
    """Falls linearly from 1 to `floor`.

    Attributes:
        floor: factor at the end.
    """

    floor: float = 0.0

    def after_warmup(self, step: int, steps: int) -> float:
        """1 - t."""
        return 1 - (1 - self.floor) * step / max(steps, 1)


@schedules.register("steps")
@dataclass(frozen=True)
class Steps(Warming):
    """Falls by `factor` at each of the given shares of training.

    Attributes:
        at: shares of training, in (0, 1).
        factor: factor of each fall.
    """

    at: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def after_warmup(self, step: int, steps: int) -> float:
        """factor ** (falls so far)."""
        return self.factor ** sum(step >= share * steps for share in self.at)


@schedules.register("stairs")
@dataclass(frozen=True)
class Stairs(Warming):
    """Falls by `factor` at equal intervals, such as every epoch.

    Attributes:
        flights: number of intervals.
        factor: factor of each fall.
    """

    flights: int = 10
    factor: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flights < 1 or not self.factor > 0:
            raise ConfigError(
                f"stairs need at least 1 flight and a positive factor, not {self.flights} and "
                f"{self.factor}"
            )

    def after_warmup(self, step: int, steps: int) -> float:
        """factor ** (flight, from 0)."""
        return self.factor ** (self.flights * step // max(steps, 1))


@schedules.register("exponential")
@dataclass(frozen=True)
class Exponential(Warming):
    """Falls to `floor` by the same factor at every step.

    Attributes:
        floor: factor at the end.
    """

    floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.floor > 0:
            raise ConfigError(
                f"the floor of an exponential schedule must be positive, not {self.floor}"
            )

    def after_warmup(self, step: int, steps: int) -> float:
        """floor ** t."""
        return self.floor ** (step / max(steps, 1))


@schedules.register("flat-then-linear")
@dataclass(frozen=True)
class FlatThenLinear(Warming):
    """1 until half of training, then linear to `floor` at nine tenths, then constant.

    Attributes:
        floor: factor at the end.
    """

    floor: float = 0.01

    def after_warmup(self, step: int, steps: int) -> float:
        """Piecewise linear."""
        t = (step / max(steps, 1) - 0.5) / 0.4
        return 1 - (1 - self.floor) * min(max(t, 0.0), 1.0)
