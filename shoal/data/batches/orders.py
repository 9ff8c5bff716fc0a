"""The orders in which members see the data points: one for all, or one for each member.

With folds, a member has an order of the points that its fold does not hold.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.core.structure import Inputs, MemberWeighted, Structured, parted
from shoal.data.batches.batch import Targets

__all__ = ["Folds", "Orders", "OwnSampler", "member_batches"]


@dataclass(frozen=True)
class Folds:
    """K folds of the data points, drawn by the seed: member i never trains on fold i mod K.

    Fold sizes differ by at most one. Every member trains on N - ceil(N / K) points per epoch: one
    with a smaller fold leaves out another point in every epoch, at random.

    >>> folds = Folds(5, 2)
    >>> folds.trained, sorted(folds.held(0).tolist() + folds.held(1).tolist())
    (2, [0, 1, 2, 3, 4])

    Attributes:
        n: number of data points N.
        count: number of folds K.
        seed: fixes the folds.
    """

    n: int
    count: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.count <= self.n:
            raise ConfigError(
                f"folds={self.count} came for {self.n} data points; give 2 to {self.n} folds"
                if self.n > 1
                else f"folds={self.count} came for {self.n} data point; give at least 2 points"
            )

    @property
    def largest(self) -> int:
        """Points of the largest fold."""
        return -(-self.n // self.count)

    @property
    def trained(self) -> int:
        """Points that a member trains on in one epoch."""
        return self.n - self.largest

    @cached_property
    def of_points(self) -> Tensor:
        """The fold of every data point [N]."""
        order = torch.randperm(self.n, generator=generator(self.seed, "folds"))
        return torch.empty_like(order).index_copy_(0, order, torch.arange(self.n) % self.count)

    @cached_property
    def _rows(self) -> list[tuple[Tensor, Tensor]]:
        """The points of every fold, and all others."""
        holds = [self.of_points == fold for fold in range(self.count)]
        return [(mine.nonzero().flatten(), (~mine).nonzero().flatten()) for mine in holds]

    def held(self, member: int) -> Tensor:
        """The points of a member's fold, on which it never trains."""
        return self._rows[member % self.count][0]

    def others(self, member: int) -> Tensor:
        """The points on which a member may train."""
        return self._rows[member % self.count][1]

    def steps(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The folds side by side, `size` points at a time [K, b], and which of them count.

        A fold that is shorter ends with its first point once more, which does not count.
        """
        rows = [self.held(fold) for fold in range(self.count)]
        padded = torch.stack([torch.cat([each, each[:1]])[: self.largest] for each in rows])
        lengths = torch.tensor([len(each) for each in rows])
        counts = torch.arange(self.largest) < lengths[:, None]
        return zip(padded.split(size, 1), counts.split(size, 1), strict=True)

    def mixtures(self, members: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """The folds that these members hold out, and for each of them the places of its members.

        All lists of places have one length, the least common multiple of the numbers of members: a
        fold with fewer members repeats each equally often, so that its mixture stays the same.

        >>> Folds(9, 3).mixtures([0, 1, 3])
        ([0, 1], [[0, 2], [1, 1]])
        """
        places: dict[int, list[int]] = {}
        for place, member in enumerate(members):
            places.setdefault(member % self.count, []).append(place)
        length = math.lcm(*map(len, places.values()))
        known = sorted(places)
        return known, [places[fold] * (length // len(places[fold])) for fold in known]


@dataclass(frozen=True)
class Orders:
    """In which order members see the data points of an epoch: all alike, or each in its own.

    Every member sees every data point once per epoch; with folds, those that its fold does not
    hold. The order of a member depends on seed, epoch and member, and not on the ensemble size.

    >>> Orders(4, 2, own=range(2)).width
    4

    Attributes:
        n: number of data points that a member sees in an epoch.
        batch_size: data points of a member's batch.
        seed: with the epoch, and with the member if orders differ, fixes the order.
        own: members with an order of their own; None for one order.
        common: number of points at the head of every batch that all members see.
        folds: what each member never sees; None if all see all.
    """

    n: int
    batch_size: int
    seed: int = 0
    own: range | None = None
    common: int = 0
    folds: Folds | None = None

    @property
    def width(self) -> int:
        """Rows that one step takes, of all members."""
        return self.batch_size * (1 if self.own is None else len(self.own))

    def __call__(self, epoch: int) -> Tensor:
        """The rows of all steps, one step after another: [N], or [M N] with orders of their own."""
        shared = torch.randperm(self.n, generator=generator(self.seed, "order", epoch))
        if self.own is None:
            return shared
        orders = torch.stack([self._of_member(epoch, member, shared) for member in self.own])
        full = self.n - self.n % self.batch_size
        steps = orders[:, :full].unflatten(1, (-1, self.batch_size)).transpose(0, 1)
        return torch.cat([steps.flatten(), orders[:, full:].flatten()])

    def _of_member(self, epoch: int, member: int, shared: Tensor) -> Tensor:
        """The order of one member [N]; the head of each batch is that of the shared order."""
        random = generator(self.seed, "order", epoch, member)
        if self.folds is not None:
            rows = self.folds.others(member)
            return rows[torch.randperm(len(rows), generator=random)[: self.n]]
        if not self.common:
            return torch.randperm(self.n, generator=random)
        steps, left = divmod(self.n, self.batch_size)
        head, tail = self.common, self.batch_size - self.common
        heads, last = shared[: steps * head], shared[steps * head :][: min(head, left)]
        rest = shared[len(heads) + len(last) :]
        rest = rest[torch.randperm(len(rest), generator=random)]
        full = [heads.reshape(steps, head), rest[: steps * tail].reshape(steps, tail)]
        return torch.cat([torch.cat(full, 1).flatten(), last, rest[steps * tail :]])


def member_batches(x: Any, y: Any, members: int) -> tuple[Inputs, Targets]:
    """Inputs and targets [M, B, ...] from rows [M B, ...] that come member by member."""

    def divided(rows: Any) -> Any:
        if isinstance(rows, Structured):
            return rows.map(divided)
        return rows.unflatten(0, (members, -1))

    targets, weight = parted(y)
    own = divided(targets)
    if isinstance(own, Tensor) and own.is_floating_point() and own.ndim == 2:
        own = own.unsqueeze(-1)  # a column axis, so that members are not taken for data points
    return divided(x), own if weight is None else MemberWeighted.of_pair(own, divided(weight))


class OwnSampler(Sampler[list[int]]):
    """Rows of a dataset for every step of a loader, in the orders of the members.

    Args:
        orders: the orders; `set_epoch` chooses their epoch.
    """

    def __init__(self, orders: Orders) -> None:
        self.orders, self.epoch = orders, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.orders.n // self.orders.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return (rows.tolist() for rows in self.orders(self.epoch).split(self.orders.width))
