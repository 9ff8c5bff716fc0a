"""A batch: inputs, targets and weights, in whatever form a user, loader or library gives them.

`fit`, `predict` and `evaluate` read every batch here. Inputs and targets become tensors, or
`Structured` if they are dicts, tuples or dataclasses, or `Opaque` if they are objects of a library.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.opaque import Opaque, by_point, is_batch_object
from shoal.core.structure import Inputs, Structured, Weighted, is_structure, parted
from shoal.data.batches.arrays import as_inputs, as_targets, as_tensor, finite, needs_double

__all__ = [
    "RawBatch",
    "Targets",
    "check_same_rows",
    "checked_weights",
    "inputs_of",
    "points_of",
    "raw_batch",
    "rounded",
    "target_shape",
    "targets_of",
]

Targets = Tensor | Structured
"""Targets of a batch: one tensor [B, ...], or a structure; `Weighted` if points have weights."""

_TARGETS = ("labels", "label", "targets", "target", "y")
_WEIGHTS = ("sample_weight", "sample_weights")


class RawBatch(NamedTuple):
    """The parts of a batch as they came; None for a part that did not come."""

    x: Any
    y: Any = None
    weight: Any = None


def raw_batch(batch: Any, step: int = 0) -> RawBatch:
    """Inputs, targets and weights of a batch.

    A batch is (x, y), (x, y, weight), a dict with the targets under `labels`, or an object with the
    targets in its attribute `y`.

    >>> raw_batch({"input_ids": 1, "labels": 2})
    RawBatch(x={'input_ids': 1}, y=2, weight=None)
    """
    if isinstance(batch, (tuple, list)) and len(batch) in (2, 3):
        x, y, *weight = batch
        check_same_rows(*batch)
        return RawBatch(x, tuple(y) if _is_collated_pair(x, y) else y, *weight)
    if isinstance(batch, Mapping):
        name = next((name for name in _TARGETS if name in batch), None)
        weight = next((name for name in _WEIGHTS if name in batch), None)
        left = {key: value for key, value in batch.items() if key not in (name, weight)}
        if name is not None and left:
            return RawBatch(left, batch[name], None if weight is None else batch[weight])
        raise DataError(
            f"batch {step} is a dict of {', '.join(map(repr, batch))}; "
            f"it needs inputs, and the targets under 'labels'"
        )
    if is_structure(batch) and not isinstance(batch, (tuple, list)) and hasattr(batch, "y"):
        y = batch.y
        return RawBatch(batch, tuple(y) if isinstance(y, list) else y)
    size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise DataError(
        f"batch {step} of the loader is a {type(batch).__name__}{size}; wanted a pair "
        f"(x, y): give the loader a collate_fn that returns one"
    )


def _is_collated_pair(x: Any, y: Any) -> bool:
    """Whether targets are a pair, which torch's loaders turn into a list of two batches."""
    if not (isinstance(y, list) and len(y) == 2 and all(isinstance(t, Tensor) for t in y)):
        return False
    rows = [len(t) for t in (*y, x) if isinstance(t, Tensor) and t.ndim > 0]
    return len(rows) >= 2 and len({*rows}) == 1 and (rows[0] != 2 or y[0].shape != y[1].shape)


def check_same_rows(x: Any, y: Any, weight: Any = None) -> None:
    """Refuse pandas objects whose indices differ: their rows may be of other data points."""
    for name, other in (("y", y), ("sample_weight", weight)):
        indices: list[Any] = [getattr(each, "index", None) for each in (x, other)]
        mine, theirs = indices
        if not (hasattr(mine, "equals") and hasattr(theirs, "equals")):
            continue
        if len(mine) != len(theirs) or mine.equals(theirs):
            continue
        row = next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
        line = f"{name} = {name}.to_numpy() if their rows are in the same order"
        if mine.is_unique and mine.sort_values().equals(theirs.sort_values()):
            line = f"{name} = {name}.loc[x.index] to put {name} in the order of x, or {line}"
        raise DataError(
            f"x and {name} have different indices, {mine[row]!r} and {theirs[row]!r} in row {row}, "
            f"so their rows may not belong together; type {line}"
        )


def inputs_of(
    x: Any,
    dtype: torch.dtype = torch.float32,
    whole: Callable[[Tensor], bool] | None = None,
    points: int | None = None,
) -> Inputs:
    """Inputs as a tensor, a structure of tensors, or an object that stays as it is.

    Args:
        x: an array of `as_inputs`; a dict, tuple or dataclass of arrays; or a batch object.
        dtype: type of real inputs.
        whole: returns whether the network takes integers; see `as_inputs`.
        points: number of data points of a batch object.
    """
    if isinstance(x, (Structured, Opaque)):
        return x.to(dtype)
    if not is_structure(x):
        return as_inputs(x, dtype, whole)
    if isinstance(x, (Mapping, tuple)) or hasattr(x, "__dataclass_fields__"):
        return Structured.of(x, lambda name, value: _part(name, value, dtype))
    return Opaque(x, 0 if points is None else points)


