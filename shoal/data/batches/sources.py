"""Data arguments of `fit` and `predict`, turned into reproducible, resumable batches of tensors."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from shoal.core.arguments import checked, whole_64_bits
from shoal.core.arguments import device as usable
from shoal.core.errors import ConfigError, DataError
from shoal.core.opaque import Opaque, is_batch_object
from shoal.core.structure import Inputs, Structured, as_long, is_structure, joined, parted
from shoal.core.values import describe_value
from shoal.data.batches.arrays import as_inputs, as_tensor, check_labels, check_range
from shoal.data.batches.batch import (
    RawBatch,
    Targets,
    check_same_rows,
    inputs_of,
    raw_batch,
    target_shape,
    targets_of,
)
from shoal.data.batches.loaders import LoaderBatches, checked_loaders
from shoal.data.batches.orders import Folds, Orders, member_batches
from shoal.data.dataset import Dataset, Split

__all__ = [
    "ArrayBatches",
    "Batches",
    "LoaderBatches",
    "as_split",
    "batches_of",
    "check_labels",
    "checked_size",
    "gathered",
    "gathered_inputs",
    "input_batches",
    "input_count",
]


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
        target_shape: shape of one data point's targets as they were given; a column of labels
            [N, 1] becomes y [N]. None if it is not known.
        own: members that each have batches of their own; None for batches that all share.
        common: number of points at the head of every batch that own batches have in common.
        folds: what each member never trains on; None if all train on all.
    """

    x: Tensor | Structured
    y: Targets
    batch_size: int
    seed: int = 0
    drop_last: bool = False
    target_shape: tuple[int, ...] | None = None
    own: range | None = None
    common: int = 0
    folds: Folds | None = None

    def __post_init__(self) -> None:
        checked_size(self.batch_size)
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"no batch of {self.batch_size} can be filled from {self.n} points; "
                f"make batch_size smaller or keep the last batch"
            )

    @property
    def n(self) -> int:
        """Data points N on which a member trains."""
        return len(self.x) if self.folds is None else self.folds.trained

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        extra = 0 if self.drop_last else self.batch_size - 1
        return (self.n + extra) // self.batch_size

    @property
    def orders(self) -> Orders:
        """The orders in which the members see the data points."""
        return Orders(self.n, self.batch_size, self.seed, self.own, self.common, self.folds)

    def first(self) -> tuple[Inputs, Targets]:
        """The first batch of the first epoch, as if all members shared it."""
        return next(replace(self, own=None).batches(0))

    def for_members(self, own: range, common: int) -> "ArrayBatches":
        """The same data with batches of their own for these members."""
        return replace(self, own=own, common=common)

    def in_folds(self, count: int) -> "ArrayBatches":
        """The same data, of which every member holds out one of so many folds."""
        return replace(self, folds=Folds(len(self.x), count, self.seed))

    def read(self, steps: Iterable[Tensor]) -> Iterator[tuple[Inputs, Targets]]:
        """Inputs and targets of these rows."""
        for rows in steps:
            rows = rows.to(self.x.device)
            yield self.x.index_select(0, rows), self.y.index_select(0, rows)

    def batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Inputs, Targets]]:
        """The batches of one epoch from number `start` on, in the order of the epoch."""
        order, width = self.orders(epoch).to(self.x.device), self.orders.width
        for step in range(start, self.steps_per_epoch):
            yield self.arranged(*self.at(order[step * width : (step + 1) * width]))

    def at(self, rows: Tensor) -> tuple[Inputs, Targets]:
        """Inputs and targets of these rows."""
        return self.x.index_select(0, rows), self.y.index_select(0, rows)

    def arranged(self, x: Inputs, y: Targets) -> tuple[Inputs, Targets]:
        """The batch of the rows of a step; those of own batches come member by member."""
        return (x, y) if self.own is None else member_batches(x, y, len(self.own))


