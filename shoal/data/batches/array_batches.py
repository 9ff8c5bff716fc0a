"""Training data in reproducible, resumable batches."""

import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.core.structure import Inputs, Structured
from shoal.core.values import describe_value
from shoal.data.batches.batch import Targets

__all__ = ["ArrayBatches", "Batches", "checked_size"]


class Batches(Protocol):
    """Training data in batches, whose content depends on (seed, epoch, step) alone."""

    @property
    def n(self) -> int:
        """Data points N in the whole set."""
        ...

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        ...

    def first(self) -> tuple[Inputs, Targets]:
        """The first batch of the first epoch; may be called repeatedly."""
        ...

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Inputs, Targets]]:
        """The batches (x, y) of one epoch in order, from number `start` on."""
        ...


def checked_size(batch_size: int) -> int:
    """The batch size, if it is valid."""
    with suppress(TypeError):
        size = operator.index(batch_size)
        if not isinstance(batch_size, bool) and 1 <= size < 2**63:
            return size
    raise ConfigError(
        f"batch_size must be a whole number from 1 on, not {describe_value(batch_size)}"
    )


@dataclass(frozen=True, eq=False)
class ArrayBatches:
    """Batches from tensors that are already on the right device.

    >>> batches = ArrayBatches(torch.arange(5.0)[:, None], torch.arange(5), batch_size=2)
    >>> [len(x) for x, y in batches.batches(epoch=0)]
    [2, 2, 1]

    Attributes:
        x: inputs [N, ...].
        y: targets [N, ...].
        batch_size: data points per batch; the last batch of an epoch may have fewer.
        seed: with the epoch, fixes the permutation.
        drop_last: leave out a last batch that is not full.
    """

    x: Tensor | Structured
    y: Targets
    batch_size: int
    seed: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        checked_size(self.batch_size)
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"no batch of {self.batch_size} can be filled from {self.n} points; "
                f"make batch_size smaller or keep the last batch"
            )

    @property
    def n(self) -> int:
        """Data points N."""
        return len(self.x)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        extra = 0 if self.drop_last else self.batch_size - 1
        return (self.n + extra) // self.batch_size

    def first(self) -> tuple[Inputs, Targets]:
        """The first batch of the first epoch."""
        return next(self.batches(0))

    def order(self, epoch: int) -> Tensor:
        """The data points in the order of one epoch [N], on the CPU."""
        return torch.randperm(self.n, generator=generator(self.seed, "order", epoch))

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Inputs, Targets]]:
        """The batches of one epoch from number `start` on, in the order of the epoch."""
        order = self.order(epoch).to(self.x.device)
        for step in range(start, self.steps_per_epoch):
            rows = order[step * self.batch_size : (step + 1) * self.batch_size]
            yield self.x[rows], self.y[rows]
