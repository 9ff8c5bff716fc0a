"""Inputs and targets of any structure: a tree of tensors that is indexed like one tensor.

A network may take a dict, a tuple, a dataclass or an object of a library. `Structured` holds the
tensors of such a batch, each [B, ...], and the form from which the original structure is rebuilt.
It has the few methods of a tensor that moving and selecting batches need, so training code treats
both alike. An object of a library, such as a batch of graphs, stays whole: `core.opaque`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.opaque import Opaque, OpaqueBatches, is_batch_object, with_attribute

__all__ = [
    "Inputs",
    "MemberWeighted",
    "Structured",
    "Weighted",
    "as_long",
    "form_of",
    "form_table",
    "is_structure",
    "joined",
    "parted",
    "points_in",
    "rows_of",
]


class Structured:
    """Tensors [B, ...] in any structure, used like one tensor with B rows.

    >>> batch = Structured.of({"a": torch.zeros(3, 2), "b": torch.arange(3), "note": None})
    >>> len(batch), batch[1:].original()["b"]
    (3, tensor([1, 2]))

    Attributes:
        tensors: the tensors by name: the keys on the way to each, joined by dots.
        form: the structure with each tensor replaced by its name.
    """

    __slots__ = ("form", "tensors")

    def __init__(self, tensors: Mapping[str, Tensor], form: Any) -> None:
        self.tensors, self.form = dict(tensors), form

    @classmethod
    def of(
        cls, structure: Any, convert: Callable[[str, Any], Tensor] = lambda _, value: value
    ) -> "Structured":
        """The tensors of a structure; `convert` makes a tensor of each array and its name."""
        tensors: dict[str, Tensor] = {}
        form = _form(structure, "", tensors, convert)
        if not tensors:
            raise DataError(f"a {type(structure).__name__} without tensors is not a batch")
        lengths = {name: len(t) for name, t in tensors.items() if t.ndim > 0}
        if len(set(lengths.values())) > 1:
            rows = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise DataError(f"the tensors of a batch need one row per data point, not {rows}")
        return cls(tensors, form)

    def original(self) -> Any:
        """The structure as it was given, with the tensors as they are now."""
        return _rebuilt(self.form, self.tensors)

    @classmethod
    def of_object(cls, value: Any, name: str, tensor: Tensor) -> "Structured":
        """A batch object in which one tensor may differ by member; it stays whole otherwise."""
        return cls({name: tensor}, _Object(value, name))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Structured":
        """The same structure with every tensor changed; single numbers stay as they are."""
        changed = {n: change(t) if t.ndim > 0 else t for n, t in self.tensors.items()}
        return type(self)(changed, self.form)

    def replaced(self, name: str, tensor: Tensor) -> "Structured":
        """The same structure with another tensor of this name."""
        return type(self)({**self.tensors, name: tensor}, self.form)

    @property
    def first(self) -> Tensor:
        """The first tensor with rows."""
        return next(t for t in self.tensors.values() if t.ndim > 0)

    # The part of a tensor's interface that batches need.

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, rows: Any) -> "Structured":
        return self.map(lambda tensor: tensor[rows])

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in self.tensors.items())
        return f"{type(self).__name__}({shapes})"

    @property
    def shape(self) -> torch.Size:
        """Shape of the first tensor."""
        return self.first.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the first tensor."""
        return self.first.ndim

    @property
    def device(self) -> torch.device:
        """Device of the first tensor."""
        return self.first.device

    @property
    def is_cuda(self) -> bool:
        """Whether the tensors are on a GPU."""
        return self.first.is_cuda

    def is_floating_point(self) -> bool:
        """False: a structure is never converted as a whole."""
        return False

    def to(self, *where: Any, **options: Any) -> "Structured":
        """Move all tensors; a type applies to real numbers only."""
        return type(self)(
            {name: _moved(t, where, options) for name, t in self.tensors.items()}, self.form
        )

    def cpu(self) -> "Structured":
        """All tensors on the CPU."""
        return self.to("cpu")

    def detach(self) -> "Structured":
        """All tensors, detached."""
        return self.map(Tensor.detach)

    def index_select(self, dim: int, rows: Tensor) -> "Structured":
        """Some rows of every tensor."""
        return self.map(lambda tensor: tensor.index_select(dim, rows))

    def expand(self, members: int, *_: int) -> "Structured":
        """One copy of every tensor per member [M, B, ...], without memory."""
        return self.map(lambda tensor: tensor.expand(members, *tensor.shape))

    def split(self, size: int) -> Iterator["Structured"]:
        """Parts of `size` rows, in order."""
        for start in range(0, len(self), size):
            yield self[start : start + size]

    def unbind(self, dim: int = 0) -> list["Structured"]:
        """The structure of each member, from tensors [M, B, ...]."""
        return [self.map(lambda tensor, i=i: tensor.select(dim, i)) for i in range(len(self))]