def as_split(
    data: Any,
    dtype: torch.dtype = torch.float32,
    whole: Callable[[Tensor], bool] | None = None,
    weight: Any = None,
) -> Split:
    """Validated tensors from a Dataset (its training data), a Split, a pair (x, y), or x alone.

    Arrays, tensors, nested lists and structures of them are allowed; see `data.batches.batch`. A
    dict with `labels`, or a triple (x, y, weight), is a batch too.

    >>> as_split(([[0.5], [1.5]], [0, 1])).y
    tensor([0, 1])
    """
    x, y, batch_weight = _raw_parts(data)
    weight = batch_weight if weight is None else weight
    check_same_rows(x, y, weight)
    if is_batch_object(x):
        targets = targets_of(y, None, dtype, weight, x)
        return Split(inputs_of(x, dtype, whole, len(targets)), targets)
    inputs = inputs_of(x, dtype, whole)
    return Split(inputs, None if y is None else targets_of(y, len(inputs), dtype, weight))


def _raw_parts(data: Any) -> RawBatch:
    """Inputs, targets and weights as they were given."""
    if isinstance(data, Dataset):
        data = data.train
    if isinstance(data, Split):
        return RawBatch(data.x, data.y)
    if _is_batch(data):
        return raw_batch(data)
    if isinstance(data, (tuple, DataLoader, TorchDataset)):
        raise _not_arrays(data)
    return RawBatch(data)


def _device(name: str, value: Any) -> Any:
    return value if isinstance(value, torch.device) else usable(name, value)


@checked(seed=whole_64_bits, device=_device)
def batches_of(
    data: Any,
    batch_size: int = 128,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    steps: int | None = None,
    whole: Callable[[Tensor], bool] | None = None,
    weight: Any = None,
    own: bool = False,
) -> ArrayBatches | LoaderBatches:
    """Batches of any training data, on `device`.

    Args:
        data: a Dataset, a Split, a pair (x, y) of arrays, a torch Dataset of points (x, y),
            indexed or iterable, a torch DataLoader, or any iterable of batches (x, y) that can be
            read repeatedly, such as a list; with `own` also a list of loaders, one per member.
        batch_size: data points per batch; a loader has its own.
        seed: with the epoch, fixes the order of the points.
        device: device of the batches; None keeps that of the data.
        dtype: type of floating-point inputs and targets.
        steps: number of batches; with it, data of unknown length are not counted.
        whole: returns whether the network takes integers; see `as_inputs`.
        weight: weight of each data point [N], for arrays.
        own: members may have batches of their own.
    """
    points, loaders = False, None
    if _is_member_loaders(data, own):
        loaders = checked_loaders(data)
        if not own:
            raise DataError(
                f"{len(data)} loaders came, one per member; type batches='own', or pass one loader"
            )
        data = data[0]
    if isinstance(data, TensorDataset) and len(data.tensors) in (2, 3):
        data = data.tensors
    elif isinstance(data, TorchDataset):
        points = not isinstance(data, IterableDataset)
        data = DataLoader(data, checked_size(batch_size), shuffle=points)
    _refuse_points(data)
    if _is_loader(data):
        if weight is not None:
            raise DataError("a loader gives its own weights, as triples (x, y, weight)")
        return LoaderBatches(data, seed, device, dtype, None, steps, whole, points, loaders)
    split = as_split(data, dtype, whole, weight)
    if split.y is None:
        raise DataError("there are inputs but no targets; pass a pair (x, y)")
    if isinstance(split.x, Opaque):
        y, point_weight = parted(split.y)
        batch = (split.x.value, y) if point_weight is None else (split.x.value, y, point_weight)
        return LoaderBatches([batch], seed, device, dtype, None, steps, whole)
    shape = target_shape(_raw_parts(data).y)
    x, y = split.x.to(device), split.y.to(device)
    return ArrayBatches(x, y, batch_size, seed, target_shape=shape)


