"""From what a user hands to `fit` or `predict` to batches of tensors."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from shoal.core.errors import DataError
from shoal.data.arrays import as_inputs, as_targets, check_labels
from shoal.data.batches import ArrayBatches, Batches, LoaderBatches, checked_size
from shoal.data.dataset import Dataset, Split

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


def as_split(data: Any, dtype: torch.dtype = torch.float32) -> Split:
    """Validated tensors from a Dataset (its training part), a Split, a pair (x, y), or x alone.

    Arrays, tensors and nested lists will do; `as_inputs` and `as_targets` say what becomes what.

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
    inputs = as_inputs(x, dtype)
    return Split(inputs, None if y is None else as_targets(y, len(inputs), dtype))


def batches_of(
    data: Any,
    batch_size: int = 128,
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    classes: int | None = None,
) -> ArrayBatches | LoaderBatches:
    """Batches of whatever can be trained on, on `device`.

    Args:
        data: a Dataset, a Split, a pair (x, y) of arrays, a torch Dataset, a torch DataLoader, or
            anything that gives batches (x, y) each time it is iterated over.
        batch_size: points in a batch; a loader has its own.
        seed: with the epoch, decides the order of the points.
        device: where the batches are wanted; None leaves them where the data are.
        dtype: type of real inputs and targets.
        classes: refuse labels outside 0 to `classes` - 1.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    elif isinstance(data, TorchDataset):
        data = DataLoader(data, checked_size(batch_size), shuffle=True)
    if _is_loader(data):
        return LoaderBatches(data, seed, device, dtype, classes)
    split = as_split(data, dtype)
    if split.y is None:
        raise DataError("there are inputs but no targets; pass a pair (x, y)")
    if classes is not None:
        check_labels(split.y, classes)
    return ArrayBatches(split.x.to(device), split.y.to(device), batch_size, seed)


def gathered(data: Any, dtype: torch.dtype = torch.float32) -> Split:
    """All of it in one piece: arrays as `as_split` takes them, or the batches of a loader, joined.

    Args:
        data: a Split, a pair (x, y) of arrays, x alone, a torch Dataset, or a loader of batches x
            or (x, y), which is read once.
        dtype: type of real inputs and targets.
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
) -> Iterator[Tensor]:
    """Inputs in their own order, batch by batch on `device`; targets, if any, are left out."""
    if isinstance(data, Dataset):
        raise DataError(f"dataset '{data.name}' has several parts; pass one, such as data.test")
    if isinstance(data, TorchDataset):
        data = DataLoader(data, checked_size(batch_size))
    if _is_loader(data):
        for batch in data:
            x = batch[0] if isinstance(batch, (tuple, list)) else batch
            yield as_inputs(x, dtype).to(device, non_blocking=True)
        return
    for x in as_split(data, dtype).x.split(checked_size(batch_size)):
        yield x.to(device)


def _is_pair(data: object) -> bool:
    if isinstance(data, tuple):
        return len(data) == 2
    arrays = (np.ndarray, Tensor)
    return isinstance(data, list) and len(data) == 2 and all(isinstance(d, arrays) for d in data)


def _is_loader(data: Any) -> bool:
    if isinstance(data, (Dataset, Split, tuple, Tensor, str, bytes)) or hasattr(data, "__array__"):
        return False
    if isinstance(data, list):
        first = data[0] if data else None
        return isinstance(first, (tuple, list)) and any(hasattr(d, "__array__") for d in first)
    return hasattr(data, "__iter__")


def _not_arrays(data: object) -> DataError:
    what = f"a tuple of {len(data)}" if isinstance(data, tuple) else f"a {type(data).__name__}"
    return DataError(f"{what} is not data that fits in one piece; wanted a pair (x, y) of arrays")