class Weighted(Structured):
    """Targets with a weight per data point [B] or per target, in the interface of one tensor."""

    __slots__ = ()
    per_member = False

    @classmethod
    def of_pair(cls, y: "Tensor | Structured", weight: Tensor) -> "Weighted":
        """Targets and their weights [B]."""
        if isinstance(y, Structured):
            own = {f"y.{name}": t for name, t in y.tensors.items()}
            return cls({**own, "weight": weight}, y.form)
        return cls({"y": y, "weight": weight}, None)

    @property
    def y(self) -> "Tensor | Structured":
        """The targets alone."""
        if self.form is None:
            return self.tensors["y"]
        own = {n.removeprefix("y."): t for n, t in self.tensors.items() if n != "weight"}
        return Structured(own, self.form)

    @property
    def weight(self) -> Tensor:
        """The weights: [B], or of every token or place; see also `MemberWeighted`."""
        return self.tensors["weight"]


class MemberWeighted(Weighted):
    """Targets with a weight per member and data point [M, B]."""

    __slots__ = ()
    per_member = True


Inputs = Tensor | Structured | Opaque
"""Inputs of a batch: one tensor [B, ...], a structure of tensors, or an object."""


def is_structure(value: Any) -> bool:
    """Whether a value is a dict, tuple, dataclass or batch object, not one array or a loader."""
    if isinstance(value, (Tensor, str, bytes)) or hasattr(value, "__array__"):
        return False
    return isinstance(value, (Mapping, tuple)) or _is_record(value) or is_batch_object(value)


def parted(y: Any) -> tuple[Any, Tensor | None]:
    """Targets and their weights; None without weights."""
    return (y.y, y.weight) if isinstance(y, Weighted) else (y, None)


def rows_of(batch: Any, rows: Any, own: bool = False) -> Any:
    """Rows of a batch [B, ...], or of the batch of every member [M, B, ...] if `own`.

    >>> rows_of(torch.arange(6).reshape(2, 3), slice(2), own=True)
    tensor([[0, 1],
            [3, 4]])
    """
    if not own:
        return batch[rows]
    return batch.map(lambda t: t[:, rows]) if isinstance(batch, Structured) else batch[:, rows]


def points_in(batch: Any, own: bool = False) -> int:
    """Data points of a batch [B, ...], or of each member's batch [M, B, ...] if `own`."""
    return len(batch[0]) if own else len(batch)