def gathered(data: Any, dtype: torch.dtype = torch.float32, weight: Any = None) -> Split:
    """All data as one split: arrays as in `as_split`, or the joined batches of a loader.

    Args:
        data: a Split, a pair (x, y) of arrays, x alone, a torch Dataset, or a loader of batches x
            or (x, y), which is read once.
        dtype: type of floating-point inputs and targets.
        weight: weight of each data point [N], for arrays.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    elif isinstance(data, TorchDataset):
        data = DataLoader(data, 1024)
    if not _is_loader(data):
        return as_split(data, dtype, weight=weight)
    splits = [_gathered_batch(batch, dtype) for batch in data]
    if not splits or len({split.y is None for split in splits}) > 1:
        raise DataError("the loader gives no batches, or some with targets and some without")
    x = joined([split.x for split in splits])
    targets = [split.y for split in splits]
    if isinstance(splits[0].x, Opaque):
        targets = as_long(targets)
    y = None if targets[0] is None else joined(targets)
    if isinstance(y, Opaque):
        raise DataError(
            "the targets of the batches have different lengths; pad inputs and labels to one "
            "length, the labels with -100"
        )
    return Split(x, y)


def gathered_inputs(
    data: Any,
    dtype: torch.dtype = torch.float32,
    takes: Callable[[int], bool] = lambda count: False,
) -> Split:
    """As `gathered`, for data whose targets may be absent: a dict or a tuple may be inputs alone.

    Args:
        data: inputs, a pair (x, y), or a loader.
        dtype: type of floating-point inputs and targets.
        takes: whether the network takes this number of inputs, so that a tuple is not (x, y).
    """
    if is_structure(data) and not isinstance(data, (Dataset, Split, TorchDataset)):
        alone = isinstance(data, tuple) and (hasattr(data, "_fields") or takes(len(data)))
        raw = RawBatch(data) if alone else _inputs_or_batch(data)
        return as_split(Split(raw.x, raw.y), dtype, weight=raw.weight)
    return gathered(data, dtype)


def _gathered_batch(batch: Any, dtype: torch.dtype) -> Split:
    """One batch of a loader on the CPU: inputs, and targets if it has them."""
    raw = _inputs_or_batch(batch)
    y = None if raw.y is None else targets_of(raw.y, None, dtype, raw.weight, raw.x).cpu()
    x = inputs_of(raw.x, dtype, points=None if y is None else len(y))
    return Split(x.cpu(), y)


def _inputs_or_batch(batch: Any) -> RawBatch:
    """The parts of a batch that may have no targets: x, [x], (x, y), a dict or an object."""
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return RawBatch(batch[0])
    if isinstance(batch, (tuple, list)) and not hasattr(batch, "_fields"):
        return raw_batch(batch)
    try:
        return raw_batch(batch)
    except DataError:
        return RawBatch(batch)


@checked(device=_device)
def input_batches(
    data: Any,
    batch_size: int = 1024,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    whole: Callable[[Tensor], bool] | None = None,
    trained: Sequence[float] | None = None,
    takes: Callable[[int], bool] = lambda count: False,
) -> Iterator[Inputs]:
    """Inputs in their own order, batch by batch on `device`; targets, if any, are left out.

    Args:
        data: an array or tensor, a Split, a pair (x, y), a torch Dataset of points x or (x, y), or
            a loader, list or other iterable of batches x or (x, y).
        batch_size: inputs per batch; a loader has its own.
        device: device of the batches; None keeps that of the data.
        dtype: type of floating-point inputs.
        whole: returns whether the network takes integers; see `as_inputs`.
        trained: range of the training inputs, to check the first batch.
        takes: whether the network takes this number of inputs, so that a tuple is not (x, y).
    """
    size = checked_size(batch_size)
    data = _inputs_alone(data, takes)
    if isinstance(data, TorchDataset):
        data = DataLoader(data, size)
    if hasattr(data, "__array__"):
        if _is_large(data) and len(data) > size:
            yield from _converted_by_batch(data, size, device, dtype, whole, trained)
            return
        inputs = as_inputs(data, dtype, whole)
        check_range(data, inputs, trained)
        for x in inputs.split(size):
            yield x.to(device)
        return
    if is_structure(data) or isinstance(data, (Structured, Opaque)):
        yield from _structured_batches(data, size, device, dtype)
        return
    if not hasattr(data, "__iter__") or isinstance(data, (str, bytes)):
        raise DataError(f"x must be an array, a tensor or a loader, not {type(data).__name__}")
    for step, batch in enumerate(data):
        x = batch if isinstance(batch, tuple) and takes(len(batch)) else _inputs_or_batch(batch).x
        if not hasattr(x, "__array__") and not is_structure(x):
            raise DataError(
                f"a loader must yield tensors x or pairs (x, y), but a {type(x).__name__} came; "
                f"turn plain lists into one array with numpy.asarray(x)"
            )
        inputs = inputs_of(x, dtype, whole)
        if step == 0 and isinstance(inputs, Tensor):
            check_range(x, inputs, trained)
        yield inputs.to(device, non_blocking=True)


def input_count(data: Any, takes: Callable[[int], bool] = lambda count: False) -> int | None:
    """Number of inputs that `input_batches` is expected to give; None if the data do not say.

    A loader with a sampler of its own may give another number.
    """
    data = _inputs_alone(data, takes)
    known = (TorchDataset, Structured, Opaque)
    if isinstance(data, DataLoader):
        data = data.sampler if hasattr(data.sampler, "__len__") else data.dataset
    elif isinstance(data, (Mapping, tuple)):
        data = next((leaf for leaf in tree_leaves(data) if hasattr(leaf, "__array__")), None)
    elif not hasattr(data, "__array__") and not isinstance(data, known):
        return None
    try:
        return len(data)  # pyright: ignore[reportArgumentType]
    except (TypeError, NotImplementedError, RuntimeError):  # nested tensors raise the last
        return None


def _inputs_alone(data: Any, takes: Callable[[int], bool]) -> Any:
    """What a user gave, without its targets."""
    if isinstance(data, Dataset):
        raise DataError(f"dataset '{data.name}' has several splits; pass one, such as data.test")
    if isinstance(data, tuple) and not hasattr(data, "_fields") and not takes(len(data)):
        return _inputs_of_pair(*data) if len(data) == 2 else list(data)
    if isinstance(data, list) and data and _is_numbers(data[0]):
        return as_tensor(data, "x")
    if isinstance(data, Split):
        return data.x
    return _inputs_or_batch(data).x if isinstance(data, Mapping) else data


def _is_numbers(row: Any) -> bool:
    """Whether a row of plain lists holds numbers, and no arrays."""
    while isinstance(row, list) and row:
        row = row[0]
    return isinstance(row, (int, float, np.number)) and not isinstance(row, (bool, np.bool_))


_LARGE = 1 << 26
"""Bytes of an array from which inputs are converted batch by batch, to save memory."""


def _is_large(data: Any) -> bool:
    if isinstance(data, np.ndarray):
        plain = type(data) in (np.ndarray, np.memmap) and data.dtype.kind in "biuf"
        return plain and data.ndim > 1 and data.nbytes > _LARGE
    if not isinstance(data, Tensor) or data.is_nested or data.layout != torch.strided:
        return False
    return data.ndim > 1 and data.nbytes > _LARGE


def _converted_by_batch(
    data: Any,
    size: int,
    device: torch.device | str | None,
    dtype: torch.dtype,
    whole: Callable[[Tensor], bool] | None,
    trained: Sequence[float] | None,
) -> Iterator[Inputs]:
    for start in range(0, len(data), size):
        part = data[start : start + size]
        try:
            inputs = as_inputs(part, dtype, whole)
        except DataError:
            as_inputs(data, dtype, whole)  # the same sentence, with places in the whole array
            raise
        if start == 0:
            check_range(part, inputs, trained)
        yield inputs.to(device)


def _structured_batches(
    data: Any, size: int, device: torch.device | str | None, dtype: torch.dtype
) -> Iterator[Inputs]:
    for x in inputs_of(data, dtype).split(size):
        yield x.to(device)


def _inputs_of_pair(x: Any, y: Any) -> Any:
    shapes = [np.shape(array)[1:] for array in (x, y) if hasattr(array, "__array__")]
    if len(shapes) == 2 and shapes[0] and shapes[0] == shapes[1]:
        raise DataError(
            f"a tuple of two arrays may be a pair (x, y) or two batches; type x alone for the "
            f"inputs {list(np.shape(x))}, or a list [a, b] of batches"
        )
    return x


def _is_batch(data: Any) -> bool:
    """Whether arrays come as (x, y), (x, y, weight), a dict with labels, or a batch object."""
    if isinstance(data, tuple):
        return len(data) in (2, 3)
    if isinstance(data, Mapping):
        return any(hasattr(value, "__array__") for value in data.values())
    if is_structure(data):
        return hasattr(data, "y")
    if not (isinstance(data, list) and len(data) == 2):
        return False
    arrays = (np.ndarray, Tensor)
    return all(isinstance(each, arrays) for each in data) or _is_pair_of_lists(*data)


def _is_pair_of_lists(x: Any, y: Any) -> bool:
    """Whether plain lists are inputs and targets: rows, and one number or text for each."""
    rows, targets = (list(each) if isinstance(each, np.ndarray) else each for each in (x, y))
    if not (isinstance(rows, list) and isinstance(targets, list) and len(rows) == len(targets)):
        return False
    return all(np.ndim(row) > 0 for row in rows) and all(np.ndim(each) == 0 for each in targets)


def _is_loader(data: Any) -> bool:
    whole = (Dataset, Split, tuple, Tensor, str, bytes, Mapping)
    if isinstance(data, whole) or hasattr(data, "__array__"):
        return False
    if isinstance(data, list):
        first = data[0] if data else None
        if _is_pair_of_lists(*data) if len(data) == 2 else False:
            return False
        if isinstance(first, tuple) and len(first) in (2, 3):
            return True
        if isinstance(first, list):
            return any(hasattr(d, "__array__") or is_structure(d) for d in first)
        return is_structure(first)
    return hasattr(data, "__iter__") and not is_structure(data)


def _is_member_loaders(data: Any, own: bool) -> bool:
    """Whether data are a list or tuple of loaders; lists of batches count only if `own`."""

    def is_loader(each: Any) -> bool:
        if isinstance(each, list):  # [(a, b), (c, d)] may also be a batch of structures
            return own and all(isinstance(batch, (tuple, Mapping)) for batch in each)
        return _is_loader(each) and not isinstance(each, TorchDataset)

    return isinstance(data, (list, tuple)) and len(data) > 0 and all(map(is_loader, data))


def _refuse_points(data: Any) -> None:
    """Refuse a list of data points, which is neither arrays nor batches."""
    first = data[0] if isinstance(data, list) and data else None
    if not isinstance(first, (tuple, list)) or len(first) != 2 or len(data) < 2:
        return
    if isinstance(first[1], (int, float, str, np.number, np.bool_)) and np.ndim(first[0]) > 0:
        raise DataError(
            f"a list of {len(data)} data points (x, y) is neither arrays nor batches; type "
            f"x, y = map(numpy.array, zip(*data)), and pass (x, y)"
        )


def _not_arrays(data: object) -> DataError:
    what = f"a tuple of {len(data)}" if isinstance(data, tuple) else f"a {type(data).__name__}"
    return DataError(f"{what} is not data that fits in one piece; wanted a pair (x, y) of arrays")
