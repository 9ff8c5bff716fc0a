r"""The plan of a search for method and strength: candidates, short trainings, and the rule.

Successive halving (Jamieson & Talwalkar, 2016): all arms train for a small share of the steps, the
best of them again for a larger share. An arm a is compared with the plain ensemble p on the same
data points n, by the paired difference of the NLL:

$$ \Delta_a = \frac1N \sum_n \ell_{an} - \ell_{pn}, \quad
   SE_a = \sqrt{\frac{1}{N (N - 1)} \sum_n (\ell_{an} - \ell_{pn} - \Delta_a)^2} $$

All constants of the search are in this file. They were chosen by docs/results/auto.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.interaction.methods import METHODS, Method
from shoal.training.options.options import AUTO, Options

__all__ = [
    "BUDGET",
    "HELD_OUT",
    "METHOD_ARMS",
    "MOST_HELD_OUT",
    "PLAIN",
    "RULE",
    "RUNGS",
    "STRENGTHS",
    "Arm",
    "PointScores",
    "Rule",
    "Rung",
    "is_open",
    "method_arms",
    "paired",
    "price_of",
    "share_of",
    "strength_arms",
    "without_auto",
]


class Arm(NamedTuple):
    """A candidate.

    Attributes:
        label: method and strength, as users type them.
        method: name of the method; None for the method that the user gave.
        strength: factor of the repulsive force; None for the plain ensemble.
        price: time of a step, in steps of the plain ensemble.
    """

    label: str
    method: str | None
    strength: float | None
    price: float


class Rung(NamedTuple):
    """One round of short trainings.

    Attributes:
        share: length of each training, as a share of the whole training.
        keep: number of repulsive arms that take part, the best so far; None for all.
    """

    share: float
    keep: int | None


PRICES: Mapping[str, float] = {"weights": 1.1, "outputs": 1.1, "gradients": 2.2}
"""Time of a step by the space of the repulsion, in steps of the plain ensemble."""

STRENGTHS: Mapping[str, tuple[float, ...]] = {
    "weights": (1e2, 1e3, 1e4),
    "outputs": (1e1, 1e2, 1e3),
    "gradients": (4.0, 16.0, 64.0),
}
"""Strengths that `strength="auto"` tries, by the space of the repulsion."""

METHOD_ARMS: tuple[tuple[str, float], ...] = (("kde", 1e3), ("forde", 4.0), ("forde", 16.0))
"""Methods and strengths that `method="auto"` tries beside the plain ensemble."""

RUNGS = (Rung(1 / 8, None), Rung(1 / 3, 1))
"""Rounds of the search."""

BUDGET = 2.0
"""Largest price of a search, in whole trainings."""

HELD_OUT = 0.2
"""Share of the training data that judges, if there are no validation data."""

MOST_HELD_OUT = 4096
"""Largest number of data points that judge."""

PLAIN = Arm("ensemble", "ensemble", None, 1.0)
"""The plain ensemble, an arm of every search."""


def is_open(options: Options) -> bool:
    """Whether method or strength is left to a search; the plain ensemble has no strength."""
    plain = PLAIN.method in (options.method, getattr(options.method, "name", None))
    return options.method == AUTO or (options.strength == AUTO and not plain)


def without_auto(options: Options) -> Options:
    """The options with the plain ensemble, or the default strength, where a search chooses."""
    if not is_open(options):
        return options if options.strength != AUTO else replace(options, strength=None)
    if options.calibrated:
        raise ConfigError(
            "calibrated repulsion has the size that the posterior requires, so there is nothing "
            "to choose; leave calibrated or 'auto' out"
        )
    if options.method != AUTO:
        return replace(options, strength=None)
    if options.strength not in (None, AUTO):
        raise ConfigError(
            f"method='auto' chooses the strength too, and strength={options.strength:g} came; "
            f"leave strength out, or name the method"
        )
    return replace(options, method=PLAIN.method, strength=None)


def price_of(method: Method) -> float:
    """Time of a step, in steps of the plain ensemble."""
    return 1.0 if method.repulsion is None else PRICES[method.repulsion.space.base]


def strength_arms(method: Method) -> list[Arm]:
    """The plain ensemble, and a method at several strengths.

    >>> [arm.label for arm in strength_arms(METHODS["f-kde"])]
    ['ensemble', 'f-kde:10', 'f-kde:100', 'f-kde:1000']
    """
    if method.repulsion is None:
        return [PLAIN]
    strengths = STRENGTHS[method.repulsion.space.base]
    price = price_of(method)
    return [PLAIN, *(Arm(_label(method.name, each), None, each, price) for each in strengths)]


def method_arms() -> list[Arm]:
    """The plain ensemble, and the arms of `METHOD_ARMS`."""
    return [
        PLAIN,
        *(
            Arm(_label(n, strength), n, strength, price_of(METHODS[n]))
            for n, strength in METHOD_ARMS
        ),
    ]


def _label(name: str, strength: float) -> str:
    return f"{name}:{strength:g}"


def share_of(rung: Rung, arms: Sequence[Arm], left: float) -> float:
    """Length of a rung's trainings: its share, or less if its arms cost more than is left.

    >>> share_of(Rung(1 / 2, None), [PLAIN, PLAIN], left=0.5)
    0.25

    Args:
        rung: the round.
        arms: the arms that take part.
        left: what the search may still cost, in trainings of the plain ensemble.
    """
    return min(rung.share, left / sum(arm.price for arm in arms))


@dataclass(frozen=True, eq=False)
class PointScores:
    """NLL of each data point that judges.

    Attributes:
        clean: on the points as they are [N].
        shifted: mean over their shifted copies [N]; None without copies.
        weight: weight of each point [N]; None for equal weights.
    """

    clean: Tensor
    shifted: Tensor | None = None
    weight: Tensor | None = None

    @property
    def under_shift(self) -> Tensor:
        """NLL on the shifted copies; on the points themselves, if there are no copies."""
        return self.clean if self.shifted is None else self.shifted

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite."""
        return bool(self.clean.isfinite().all()) and bool(self.under_shift.isfinite().all())

    @property
    def mixed(self) -> float:
        """Mean of the clean NLL and the NLL under shift."""
        return (self.mean(self.clean) + self.mean(self.under_shift)) / 2

    def mean(self, values: Tensor) -> float:
        """Weighted mean over the points."""
        return _mean(values, self.weight)


