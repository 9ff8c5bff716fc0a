r"""What a search for method and strength tries, at which price, and the rule that chooses.

Successive halving (Jamieson & Talwalkar, 2016): all candidates train for a small share of the
steps, the best of them again for a larger share. A candidate a is compared with the plain ensemble
p on the same data points n, by the paired difference of the NLL:

$$ \Delta_a = \frac1N \sum_n \ell_{an} - \ell_{pn}, \quad
   SE_a = \sqrt{\frac{1}{N (N - 1)} \sum_n (\ell_{an} - \ell_{pn} - \Delta_a)^2} $$

All constants of the search are in this file. They were chosen by docs/results/auto.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.data.dataset import held_out
from shoal.engine.members.member_runner import MemberRunner
from shoal.inference.ensemble import Ensemble
from shoal.interaction.axes import EXACT, RANK, needs_data
from shoal.interaction.methods import METHODS, Method

__all__ = [
    "BUDGET",
    "HELD_OUT",
    "LEAST_POINTS",
    "METHOD_CANDIDATES",
    "MOST_AXES_PRICE",
    "MOST_HELD_OUT",
    "PLAIN",
    "ROUNDS",
    "RULE",
    "STRENGTHS",
    "Candidate",
    "PointScores",
    "Round",
    "Rule",
    "axes_price",
    "division",
    "method_candidates",
    "paired",
    "price_of",
    "share_of",
    "strength_candidates",
    "too_costly",
]


class Candidate(NamedTuple):
    """A method with its strength that a search tries.

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


class Round(NamedTuple):
    """One round of short trainings.

    Attributes:
        share: length of each training, as a share of the whole training.
        keep: number of repulsive candidates that take part, the best so far; None for all.
    """

    share: float
    keep: int | None


PRICES: Mapping[str, float] = {"weights": 1.1, "outputs": 1.1, "gradients": 2.2}
"""Time of a step by the space of the repulsion, in steps of the plain ensemble.

These prices hold for networks that cost more than the axes of their inputs.
"""

MOST_AXES_PRICE = 20.0
"""Candidates whose axes cost more, in steps of the plain ensemble, are left out of a search.

The axes of wide inputs cost more than a small network, such as a linear layer on features.
"""

STRENGTHS: Mapping[str, tuple[float, ...]] = {
    "weights": (1e2, 1e3, 1e4),
    "outputs": (1e1, 1e2, 1e3),
    "gradients": (4.0, 16.0, 64.0),
}
"""Strengths that `strength="auto"` tries, by the space of the repulsion."""

METHOD_CANDIDATES: tuple[tuple[str, float], ...] = (("kde", 1e3), ("forde", 4.0), ("forde", 16.0))
"""Methods and strengths that `method="auto"` tries beside the plain ensemble."""

ROUNDS = (Round(1 / 8, None), Round(1 / 3, 1))
"""Rounds of the search."""

BUDGET = 2.0
"""Largest price of a search, in whole trainings."""

HELD_OUT = 0.2
"""Share of the training data that is held out, if there are no validation data."""

MOST_HELD_OUT = 4096
"""Largest number of held-out data points."""