def targets_of(
    y: Any, n: int | None, dtype: torch.dtype = torch.float32, weight: Any = None, x: Any = None
) -> Targets:
    """Targets of `n` data points, with their weights if there are any.

    Args:
        y: an array of `as_targets`, or a dict, tuple or dataclass of arrays.
        n: number of data points; None takes that of the targets.
        dtype: type of real targets.
        weight: weight of each data point [N].
        x: the inputs. Targets of the rows of a batch object, such as atoms, become [N, rows, ...];
            data points with fewer rows end in NaN.
    """
    if isinstance(y, Structured):
        targets: Targets = y.to(dtype)
    elif is_structure(y):
        rows = _rows_by_point(y, x) if is_batch_object(x) else y
        targets = Structured.of(rows, lambda name, value: _target_part(name, value, dtype))
    else:
        targets = as_targets(y, n, dtype)
    if n is not None and len(targets) != n:
        raise DataError(f"x has {n} points but y has {len(targets)} points; each x needs its own y")
    if weight is None:
        return targets
    return Weighted.of_pair(targets, checked_weights(weight, len(targets), dtype))


def _rows_by_point(y: Any, x: Any) -> Any:
    """A pair or dict of targets, in which those of the object's rows are ordered by data point."""
    if not isinstance(y, (Mapping, tuple)) or hasattr(y, "_fields"):
        return y
    named = dict(y) if isinstance(y, Mapping) else dict(enumerate(y))
    tensors = {name: as_tensor(value, str(name)) for name, value in named.items()}
    first, *others = tensors
    count = len(tensors[first])
    for name in others:
        if len(tensors[name]) != count or isinstance(getattr(x, "batch", None), Tensor):
            tensors[name] = by_point(x, tensors[name], count, math.nan)
    return tensors if isinstance(y, Mapping) else tuple(tensors.values())


def target_shape(y: Any) -> tuple[int, ...] | None:
    """Shape of one data point's targets as they were given; None for a structure.

    >>> target_shape([0.5, 1.5]), target_shape([[1], [2]])
    ((), (1,))
    """
    y, _ = parted(y)
    if isinstance(y, Structured) or is_structure(y):
        return None
    return tuple(as_tensor(y, "y").shape[1:])


def rounded(y: Targets, dtype: torch.dtype) -> Targets:
    """Targets as `dtype`, for a likelihood that does not standardise them; see `as_targets`."""
    targets, weight = parted(y)
    if isinstance(targets, Structured):
        exact = targets.to(dtype)
        return exact if weight is None else type(y).of_pair(exact, weight)  # pyright: ignore
    if not targets.is_floating_point():
        return y
    if targets.dtype == dtype:
        return y
    exact = finite(targets, dtype, "y")
    return exact if weight is None else type(y).of_pair(exact, weight)  # pyright: ignore


def points_of(batch: Any) -> int:
    """Number of data points of a batch, without converting it; 0 if unknown."""
    try:
        raw = raw_batch(batch)
    except DataError:
        return 0
    if is_structure(raw.y):
        return len(targets_of(raw.y, None, x=raw.x))
    return len(raw.y) if hasattr(raw.y, "__len__") else 0


def _part(name: str, value: Any, dtype: torch.dtype) -> Tensor:
    """One tensor of a structure: real numbers as `dtype`, byte images in [0, 1], integers as they
    are."""
    tensor = as_tensor(value, name)
    if tensor.dtype == torch.uint8 and tensor.ndim >= 4:
        return tensor.to(dtype) / 255
    if tensor.is_floating_point():
        return tensor.to(dtype)
    return tensor if tensor.dtype == torch.bool else tensor.to(torch.int64)


def _target_part(name: str, value: Any, dtype: torch.dtype) -> Tensor:
    """One tensor of structured targets; real numbers stay double where `dtype` loses them."""
    part, raw = _part(name, value, dtype), as_tensor(value, name)
    if not raw.is_floating_point() or raw.ndim == 0:
        return part
    known = raw[~raw.flatten(1).isnan().any(1)] if raw.ndim > 1 else raw[~raw.isnan()]
    return raw if len(known) and needs_double(known, dtype) else part


def checked_weights(weight: Any, n: int, dtype: torch.dtype) -> Tensor:
    """Weights of `n` data points [N], or of their targets [N, ...], if they are valid."""
    weights = as_tensor(weight, "sample_weight").to(dtype)
    if weights.ndim == 0 or len(weights) != n:
        raise DataError(
            f"sample_weight has shape {tuple(weights.shape)}; wanted one number per point, ({n},)"
        )
    if not bool(((weights >= 0) & weights.isfinite()).all()) or float(weights.sum()) == 0:
        raise DataError("sample_weight must be numbers from 0 on, and some must be positive")
    return weights
