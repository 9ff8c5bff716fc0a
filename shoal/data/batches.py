"""Training data in batches that can be repeated and resumed."""

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import SubsetRandomSampler

from shoal.core.errors import ConfigError, DataError
from shoal.core.seeds import derive, generator, seeded
from shoal.core.values import came
from shoal.data.arrays import as_inputs, as_targets, check_labels
from shoal.data.input_range import value_range

__all__ = ["ArrayBatches", "Batches", "LoaderBatches", "checked_size"]


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

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches (x, y) of one epoch in order, from number `start` on."""
        ...


def checked_size(batch_size: int) -> int:
    """The batch size itself, when it is one."""
    with suppress(TypeError):
        size = operator.index(batch_size)
        if not isinstance(batch_size, bool) and 1 <= size < 2**63:
            return size
    raise ConfigError(f"batch_size must be a whole number from 1 on, not {came(batch_size)}")


@dataclass(frozen=True, eq=False)
class ArrayBatches:
    """Batches from tensors that are already where they are needed.

    >>> batches = ArrayBatches(torch.arange(5.0)[:, None], torch.arange(5), batch_size=2)
    >>> [len(x) for x, y in batches.batches(epoch=0)]
    [2, 2, 1]

    Attributes:
        x: inputs [N, ...].
        y: targets [N, ...].
        batch_size: points in a batch; the last of an epoch may have fewer.
        seed: with the epoch, decides the permutation.
        drop_last: leave out a last batch that is not full.
    """

    x: Tensor
    y: Tensor
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

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch from number `start` on, in an order of its own."""
        order = torch.randperm(self.n, generator=generator(self.seed, "order", epoch))
        order = order.to(self.x.device)
        for step in range(start, self.steps_per_epoch):
            rows = order[step * self.batch_size : (step + 1) * self.batch_size]
            yield self.x[rows], self.y[rows]


class LoaderBatches:
    """Batches from a torch DataLoader, or from anything that can be iterated over repeatedly.

    While the loader works, the generators of torch, numpy and Python are set from (seed, epoch,
    step) and put back afterwards, so shuffling and augmentation can be repeated and resumed and
    do not disturb anything else. A generator or an epoch-aware sampler of the loader is set too.
    (Workers kept between epochs by `persistent_workers` seed themselves once; their augmentation
    cannot be repeated from the middle of a run.)

    Args:
        loader: gives batches (x, y).
        seed: with the epoch, decides what the loader draws.
        device: where the batches are wanted; None leaves them where they are.
        dtype: type of real inputs and targets.
        classes: refuse labels outside 0 to `classes` - 1.
        whole: tells whether the network takes whole numbers; see `as_inputs`.

    Attributes:
        input_range: smallest and largest number of the first batch that was read.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        classes: int | None = None,
        whole: Callable[[Tensor], bool] | None = None,
    ) -> None:
        if isinstance(loader, Iterator):
            raise DataError(
                f"a {type(loader).__name__} can be read only once, but every epoch reads the data "
                f"again; pass a list of batches or a DataLoader"
            )
        self.loader, self.seed, self.device = loader, seed, device
        self.dtype, self.classes, self.whole = dtype, classes, whole
        self.input_range: list[float] | None = None
        self.n, self.steps_per_epoch = self._sizes()

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch from number `start` on; those before are read and dropped."""
        for step, batch in enumerate(self._raw(epoch)):
            if step >= start:
                yield self._pair(batch, step)

    def _raw(self, epoch: int) -> Iterator[Any]:
        _prepare(self.loader, derive(self.seed, "loader", epoch), epoch)
        with seeded(derive(self.seed, "loader", epoch)):
            iterator = iter(self.loader)
        step, end = 0, object()
        while True:
            with seeded(derive(self.seed, "loader", epoch, step)):
                batch = next(iterator, end)
            if batch is end:
                break
            yield batch
            step += 1
        if step == 0:
            raise DataError("the loader gave no batches; there is nothing to train on")

    def _pair(self, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise DataError(
                f"batch {step} of the loader is a {type(batch).__name__}{size}; wanted a pair "
                f"(x, y): give the loader a collate_fn that returns one"
            )
        try:
            x = as_inputs(batch[0], self.dtype, self.whole)
            y = as_targets(batch[1], len(x), self.dtype)
            if self.classes is not None:
                check_labels(y, self.classes)
        except DataError as error:
            raise DataError(f"in batch {step} of the loader, {error}") from None
        if self.input_range is None:
            self.input_range = value_range(x)
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def _sizes(self) -> tuple[int, int]:
        try:
            return _points(self.loader), len(self.loader)  # type: ignore[arg-type]
        except (AttributeError, TypeError):
            lengths = [len(self._pair(batch, k)[0]) for k, batch in enumerate(self._raw(0))]
            return sum(lengths), len(lengths)


def _points(loader: Any) -> int:
    sampler = getattr(loader, "sampler", None)
    source = sampler if isinstance(sampler, SubsetRandomSampler) else loader.dataset
    points = len(source)
    if points == 0:
        raise DataError("there are no data: the loader's dataset is empty")
    return points


def _prepare(loader: Any, seed: int, epoch: int) -> None:
    sampler = getattr(loader, "sampler", None)
    for owner in (loader, sampler):
        own = getattr(owner, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(seed)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)  # type: ignore[union-attr]
