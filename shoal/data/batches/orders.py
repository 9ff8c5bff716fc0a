"""The orders in which members see the data points: one for all, or one for each member."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shoal.core.random import generator
from shoal.core.structure import Inputs, MemberWeighted, Structured, parted
from shoal.data.batches.batch import Targets

__all__ = ["Orders", "OwnSampler", "member_batches"]


@dataclass(frozen=True)
class Orders:
    """In which order members see the data points of an epoch: all alike, or each in its own.

    Every member sees every data point once per epoch. The order of a member depends on seed, epoch
    and member, and not on the ensemble size.

    >>> Orders(4, 2, own=range(2)).width
    4

    Attributes:
        n: number of data points.
        batch_size: data points of a member's batch.
        seed: with the epoch, and with the member if orders differ, fixes the order.
        own: members with an order of their own; None for one order.
        common: number of points at the head of every batch that all members see.
    """

    n: int
    batch_size: int
    seed: int = 0
    own: range | None = None
    common: int = 0

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