def joined(parts: Sequence[Any]) -> Any:
    """Batches of equal structure as one batch; sequences of different lengths stay batches."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Opaque) or not _same_rows(parts):
        return OpaqueBatches(parts)
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    names = first.tensors
    tensors = {
        n: torch.cat([part.tensors[n] for part in parts]) if t.ndim else t for n, t in names.items()
    }
    return type(first)(tensors, first.form)


def as_long(parts: Sequence[Any]) -> list[Any]:
    """Targets of batches with as many rows a data point, [B, rows, ...]; the last ones are NaN.

    >>> short, long = (Structured.of({"f": torch.ones(1, n)}) for n in (1, 2))
    >>> as_long([short, long])[0].tensors["f"]
    tensor([[1., nan]])
    """
    if not all(isinstance(part, Structured) for part in parts) or _same_rows(parts):
        return list(parts)
    most = {
        name: max(part.tensors[name].shape[1] for part in parts)
        for name, tensor in parts[0].tensors.items()
        if tensor.ndim > 1 and tensor.is_floating_point()
    }

    def padded(name: str, tensor: Tensor) -> Tensor:
        missing = most[name] - tensor.shape[1] if name in most else 0
        shape = tensor.shape[0], missing, *tensor.shape[2:]
        return torch.cat([tensor, tensor.new_full(shape, math.nan)], 1) if missing else tensor

    return [type(p)({n: padded(n, t) for n, t in p.tensors.items()}, p.form) for p in parts]


def _same_rows(parts: Sequence[Any]) -> bool:
    """Whether the rows of all batches have the same shapes."""

    def shapes(part: Any) -> list[torch.Size]:
        tensors = [part] if isinstance(part, Tensor) else part.tensors.values()
        return [tensor.shape[1:] for tensor in tensors]

    return all(shapes(part) == shapes(parts[0]) for part in parts)


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def form_table(form: Any) -> Any:
    """The form of a `Structured` as plain values for a file; None for forms with objects.

    >>> form_table(Structured.of({"a": torch.zeros(3), "b": (torch.zeros(3), None)}).form)
    {'dict': {'a': {'tensor': 'a'}, 'b': {'tuple': [{'tensor': 'b.0'}, {'value': None}]}}}
    """
    try:
        return _form_table(form)
    except TypeError:
        return None


def _form_table(form: Any) -> dict[str, Any]:
    if isinstance(form, _Name):
        return {"tensor": str(form)}
    if isinstance(form, dict) and all(isinstance(key, str) for key in form):
        return {"dict": {key: _form_table(each) for key, each in form.items()}}
    if type(form) in (tuple, list):
        return {type(form).__name__: [_form_table(each) for each in form]}
    if form is None or isinstance(form, bool | int | float | str):
        return {"value": form}
    raise TypeError(f"a file cannot hold a {type(form).__name__}")


def form_of(table: Mapping[str, Any]) -> Any:
    """The form that `form_table` described."""
    ((kind, content),) = table.items()
    if kind == "tensor":
        return _Name(content)
    if kind == "dict":
        return {key: form_of(each) for key, each in content.items()}
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](form_of(each) for each in content)
    return content


class _Name(str):
    """Stands for the tensor of this name in a form."""


class _Object:
    """A batch object in a form, of which one attribute is a tensor of the structure."""

    __slots__ = ("name", "value")

    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name = value, name


class _Record:
    """A dataclass or a named tuple in a form."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: type, fields: dict[str, Any]) -> None:
        self.kind, self.fields = kind, fields


def _form(
    value: Any, path: str, tensors: dict[str, Tensor], convert: Callable[[str, Any], Tensor]
) -> Any:
    def inside(items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        start = f"{path}." if path else ""
        return {key: _form(each, f"{start}{key}", tensors, convert) for key, each in items}

    if isinstance(value, Tensor) or hasattr(value, "__array__"):
        tensors[path or "x"] = convert(path or "x", value)
        return _Name(path or "x")
    if isinstance(value, Mapping):  # also the mappings of libraries, which become dicts
        return inside(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names: Any = value._fields  # pyright: ignore[reportAttributeAccessIssue]
        return _Record(type(value), inside(zip(names, value, strict=True)))
    if isinstance(value, (tuple, list)):
        return type(value)(inside(enumerate(value)).values())
    if _is_record(value):
        names = [field.name for field in dataclasses.fields(value)]
        return _Record(type(value), inside((name, getattr(value, name)) for name in names))
    return value


def _rebuilt(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(form, _Name):
        return tensors[form]
    if isinstance(form, dict):
        return {key: _rebuilt(each, tensors) for key, each in form.items()}
    if isinstance(form, (tuple, list)):
        return type(form)(_rebuilt(each, tensors) for each in form)
    if isinstance(form, _Object):
        return with_attribute(form.value, form.name, tensors[form.name])
    if isinstance(form, _Record):
        return form.kind(**{name: _rebuilt(each, tensors) for name, each in form.fields.items()})
    return form


def _moved(tensor: Tensor, where: tuple, options: dict[str, Any]) -> Tensor:
    if tensor.is_floating_point():
        return tensor.to(*where, **options)
    places = [w for w in where if not isinstance(w, torch.dtype)]
    options = {name: value for name, value in options.items() if name != "dtype"}
    return tensor.to(*places, **options) if places or options else tensor
