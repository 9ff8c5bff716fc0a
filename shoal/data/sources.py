"""Data arguments of `fit` and `predict`, turned into batches of tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from shoal.core.errors import DataError
from shoal.data.arrays import as_inputs, as_targets, check_labels
from shoal.data.batches import ArrayBatches, Batches, checked_size
from shoal.data.dataset import Dataset, Split
from shoal.data.input_range import check_range
from shoal.data.loaders import LoaderBatches

__all__ = [
    "ArrayBatches",
    "Batches",
    "LoaderBatches",
    "as_split",
    "batches_of",
    "check_labels",
    "gathered",
    "input_batches",
]


def as_split(
    data: Any,
    dtype: torch.dtype = torch.float32,
    whole: Callable[[Tensor], bool] | None = None,
) -> Split:
    """Validated tensors from a Dataset (its training data), a Split, a pair (x, y), or x alone.

    Arrays, tensors and nested lists are allowed; see `as_inputs` and `as_targets`.

    >>> as_split(([[0.5], [1.5]], [0, 1])).y
    tensor([0, 1])
    """
    if isinstance(data, Dataset):
        data = data.train
    if isinstance(data, Split):
        x, y = data.x, data.y
    elif _is_pair(data):
        x, y = data
    elif isinstance(data, (tuple, DataLoader, TorchDataset)):
        raise _not_arrays(data)
    else:
        x, y = data, None
    inputs = as_inputs(x, dtype, whole)
    return Split(inputs, None if y is None else as_targets(y, len(inputs), dtype))


def batches_of(
    data: Any,
    batch_size: int = 128,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    classes: int | None = None,
    steps: int | None = None,
    whole: Callable[[Tensor], bool] | None = None,
) -> ArrayBatches | LoaderBatches:
    """Batches of any training data, on `device`.

    Args:
        data: a Dataset, a Split, a pair (x, y) of arrays, a torch Dataset of points (x, y),
            indexed or iterable, a torch DataLoader, or any iterable of batches (x, y) that can be
            read repeatedly, such as a list.
        batch_size: data points per batch; a loader has its own.
        seed: with the epoch, fixes the order of the points.
        device: device of the batches; None keeps that of the data.
        dtype: type of floating-point inputs and targets.
        classes: refuse labels outside 0 to `classes` - 1.
        steps: number of batches; with it, data of unknown length are not counted.
        whole: returns whether the network takes integers; see `as_inputs`.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    elif isinstance(data, TorchDataset):
        shuffle = not isinstance(data, IterableDataset)
        data = DataLoader(data, checked_size(batch_size), shuffle=shuffle)
    if _is_loader(data):
        return LoaderBatches(data, seed, device, dtype, classes, steps, whole)
    split = as_split(data, dtype, whole)
    if split.y is None:
        raise DataError("there are inputs but no targets; pass a pair (x, y)")
    if classes is not None:
        check_labels(split.y, classes)
    return ArrayBatches(split.x.to(device), split.y.to(device), batch_size, seed)


def gathered(data: Any, dtype: torch.dtype = torch.float32) -> Split:
    """All data as one split: arrays as in `as_split`, or the joined batches of a loader.

    Args:
        data: a Split, a pair (x, y) of arrays, x alone, a torch Dataset, or a loader of batches x
            or (x, y), which is read once.
        dtype: type of floating-point inputs and targets.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    elif isinstance(data, TorchDataset):
        data = DataLoader(data, 1024)
    if not _is_loader(data):
        return as_split(data, dtype)
    batches = [list(batch) if isinstance(batch, (tuple, list)) else [batch] for batch in data]
    if not batches or any(len(batch) != len(batches[0]) for batch in batches):
        raise DataError("the loader gives no batches, or some with targets and some without")
    x = torch.cat([as_inputs(batch[0], dtype).cpu() for batch in batches])
    if len(batches[0]) < 2:
        return Split(x)
    y = [as_targets(batch[1], len(batch[0]), dtype).cpu() for batch in batches]
    return Split(x, torch.cat(y))


def input_batches(
    data: Any,
    batch_size: int = 1024,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    whole: Callable[[Tensor], bool] | None = None,
    trained: Sequence[float] | None = None,
) -> Iterator[Tensor]:
    """Inputs in their own order, batch by batch on `device`; targets, if any, are left out.

    Args:
        data: an array or tensor, a Split, a pair (x, y), a torch Dataset of points x or (x, y), or
            a loader, list or other iterable of batches x or (x, y).
        batch_size: inputs per batch; a loader has its own.
        device: device of the batches; None keeps that of the data.
        dtype: type of floating-point inputs.
        whole: returns whether the network takes integers; see `as_inputs`.
        trained: range of the training inputs, to check the first batch.
    """
    if isinstance(data, Dataset):
        raise DataError(f"dataset '{data.name}' has several splits; pass one, such as data.test")
    size = checked_size(batch_size)
    if isinstance(data, TorchDataset):
        data = DataLoader(data, size)
    if isinstance(data, tuple) and len(data) == 2:
        data = _inputs_of_pair(*data)
    elif isinstance(data, Split):
        data = data.x
    if hasattr(data, "__array__"):
        inputs = as_inputs(data, dtype, whole)
        check_range(data, inputs, trained)
        for x in inputs.split(size):
            yield x.to(device)
        return
    if not hasattr(data, "__iter__") or isinstance(data, (str, bytes, Mapping)):
        raise DataError(f"x must be an array, a tensor or a loader, not {type(data).__name__}")
    for step, batch in enumerate(data):
        x = batch[0] if isinstance(batch, (tuple, list)) and len(batch) else batch
        if not hasattr(x, "__array__"):
            raise DataError(
                f"a loader must yield tensors x or pairs (x, y), but a {type(x).__name__} came; "
                f"turn plain lists into one array with numpy.asarray(x)"
            )
        inputs = as_inputs(x, dtype, whole)
        if step == 0:
            check_range(x, inputs, trained)
        yield inputs.to(device, non_blocking=True)


def _inputs_of_pair(x: Any, y: Any) -> Any:
    shapes = [np.shape(array)[1:] for array in (x, y) if hasattr(array, "__array__")]
    if len(shapes) == 2 and shapes[0] and shapes[0] == shapes[1]:
        raise DataError(
            f"a tuple of two arrays may be a pair (x, y) or two batches; type x alone for the "
            f"inputs {list(np.shape(x))}, or a list [a, b] of batches"
        )
    return x


def _is_pair(data: object) -> bool:
    if isinstance(data, tuple):
        return len(data) == 2
    arrays = (np.ndarray, Tensor)
    return isinstance(data, list) and len(data) == 2 and all(isinstance(d, arrays) for d in data)


def _is_loader(data: Any) -> bool:
    whole = (Dataset, Split, tuple, Tensor, str, bytes, Mapping)
    if isinstance(data, whole) or hasattr(data, "__array__"):
        return False
    if isinstance(data, list):
        first = data[0] if data else None
        return isinstance(first, (tuple, list)) and any(hasattr(d, "__array__") for d in first)
    return hasattr(data, "__iter__")


def _not_arrays(data: object) -> DataError:
    what = f"a tuple of {len(data)}" if isinstance(data, tuple) else f"a {type(data).__name__}"
    return DataError(f"{what} is not data that fits in one piece; wanted a pair (x, y) of arrays")