def _mean(values: Tensor, weight: Tensor | None) -> float:
    values = values.double()
    return float(values.mean() if weight is None else (values * weight).sum() / weight.sum())


def paired(a: Tensor, b: Tensor, weight: Tensor | None = None) -> tuple[float, float]:
    """Mean of a - b over data points, and its standard error; infinite for one point.

    >>> import torch
    >>> paired(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 1.0]))
    (2.0, 1.0)
    """
    change, n = a.double() - b.double(), len(a)
    mean = _mean(change, weight)
    if n < 2:
        return mean, math.inf
    share = (change - mean) / n if weight is None else (change - mean) * weight / weight.sum()
    return mean, math.sqrt(float(share.square().sum()) * n / (n - 1))


@dataclass(frozen=True)
class Rule:
    """Which arm wins: the lowest mean of clean and shifted NLL, unless clean data suffer.

    The clean NLL may be higher than that of the plain ensemble by some standard errors of the
    paired difference. The plain ensemble wins if no arm has a lower mean.

    Attributes:
        errors: number of standard errors by which the clean NLL may be higher.
    """

    errors: float = 1.0

    def holds(self, arm: PointScores, plain: PointScores) -> bool:
        """Whether the clean NLL is not worse than that of the plain ensemble."""
        change, error = paired(arm.clean, plain.clean, plain.weight)
        return change <= self.errors * error

    def ranked(self, scores: Mapping[str, PointScores]) -> list[str]:
        """Labels of the arms, the lowest mean of clean and shifted NLL first."""
        return sorted(scores, key=lambda label: scores[label].mixed)

    def winner(self, scores: Mapping[str, PointScores], plain: PointScores) -> str | None:
        """Label of the arm that wins; None if the plain ensemble does."""
        fit = {n: s for n, s in scores.items() if self.holds(s, plain) and s.mixed < plain.mixed}
        return self.ranked(fit)[0] if fit else None


RULE = Rule()
"""The rule of every search."""
