"""Results that members of a loop share: computed for the first member, reused by the others.

A loop calls the network once per member. What depends on shared inputs and shared tensors alone
comes out the same each time. `Once` follows the calls of torch functions: if every tensor argument
is shared, the first member's result is stored, and later members receive the very same tensor. In
this way the results themselves are known as shared, up to the first private tensor.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.engine.members.sharded_trunk import with_whole_tensors

__all__ = ["Once", "Spoiled"]


class Spoiled(Exception):
    """A private operation wrote into a shared result, or read it before a later write."""


class Once(TorchFunctionMode):
    """A block in which torch functions of shared tensors are computed once.

    Args:
        module: the network; remembers which of its calls draw random numbers.
        tensors: shared inputs and shared tensors.
    """

    def __init__(self, module: nn.Module, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._shared = {id(tensor): tensor for tensor in tensors}
        self._results: dict[tuple, Any] = {}
        self._read: list[tuple[Tensor, int]] = []
        self._calls: dict[tuple, int] = {}
        known = module.__dict__.setdefault("_shoal_random", {})
        self._learning = module.training not in known
        self._random: set[tuple] = known.setdefault(module.training, set())
        self._first = True

    def next_member(self) -> None:
        """Begin with the calls of another member."""
        if self._first and any(tensor._version != version for tensor, version in self._read):
            raise Spoiled
        self._first = False
        self._calls.clear()

    @property
    def results(self) -> list[Tensor]:
        """The shared tensors, results included."""
        return list(self._shared.values())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call the function, or return the first member's result."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        shared = [tensor for tensor in tensors if id(tensor) in self._shared]
        what = _described((args, kwargs)) if len(shared) == len(tensors) else None
        if what is None:
            return self._private(func, args, kwargs, shared)
        number = self._calls[func, what] = self._calls.get((func, what), 0) + 1
        place = func, what, number
        if place in self._results:
            return self._results[place]
        drawn = (getattr(func, "__name__", str(func)), number)
        if drawn in self._random or not self._first:
            return self._private(func, args, kwargs, shared)
        before = _generators() if self._learning else None
        result = with_whole_tensors(func, args, kwargs)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if before is not None and not _same(before, _generators()):
            self._random.add(drawn)
            return result
        if leaves:
            self._results[place] = result
            self._shared.update({id(leaf): leaf for leaf in leaves})
        return result

    def _private(self, func: Any, args: tuple, kwargs: dict, shared: list[Tensor]) -> Any:
        versions = [tensor._version for tensor in shared]
        if self._first:
            self._read += zip(shared, versions, strict=True)
        result = with_whole_tensors(func, args, kwargs)
        if any(t._version != version for t, version in zip(shared, versions, strict=True)):
            raise Spoiled
        return result


def _described(value: Any) -> Any:
    """Arguments as a key: tensors by identity, other values by value; None if one has no hash."""
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, (tuple, list)):
        parts = [_described(each) for each in value]
        return None if any(part is None for part in parts) else tuple(parts)
    try:
        hash(value)
    except TypeError:
        return None
    return (type(value).__name__, value)


def _generators() -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        offsets = [g.get_offset() for g in torch.cuda.default_generators]
        states.append(torch.tensor(offsets))
    return states


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
