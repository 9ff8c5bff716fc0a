"""Training data from loaders and streams, with or without a known length."""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SubsetRandomSampler

from shoal.core.errors import DataError, ShoalWarning
from shoal.core.opaque import Opaque
from shoal.core.random import derive, seeded
from shoal.core.structure import Inputs, joined, parted
from shoal.data.batches.arrays import value_range
from shoal.data.batches.batch import (
    Targets,
    inputs_of,
    points_of,
    raw_batch,
    rounded,
    target_shape,
    targets_of,
)
from shoal.data.batches.orders import Folds, Orders, OwnSampler, member_batches

__all__ = ["LoaderBatches", "checked_loaders"]

_SPANS = 20
"""Number of history rows of a run on a stream, which has no epochs."""

_MANY = 1000
"""Batches after which counting a stream gives a warning, since it may be endless."""

_END = object()


class LoaderBatches:
    """Batches from a torch DataLoader, or from any iterable that can be read repeatedly.

    While the loader works, the generators of torch, numpy and Python are set from (seed, epoch,
    step) and restored afterwards. So shuffling and augmentation are reproducible and resumable, and
    nothing else is disturbed. A generator or an epoch-aware sampler of the loader is set too.
    (Persistent workers seed themselves once; their augmentation is not reproducible from the middle
    of a run.)

    The loader is opened once per epoch: `first` leaves its pass open for the first epoch. A loader
    of unknown length is read once to count its batches, unless the number of steps is given. Then
    the data are a stream, which is read pass after pass without counting. A stream has no epochs; a
    twentieth of its steps counts as one epoch.

    Args:
        loader: gives batches, in a form of `raw_batch`.
        seed: with the epoch, fixes the randomness of the loader.
        device: device of the batches; None keeps their device.
        dtype: type of floating-point inputs and targets.
        check: refuses targets [B, ...] that do not fit the network.
        steps: total number of batches; None for whole epochs.
        whole: returns whether the network takes integers; see `as_inputs`.
        gives_own: the loader was made for a dataset of points, of which each member may have
            batches of its own.
        loaders: the loader of each member, if members have their own; `loader` is the first.

    Attributes:
        input_range: smallest and largest value of the first batch.
        target_shape: shape of one data point's targets, as the first batch has them.
        rounds: whether targets become `dtype` also where it loses their standard deviation.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        check: Callable[[Any], None] | None = None,
        steps: int | None = None,
        whole: Callable[[Tensor], bool] | None = None,
        gives_own: bool = False,
        loaders: Mapping[int, Iterable[Any]] | None = None,
    ) -> None:
        self.gives_own, self.loaders = gives_own or loaders is not None, loaders
        self.loader, self.seed, self.device = loader, seed, device
        self.dtype, self.check, self.steps, self.whole = dtype, check, steps, whole
        self.input_range: list[float] | None = None
        self.target_shape: tuple[int, ...] | None = None
        self.rounds = False
        self._once, self._opened_before = isinstance(loader, Iterator), False
        if self._once and steps is None:
            raise self._read_only_once("every epoch reads the data again")
        self._length, self._points = _known_sizes(loader)
        if isinstance(loader, (list, tuple)):
            self._points = self._counted(loader)[1]
        self._streams = self._length is None and steps is not None
        self._guesses = self._points is None and (self._streams or self._length is not None)
        self._reading: _Reading | None = None
        self._place = 0
        self._first: Any = None
        self._size = 0
        self._members = 0
        self.folds: Folds | None = None

    def for_members(self, own: range, common: int) -> "LoaderBatches":
        """The same data with batches of their own for these members; see `gives_own`."""
        self.first()
        self._reading = None  # ends its workers
        other = copy(self)
        if self.loaders is None:
            dataset, size = self.loader.dataset, self.loader.batch_size  # pyright: ignore
            orders = Orders(self.n, size, self.seed, own, common, self.folds)
            other.loader = DataLoader(dataset, batch_sampler=OwnSampler(orders))
        else:
            loaders = {member: self.loaders[member] for member in own}
            other.loader = _LoadersTogether(loaders, self.seed)
        other._members = len(own)
        return other

    def in_folds(self, count: int) -> "LoaderBatches":
        """The same data, of which every member holds out one of so many folds; see `gives_own`."""
        self.first()
        other = copy(self)
        other.folds = Folds(self.n, count, self.seed)
        other._points = other.folds.trained
        other._length = -(-other._points // self.loader.batch_size)  # pyright: ignore
        return other

    def read(self, steps: Iterable[Tensor]) -> Iterator[tuple[Inputs, Targets]]:
        """Inputs and targets of these rows of the dataset; see `gives_own`."""
        sampler = [rows.tolist() for rows in steps]
        loader = DataLoader(self.loader.dataset, batch_sampler=sampler)  # pyright: ignore
        for step, batch in enumerate(_Reading(loader, self.seed, 0)):
            yield self._placed(*self._checked(batch, step))

    @property
    def n(self) -> int:
        """Data points N: from the loader, by counting, or the value of `guess` while unknown."""
        if self._points is None and not self._guesses:
            self._count()
        if self._points is not None:
            return self._points
        batches, size = self._guessed()
        return batches * size

    @property
    def known_points(self) -> int | None:
        """Data points N, if it is known without reading further."""
        return self._points

    @property
    def steps_per_epoch(self) -> int:
        """Batches per epoch; for a stream, a twentieth of all steps."""
        if self._streams:
            return -(-(self.steps or 1) // _SPANS)
        if self._length is None:
            self._count()
        return self._length or 0

    @property
    def guess(self) -> str | None:
        """A sentence about the assumed N while N is unknown; None if N is known."""
        if self._points is not None or not self._guesses:
            return None
        batches, size = self._guessed()
        if self._streams:
            return (
                f"The stream has no length: N is {batches * size:,} data points, {batches:,} steps "
                f"of {size:,}. Give the data a `__len__` to set N."
            )
        return (
            f"The loader does not say how many data points it has: N is {batches * size:,}, "
            f"{batches:,} batches of {size:,}, until the first pass has counted them."
        )

    @property
    def found(self) -> dict[str, int | None]:
        """Counts found by reading, for a checkpoint; empty if there are none."""
        count = self._length if self._streams else self._points if self._guesses else None
        return {} if count is None else {"points": self._points, "batches": self._length}

    @found.setter
    def found(self, known: Mapping[str, int | None]) -> None:
        if known:
            self._points, self._length = known["points"], known["batches"]

    def first(self) -> tuple[Inputs, Targets]:
        """The first batch of the first epoch, as if all members shared it.

        Its pass stays open for further reading.
        """
        if self._first is None:
            reading = self._open(0)
            self._first, self._reading = reading.peek(), reading
        return self._placed(*self._checked(self._first, 0))

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Inputs, Targets]]:
        """The batches of one epoch from number `start` on; earlier batches are read and dropped.

        For a stream, all further batches.
        """
        if self._streams:
            yield from self._stream(epoch * self.steps_per_epoch + start)
            return
        reading = self._open(epoch)
        for batch in reading:
            if self._points is None and reading.place == self._length:
                self._points = reading.points
            if reading.place > start:
                yield self._pair(batch, reading.place - 1)

    def sweep(self) -> Iterator[tuple[Inputs, Targets]]:
        """One separate pass; over a stream, at most as many batches as training reads."""
        limit = self.steps if self._streams else None
        for step, batch in enumerate(islice(self._open(0), limit)):
            yield self._pair(batch, step)

    def _stream(self, place: int) -> Iterator[tuple[Inputs, Targets]]:
        if self._reading is None or self._place != place:
            passes, left = divmod(place, self._length) if self._length else (0, place)
            self._reading = self._open(passes)
            for _ in range(left):
                self._read(self._reading)
        self._place = place
        while True:
            batch = self._read(self._reading)
            self._place += 1
            yield self._pair(batch, self._place - 1)

    def _read(self, reading: "_Reading") -> Any:
        """The next batch of a stream, which restarts at its end."""
        for batch in reading:
            return batch
        if self._length is None:
            self._length = reading.place
            self._points = reading.points if self._points is None else self._points
        self._reading = self._open(reading.number + 1)
        return next(self._reading)

    def _open(self, number: int) -> "_Reading":
        """A pass from its beginning: the pass that is already open, or a new one."""
        reading, self._reading = self._reading, None
        if reading is not None and (reading.number, reading.place) == (number, 0):
            return reading
        if self._once and self._opened_before:
            raise self._read_only_once(f"{self.steps} steps need more than it gave")
        del reading  # ends its workers before others start
        self._opened_before = True
        return _Reading(self.loader, self.seed, number)

    def _count(self) -> None:
        reading = self._open(0)
        self._first = reading.peek()
        self._length, points = self._counted(reading)
        self._points = points if self._points is None else self._points

    def _counted(self, batches: Iterable[Any]) -> tuple[int, int]:
        """Number of batches and of data points."""
        number, points = 0, 0
        for number, batch in enumerate(batches, 1):
            points += len(self._checked(batch, number - 1)[0])
            if number == _MANY and not isinstance(batches, (list, tuple)):
                warnings.warn(
                    f"{_MANY:,} batches of a stream were read to count its data points, and it "
                    f"has more; type steps=10000 instead of epochs to avoid the count",
                    ShoalWarning,
                    stacklevel=2,
                )
        if number == 0:
            raise _no_batches(0)
        return number, points

    def _guessed(self) -> tuple[int, int]:
        """Batches, and data points per batch; their product is the assumed N."""
        self._size = self._size or len(self.first()[0])
        return self._length or self.steps or 0, self._size

    def _pair(self, batch: Any, step: int) -> tuple[Inputs, Targets]:
        together = isinstance(batch, _BatchesTogether)
        x, y = self._together(batch, step) if together else self._checked(batch, step)
        x, y = self._placed(x, y)
        return member_batches(x, y, self._members) if self._members else (x, y)

    def _placed(self, x: Inputs, y: Targets) -> tuple[Inputs, Targets]:
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def _together(self, batches: "_BatchesTogether", step: int) -> tuple[Inputs, Targets]:
        """The batches of all members as one, member by member."""
        pairs = [self._checked(batch, step) for batch in batches]
        sizes = [len(y) for _, y in pairs]
        if len(set(sizes)) > 1:
            raise DataError(
                f"batch {step} has {min(sizes)} data points for one member and {max(sizes)} for "
                f"another; give the loaders of all members the same batch size"
            )
        x, y = (joined(parts) for parts in zip(*pairs, strict=True))
        if isinstance(x, Opaque) or isinstance(y, Opaque):
            raise DataError(
                f"batch {step} of the members cannot be stacked; wanted tensors of one shape for "
                f"all members, such as texts padded to one length"
            )
        return x, y

    def _checked(self, batch: Any, step: int) -> tuple[Inputs, Targets]:
        raw = raw_batch(batch, step)
        try:
            y = targets_of(raw.y, None, self.dtype, raw.weight, raw.x)
            y = rounded(y, self.dtype) if self.rounds else y
            x = inputs_of(raw.x, self.dtype, self.whole, len(y))
            if len(x) != len(y):
                raise DataError(
                    f"x has {len(x)} points but y has {len(y)} points; each x needs its own y"
                )
            if self.check is not None:
                self.check(parted(y)[0])
        except DataError as error:
            raise DataError(f"in batch {step} of the loader, {error}") from None
        if self.input_range is None and isinstance(x, Tensor):
            self.input_range = value_range(x)
        if self.target_shape is None:
            self.target_shape = target_shape(raw.y)
        return x, y

    def _read_only_once(self, why: str) -> DataError:
        return DataError(
            f"a {type(self.loader).__name__} can be read only once, but {why}; "
            f"pass a list of batches or a DataLoader"
        )


class _Reading:
    """One pass over a loader, batch by batch.

    Attributes:
        number: index of the pass.
        place: number of batches read.
        points: number of data points read.
    """

    def __init__(self, loader: Iterable[Any], seed: int, number: int) -> None:
        self.number, self.place, self.points = number, 0, 0
        self._seed, self._ahead = seed, _END
        _prepare(loader, derive(seed, "loader", number), number)
        with seeded(derive(seed, "loader", number)), _spared_signals():
            self._iterator = iter(loader)

    def __iter__(self) -> "_Reading":
        return self

    def __next__(self) -> Any:
        batch, self._ahead = self._ahead, _END
        batch = self._fetch() if batch is _END else batch
        if batch is _END:
            if self.place == 0:
                raise _no_batches(self.number)
            raise StopIteration
        self.place += 1
        self.points += points_of(batch[0] if isinstance(batch, _BatchesTogether) else batch)
        return batch

    def peek(self) -> Any:
        """The next batch, without reading past it."""
        self._ahead = self._fetch() if self._ahead is _END else self._ahead
        if self._ahead is _END:
            raise _no_batches(self.number)
        return self._ahead

    def _fetch(self) -> Any:
        with seeded(derive(self._seed, "loader", self.number, self.place)):
            return next(self._iterator, _END)


class _BatchesTogether(list[Any]):
    """The batches of all members for one step."""


class _LoadersTogether:
    """The loaders of the members, read together; each has its own randomness, as if alone.

    Args:
        loaders: the loader of each member, by the member's number.
        seed: with member and epoch, fixes the randomness of a loader.
    """

    def __init__(self, loaders: Mapping[int, Iterable[Any]], seed: int) -> None:
        self.loaders, self.seed, self.epoch = loaders, seed, 0
        self.batch_sampler = self  # a reading tells it the epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[_BatchesTogether]:
        seeds = {member: derive(self.seed, "member", member) for member in self.loaders}
        return self._batches(
            {m: _Reading(loader, seeds[m], self.epoch) for m, loader in self.loaders.items()}
        )

    def _batches(self, readings: "Mapping[int, _Reading]") -> Iterator[_BatchesTogether]:
        for step in count():
            batches = _BatchesTogether(map(self._next, readings, readings.values()))
            ended = [m for m, batch in zip(readings, batches, strict=True) if batch is _END]
            if len(ended) == len(batches):
                return
            if ended:
                raise DataError(
                    f"the loader of member {ended[0]} ended after {step} batches and others did "
                    f"not; give every member as many batches"
                )
            yield batches

    def _next(self, member: int, reading: "_Reading") -> Any:
        try:
            return next(reading, _END)
        except DataError as error:
            raise DataError(f"of member {member}, {error}") from None


def checked_loaders(loaders: Sequence[Any]) -> Mapping[int, Any]:
    """One loader for each member, if they can be read together."""
    sizes = list[tuple[int | None, int | None]]()
    for member, loader in enumerate(loaders):
        if isinstance(loader, Iterator):
            raise DataError(
                f"the {type(loader).__name__} of member {member} can be read only once; pass a "
                f"list of batches or a DataLoader for each member"
            )
        if any(loader is other for other in loaders[:member]):
            raise DataError(
                f"member {member} has the loader of another member; make a loader for each, such "
                f"as [DataLoader(data, 32, shuffle=True) for _ in range({len(loaders)})]"
            )
        try:
            sizes.append(_known_sizes(loader))
        except DataError as error:
            raise DataError(f"of member {member}, {error}") from None
    for what, known in zip(("batches", "data points"), zip(*sizes, strict=True), strict=True):
        counts = {each for each in known if each is not None}
        if len(counts) > 1 or counts == {0}:
            raise DataError(
                f"the loaders of the members have {' or '.join(map(str, sorted(counts)))} {what}; "
                f"give every member as many, at least one"
            )
    return dict(enumerate(loaders))


@contextmanager
def _spared_signals() -> Iterator[None]:
    """Block the signals that stop a run in the processes that start here.

    Otherwise Ctrl-C, which reaches all processes, would end the workers before the run is saved.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    stopping = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _no_batches(number: int) -> DataError:
    if number == 0:
        return DataError("the loader gave no batches; there is nothing to train on")
    return DataError(
        f"the loader gave no batches in its pass {number + 1}; every pass must start again"
    )


def _known_sizes(loader: Any) -> tuple[int | None, int | None]:
    """Batches and data points in one pass, as far as the loader knows them."""
    sampler = getattr(loader, "sampler", None)
    chosen = isinstance(sampler, SubsetRandomSampler)
    source = sampler if chosen else getattr(loader, "dataset", None)
    length, points = _length(loader), _length(source)
    if points == 0:
        raise DataError("there are no data: the loader's dataset is empty")
    return length, points


def _length(what: Any) -> int | None:
    try:
        return len(what)
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _prepare(loader: Any, seed: int, epoch: int) -> None:
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    for owner in (loader, samplers[0]):
        random = getattr(owner, "generator", None)
        if isinstance(random, torch.Generator):
            random.manual_seed(seed)
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
