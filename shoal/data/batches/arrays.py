"""Arrays turned into tensors, with their checks, range and digest.

Unusable data give one error sentence. Shoal divides bytes (uint8) by 255, but not floats. A network
trained on one kind would get inputs of the other kind 255 times too small or too large, so the
range of the inputs is checked too.
"""

import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.core.arguments import checked, instance_of
from shoal.core.arguments import whole as whole_number
from shoal.core.errors import DataError, ShoalWarning
from shoal.core.opaque import tensors_in
from shoal.core.structure import Inputs, Structured

__all__ = [
    "add_to_digest",
    "as_inputs",
    "as_targets",
    "as_tensor",
    "check_columns",
    "check_labels",
    "check_not_negative",
    "check_range",
    "finite",
    "first_gap",
    "inputs_digest",
    "mark_constant",
    "needs_double",
    "recalled",
    "value_range",
]

T = TypeVar("T")

_constant: Any = WeakTensorKeyDictionary()


def mark_constant(*tensors: Tensor | None) -> None:
    """Mark tensors whose values do not change any more, so that checks run once."""
    for tensor in tensors:
        if tensor is not None and tensor not in _constant:
            _constant[tensor] = {}


def recalled(find: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
    """Decorator that caches the result of `find` for tensors marked as constant.

    >>> import torch
    >>> calls = []
    >>> total = recalled(lambda tensor: calls.append(1) or float(tensor.sum()))
    >>> x = torch.ones(3)
    >>> mark_constant(x)
    >>> total(x), total(x), total(torch.ones(3)), len(calls)
    (3.0, 3.0, 3.0, 2)
    """

    @functools.wraps(find)
    def wrapped(tensor: Tensor) -> T:
        known = _constant.get(tensor)
        if known is None:
            return find(tensor)
        if wrapped not in known:
            known[wrapped] = find(tensor)
        return known[wrapped]

    return wrapped


_FEW = 1024


def as_inputs(
    x: Any,
    dtype: torch.dtype = torch.float32,
    whole: Callable[[Tensor], bool] | None = None,
) -> Tensor:
    """Inputs [N, ...] as a tensor, one row per data point.

    Real numbers and booleans become `dtype`; bytes (uint8, images) become `dtype` in [0, 1];
    other integers keep their values, as int64 for a network with an embedding, else as `dtype`.
    The tensor shares memory with `x` if nothing is converted.

    Args:
        x: an array, a tensor, a table with named columns, or nested lists.
        dtype: type of floating-point inputs.
        whole: returns whether the network takes integers [N, ...]; None means that it does.

    >>> as_inputs(np.array([[0, 255]], dtype=np.uint8))
    tensor([[0., 1.]])
    """
    raw = as_tensor(x, "x")
    if raw.numel() == 0:
        raise DataError(f"there are no data: x has shape {_shape(raw)}")
    if raw.ndim < 2:
        raise DataError(
            f"x has shape {_shape(raw)}, but each data point must be a row; "
            f"type x[:, None] for points of one number, x[None] for a single point"
        )
    if raw.dtype == torch.uint8:
        return raw.to(dtype) / 255
    if raw.is_floating_point():
        return finite(raw, dtype, "x")
    if raw.dtype == torch.bool:
        return raw.to(dtype)
    numbers = raw.to(torch.int64)
    return numbers if whole is None or whole(numbers) else numbers.to(dtype)


def as_targets(y: Any, n: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Targets of `n` data points: int64 labels [N, ...] or real numbers [N, ...].

    The type decides: integers and booleans are classes, floats are regression targets, even if
    they are whole numbers. `n` of None means any number. Real targets become `dtype`, unless they
    would lose their standard deviation: then they stay double.

    >>> as_targets([True, False], n=2)
    tensor([1, 0])
    """
    raw = as_tensor(y, "y")
    if raw.ndim == 0 or (n is not None and len(raw) != n):
        points = "no points" if raw.ndim == 0 else f"{len(raw)} points"
        raise DataError(f"x has {n} points but y has {points}; each x needs its own y")
    if raw.is_floating_point():
        if raw.numel() == 0:
            raise DataError(f"y has shape {_shape(raw)}; wanted (N,) or (N, K)")
        return finite(raw, torch.float64 if needs_double(raw, dtype) else dtype, "y")
    labels = raw.to(torch.int64)
    return labels.squeeze(1) if labels.ndim == 2 and labels.shape[1] == 1 else labels


@checked(y=instance_of(Tensor, "a tensor of labels"), classes=whole_number)
def check_labels(y: Tensor, classes: int) -> None:
    """Refuse targets that are not labels of `classes` classes; the error names the first one."""
    if y.is_floating_point():
        broken = (y != y.round()).flatten()
        if broken.any():
            first = int(broken.nonzero()[0])
            value = float(y.flatten()[first])
            raise DataError(
                f"y[{first}] is {value:g}, which is not a whole number and so not a class; "
                f"type likelihood='gaussian' to regress on it"
            )
        raise DataError(
            "y holds floats, which are values to regress on; for classes pass integers: "
            "type y.astype(int) for an array, y.long() for a tensor"
        )
    outside = (y >= classes) | (y < 0)
    if not outside.any():
        return
    first, found = int(outside.nonzero()[0]), y.unique()
    if classes == 1 and found.tolist() == [0, 1]:
        raise DataError(
            "y holds the classes 0 and 1, but the network has 1 output; type likelihood='bernoulli'"
        )
    if not bool((y == _IGNORED).any()) and (classes == 1 or len(found) > max(2 * classes, 10)):
        raise DataError(
            f"y holds {len(found)} different integers, which are classes, but the network has "
            f"{classes} output{'' if classes == 1 else 's'}; to regress on y type y.astype(float) "
            f"(y.float() for a tensor), for classes give the network {len(found)} outputs"
        )
    check_not_negative(y)
    raise DataError(
        f"y[{first}] is {int(y[first])}, but the network has {classes} outputs for the classes 0 "
        f"to {classes - 1}; give it {int(found.max()) + 1} outputs, or number the classes from 0: "
        f"type y = numpy.unique(y, return_inverse=True)[1]"
    )


_IGNORED = -100
"""The label that torch and transformers ignore."""


def check_not_negative(y: Tensor) -> None:
    """Refuse negative labels [N]."""
    if (y < 0).any():
        first = int((y < 0).nonzero()[0])
        if bool((y[y < 0] == _IGNORED).all()):
            raise DataError(
                f"y[{first}] is {_IGNORED}, which is no class; to ignore such labels type "
                f"likelihood=shoal.likelihoods.Categorical(ignore_index={_IGNORED})"
            )
        raise DataError(
            f"labels must be 0, 1, 2, ... but y[{first}] is {int(y[first])}; "
            f"type numpy.unique(y, return_inverse=True)[1] to number the classes"
        )


def check_columns(y: Tensor) -> None:
    """Refuse real targets [N, K] of two values, which may be labels.

    Columns of real numbers are regression targets. Columns of 0 and 1 are more often one-hot rows,
    or several labels per point, for which a squared error is wrong.
    """
    if not y.is_floating_point() or y.ndim < 2 or y.shape[-1] < 2:
        return
    values = y[:_FEW].unique().tolist()
    values = y.unique().tolist() if len(values) <= 2 else values
    if len(values) != 2 or (values != [0, 1] and len(y) < 3):
        return
    low, high = (f"{value:g}" for value in values)
    one_hot = values == [0, 1] and bool((y.sum(-1) == 1).all())
    other = (
        "type y.argmax(1) for one-hot rows"
        if one_hot
        else f"type (y[:, 0] == {high}).astype(int) for the labels of one column"
    )
    several = ", likelihood='bernoulli' for several labels at once" if values == [0, 1] else ""
    raise DataError(
        f"y has {y.shape[-1]} columns of {low} and {high}, which may be labels or numbers; "
        f"{other}{several}, or likelihood='gaussian' to regress on them"
    )


def as_tensor(value: Any, name: str) -> Tensor:
    """An array, tensor, table or nested list as a tensor; `name` is used in errors."""
    if isinstance(value, Tensor):
        return _plain(value.detach() if value.requires_grad else value, name)
    if _is_tensors(value):
        try:
            return _plain(torch.stack([row.detach() for row in value]), name)
        except RuntimeError:
            raise _irregular(name) from None
    if np.ma.is_masked(value):
        raise DataError(f"{name} has masked values; fill them in or drop them first")
    if _is_table(value):
        return torch.from_numpy(_native(_joined(value, name), name))
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise _irregular(name) from None
    return torch.from_numpy(_native(array, name))


def _native(array: np.ndarray, name: str) -> np.ndarray:
    """An array that torch can share: writable numbers in this machine's byte order."""
    if array.dtype.kind in "OUST":
        array = _numbers(array, name)
    kind = array.dtype.kind
    if kind not in "biuf":
        raise DataError(f"{name} is of type {array.dtype}; wanted real numbers or integers")
    if kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    if kind == "u" and array.dtype.itemsize > 1:
        return array.astype(np.int64)
    return np.require(array, dtype=array.dtype.newbyteorder("="), requirements=["C", "W"])


def _numbers(array: np.ndarray, name: str) -> np.ndarray:
    """An array of Python objects as numbers."""
    place = _first_other(array)
    if place is not None:
        gap = first_gap(array) if array.ndim == 1 else None
        if gap is not None:
            raise DataError(
                f"{name} has a gap, {_short(array[gap])} at {name}[{gap}]; leave out such points: "
                f"keep = pandas.notna({name}), then x[keep] and y[keep]"
            )
        index = ", ".join(map(str, np.unravel_index(place, array.shape)))
        first = array.flat[place]
        raise DataError(
            f"{name} holds {type(first).__name__} objects, not numbers, as {_short(first)} at "
            f"{name}[{index}]; convert it to a numeric array first "
            f"(text classes: numpy.unique(y, return_inverse=True)[1])"
        )
    return np.array(array.tolist())


def first_gap(array: np.ndarray) -> int | None:
    """Index of the first None, NaN or NA among Python objects; None without any.

    >>> first_gap(np.array(["a", None], dtype=object))
    1
    """
    if array.dtype.kind != "O":
        return None
    return next((i for i, value in enumerate(array.flat) if _is_gap(value)), None)


def _is_gap(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float) and value != value


def _first_other(array: np.ndarray) -> int | None:
    """Index of the first object that is not a number."""
    number = bool, int, float, np.number, np.bool_
    return next((i for i, value in enumerate(array.flat) if not isinstance(value, number)), None)


def _is_table(value: Any) -> bool:
    """Whether a value is a DataFrame of any library."""
    return hasattr(value, "columns") and hasattr(value, "dtypes") and hasattr(value, "__getitem__")


def _joined(table: Any, name: str) -> np.ndarray:
    """The columns of a table side by side, as numbers of one type."""
    labels, kinds = list(table.columns), list(table.dtypes)
    if not labels:
        return np.empty((len(table), 0))
    by_place = getattr(table, "iloc", None)  # labels may repeat
    columns = []
    for place, (label, kind) in enumerate(zip(labels, kinds, strict=True)):
        array = np.asarray(table[label] if by_place is None else by_place[:, place])
        if str(kind).lower().startswith(("categor", "enum")):
            raise _not_numeric(label, name, "is categorical")
        if array.dtype.kind in "OUST":
            other = _first_other(array)
            if other is not None:
                first = array.flat[other]
                what = f"holds {type(first).__name__} objects, not numbers, as {_short(first)}"
                raise _not_numeric(label, name, what)
            array = np.array(array.tolist())
        if array.dtype.kind not in "biuf":
            raise _not_numeric(label, name, f"is of type {array.dtype}")
        columns.append(array)
    return np.stack(columns, axis=1)


def _not_numeric(label: object, name: str, what: str) -> DataError:
    return DataError(
        f"column {_short(label)} of {name} {what}; leave it out or turn it into numbers, "
        f"as pandas.get_dummies does for classes"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _plain(tensor: Tensor, name: str) -> Tensor:
    if tensor.is_nested:
        raise DataError(
            f"{name} is a nested tensor, whose rows differ in shape; "
            f"type torch.nested.to_padded_tensor({name}, 0.0)"
        )
    if tensor.layout != torch.strided:
        raise DataError(f"{name} is a sparse tensor; type {name}.to_dense()")
    if tensor.is_quantized:
        raise DataError(f"{name} is a quantized tensor; type {name}.dequantize()")
    if tensor.is_meta:
        raise DataError(f"{name} is on the device 'meta', which holds no numbers; pass its values")
    if tensor.is_complex():
        raise DataError(f"{name} is of type {tensor.dtype}; wanted real numbers or integers")
    return tensor


_LOST = 1e-4
"""Rounding error in standard deviations of the targets from which they need double precision."""


def needs_double(y: Tensor, dtype: torch.dtype) -> bool:
    """Whether float32 loses targets in float64, such as y + 1e12, 1e-60 or 1e60."""
    if y.dtype != torch.float64 or dtype == torch.float64 or torch.backends.mps.is_available():
        return False
    axes = [0] if y.ndim <= 2 else list(range(y.ndim))  # columns have their own deviations
    error, std = (y - y.to(dtype)).abs().amax(axes), y.std(axes, correction=0)
    return bool(((error > _LOST * std) | error.isinf()).any())


def finite(raw: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Numbers as `dtype`; those that are not finite are refused, and the error names the first."""
    converted = raw.to(dtype)
    if _all_finite(converted):
        return converted
    bad = ~converted.isfinite()
    place = bad.nonzero()[0].tolist()
    first = float(raw[tuple(place)])
    count = int(bad.sum())
    values = "1 value that is" if count == 1 else f"{count} values that are"
    where = f"{name}[{', '.join(map(str, place))}]"
    raise DataError(
        f"{name} has {values} not finite in {str(dtype).removeprefix('torch.')}, "
        f"the first at {where}, {first:g}; remove or replace such points"
    )


@recalled
def _all_finite(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    # A NaN anywhere makes both ends NaN; one pass without copies is ten times faster than isfinite.
    low, high = tensor.aminmax()
    if not tensor.is_cuda:  # for a single point, four calls of torch take longer than the pass
        return math.isfinite(low) and math.isfinite(high)
    return bool(low.isfinite() & high.isfinite())


def _is_tensors(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(row, Tensor) for row in value)
    )


def _irregular(name: str) -> DataError:
    return DataError(f"{name} is not a regular array: its rows differ in length or in kind")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


_SOME = 16
"""Byte images have values above this limit; inputs in [0, 1] with noise have none."""


@recalled
def value_range(x: Tensor) -> list[float] | None:
    """Smallest and largest value of floating-point inputs; None for integers, possibly tokens.

    >>> value_range(Tensor([[0.5, -1.0]]))
    [-1.0, 0.5]
    """
    if not x.is_floating_point() or x.numel() == 0:
        return None
    return [float(end) for end in x.aminmax()]


def check_range(argument: Any, inputs: Tensor, trained: Sequence[float] | None) -> None:
    """Refuse bytes for a network trained on a range other than [0, 1]; warn of the reverse.

    Args:
        argument: the user's argument.
        inputs: the inputs as a tensor.
        trained: `value_range` of the training inputs, if it is known.
    """
    if trained is None or not inputs.is_floating_point():
        return
    low, high = trained
    if str(getattr(argument, "dtype", "")) in ("uint8", "torch.uint8"):
        if low < -0.5 or high > 2:
            raise DataError(
                f"x holds bytes (uint8), which are divided by 255, but the network was trained on "
                f"numbers from {low:.3g} to {high:.3g}; convert x to floats of that range"
            )
        return
    if low < 0 or high > 1:
        return
    least, most = (float(end) for end in inputs.aminmax())
    if least >= 0 and _SOME < most <= 255:
        warnings.warn(
            f"x has numbers up to {most:.4g}, but the network was trained on numbers from 0 to 1 "
            f"(bytes are divided by 255); divide x by 255, or pass it as uint8",
            ShoalWarning,
            stacklevel=4,
        )


def inputs_digest(x: Inputs) -> str:
    """SHA-256 of inputs or targets: of one tensor, or of all tensors of a structure or object."""
    if isinstance(x, Tensor):
        return _tensor_digest(x)
    total = hashlib.sha256()
    for tensor in x.tensors.values() if isinstance(x, Structured) else tensors_in(x):
        total.update(_tensor_digest(tensor).encode())
    return total.hexdigest()


@recalled
def _tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of one tensor, its shape and its type."""
    total = hashlib.sha256()
    add_to_digest(total, tensor)
    return total.hexdigest()


def add_to_digest(total: Any, tensor: Tensor) -> None:
    """Add shape, type and numbers of a tensor to a hash."""
    total.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    total.update(flat.view(torch.uint8).numpy().data)