def division(points: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The data points on which a trial trains, and those that judge it."""
    share = min(HELD_OUT, MOST_HELD_OUT / points)
    trains, held = held_out(points, share, seed, "search")
    if len(trains) > 1 and (len(trains) - 1) % batch_size == 0:
        trains = trains[:-1]  # networks with BatchNorm cannot train on a batch of one point
    return trains, held


LEAST_POINTS = 10
"""Number of held-out data points from which a search is worthwhile."""

PLAIN = Candidate("ensemble", "ensemble", None, 1.0)
"""The plain ensemble, a candidate of every search."""


def price_of(method: Method) -> float:
    """Time of a step, in steps of the plain ensemble."""
    return 1.0 if method.repulsion is None else PRICES[method.repulsion.space.base]


def strength_candidates(method: Method) -> list[Candidate]:
    """The plain ensemble, and a method at several strengths.

    >>> [each.label for each in strength_candidates(METHODS["f-kde"])]
    ['ensemble', 'f-kde:10', 'f-kde:100', 'f-kde:1000']
    """
    assert method.repulsion is not None
    strengths = STRENGTHS[method.repulsion.space.base]
    price = price_of(method)
    return [PLAIN, *(Candidate(_label(method.name, each), None, each, price) for each in strengths)]


def method_candidates() -> list[Candidate]:
    """The plain ensemble, and the candidates of `METHOD_CANDIDATES`."""
    return [
        PLAIN,
        *(
            Candidate(_label(name, strength), name, strength, price_of(METHODS[name]))
            for name, strength in METHOD_CANDIDATES
        ),
    ]


def _label(name: str, strength: float) -> str:
    return f"{name}:{strength:g}"


def axes_price(ensemble: Ensemble, x: Tensor) -> float:
    """Time that axes of input gradients add to a step, in steps of the plain ensemble.

    A plain step takes three times the F operations of a forward pass. A gradient of D coordinates
    is turned to R axes and back, which takes 4 D R.

    Args:
        ensemble: the members.
        x: inputs [B, ...].
    """
    one = ensemble.slice_members(0, 1).without_side_effects()
    random = torch.random.fork_rng(devices=[x.device] if x.is_cuda else [])
    with torch.no_grad(), random, FlopCounterMode(display=False) as counter:
        one(x, MemberRunner("loop"))
    return _price(x, counter.get_total_flops() / len(x))


def too_costly(
    candidates: Sequence[Candidate], ensemble: Ensemble, batches: ArrayBatches | LoaderBatches
) -> dict[str, str]:
    """Why candidates are left out, by their labels."""
    with_axes = [each for each in candidates if each.method and _has_axes(each.method)]
    x = batches.first()[0] if with_axes else None
    # The first count in a process takes seconds: torch imports its compiler. A bound mostly does.
    if not isinstance(x, Tensor) or _price(x, _least(ensemble)) <= MOST_AXES_PRICE:
        return {}
    if (price := axes_price(ensemble, x)) <= MOST_AXES_PRICE:
        return {}
    why = f"left out: on inputs this wide a step takes about as long as {price:.0f} plain steps"
    return {candidate.label: why for candidate in with_axes}


def _price(x: Tensor, forward: float) -> float:
    D = x[0].numel()
    return 4 * D * (D if D <= EXACT else RANK) / (3 * max(forward, 1.0))


def _least(ensemble: Ensemble) -> int:
    """Operations of a forward pass per data point, at least: it applies every matrix once."""
    one = ensemble.slice_members(0, 1).weights.values()
    return 2 * sum(tensor.numel() for tensor in one if tensor.ndim > 2)


def _has_axes(method: str) -> bool:
    repulsion = METHODS[method].repulsion
    return repulsion is not None and needs_data(repulsion.space)


def share_of(round: Round, candidates: Sequence[Candidate], left: float) -> float:
    """Length of a round's trainings: its share, or less if its candidates cost more than is left.

    >>> share_of(Round(1 / 2, None), [PLAIN, PLAIN], left=0.5)
    0.25

    Args:
        round: which one.
        candidates: the candidates that take part.
        left: what the search may still cost, in trainings of the plain ensemble.
    """
    return min(round.share, left / sum(candidate.price for candidate in candidates))


@dataclass(frozen=True, eq=False)
class PointScores:
    """NLL of each held-out data point.

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
    """Which candidate wins: the lowest mean of clean and shifted NLL, unless clean data suffer.

    The clean NLL may be higher than that of the plain ensemble by some standard errors of the
    paired difference. The plain ensemble wins if no candidate has a lower mean.

    Attributes:
        errors: number of standard errors by which the clean NLL may be higher.
    """

    errors: float = 1.0

    def holds(self, candidate: PointScores, plain: PointScores) -> bool:
        """Whether the clean NLL is not worse than that of the plain ensemble."""
        change, error = paired(candidate.clean, plain.clean, plain.weight)
        return change <= self.errors * error

    def ranked(self, scores: Mapping[str, PointScores]) -> list[str]:
        """Labels of the candidates, the lowest mean of clean and shifted NLL first."""
        return sorted(scores, key=lambda label: scores[label].mixed)

    def winner(self, scores: Mapping[str, PointScores], plain: PointScores) -> str | None:
        """Label of the candidate that wins; None if the plain ensemble does."""
        fit = {n: s for n, s in scores.items() if self.holds(s, plain) and s.mixed < plain.mixed}
        return self.ranked(fit)[0] if fit else None


RULE = Rule()
"""The rule of every search."""
