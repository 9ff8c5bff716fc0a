"""A layer that waits for what follows it.

Most networks add a shortcut to a normalised layer, rectify it, or do both. As one kernel that costs
one read of the layer, as three it costs three. So batch normalisation, and a convolution that has a
bias to add, hand out a stand-in which knows its shape and little more. A sum and a rectifier join
it; anything else that is done with it makes it compute itself first. To the module, the stand-in is
a tensor like any other.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from shoal.core.errors import ConfigError

__all__ = ["Deferred", "Waiting", "computed"]

Waiting = Callable[[Tensor | None, bool], Tensor]
"""Computes a layer, given what is to be added to it and whether it is rectified."""


class Deferred(Tensor):
    """A layer that has not been computed, with or without a residual.

    Attributes:
        x: inputs [B, C, ...].
        layer: computes it from them.
        residual: what has been added, if anything.
        value: the result, once somebody wanted it.
    """

    x: Tensor
    layer: Waiting
    residual: Tensor | None
    value: Tensor | None
    _versions: tuple[int, ...]

    @staticmethod
    def of(x: Tensor, layer: Waiting, residual: Tensor | None = None) -> "Deferred":
        """A layer that waits."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            Deferred, x.shape, strides=x.stride(), dtype=x.dtype, device=x.device
        )
        made.x, made.layer, made.residual, made.value = x, layer, residual, None
        made._versions = _versions(x, residual)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Join what can be joined; compute the layer for everything else."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA:
                return func(*args, **kwargs)
            if func in _RECTIFIERS:
                return _rectified(*args, **kwargs)
            if func in _SUMS and len(args) == 2 and not kwargs:
                joined = _joined(*args)
                if joined is not None:
                    return joined
            return func(*computed(args), **computed(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Below autograd a stand-in has nothing to offer: `__torch_function__` comes first."""
        return NotImplemented

    def compute(self, rectified: bool = False) -> Tensor:
        """What the layer would have been from the start, or that rectified in the same pass."""
        if self.value is not None:
            return self.value.relu() if rectified else self.value
        if _versions(self.x, self.residual) != self._versions:
            raise ConfigError(
                "a tensor that enters a normalised layer was changed in place before the layer was "
                "used; make the change out of place, or call fast_second_order(fuse=False)"
            )
        outputs = self.layer(self.residual, rectified)
        self.value = self.value if rectified else outputs
        return outputs

    def plus(self, residual: Tensor) -> "Deferred | None":
        """The layer with something added, or None where the sum is of another kind."""
        alike = residual.shape == self.x.shape and residual.dtype == self.x.dtype
        if self.value is not None or self.residual is not None or not alike:
            return None
        return Deferred.of(self.x, self.layer, computed(residual))


def computed(tree: Any) -> Any:
    """Arguments with every stand-in replaced by what it stands for."""
    return tree_map_only(Deferred, Deferred.compute, tree) if _waits(tree) else tree


def _waits(tree: Any) -> bool:
    """Whether there is a stand-in; most calls have none, and rebuilding them takes longer."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return isinstance(tree, Deferred)
    return any(map(_waits, tree))


def _joined(first: Any, second: Any) -> Deferred | None:
    if isinstance(first, Deferred) and isinstance(second, Tensor):
        return first.plus(second)
    if isinstance(second, Deferred) and isinstance(first, Tensor):
        return second.plus(first)
    return None


def _rectified(input: Deferred, inplace: bool = False) -> Tensor:
    outputs = input.compute(rectified=True)
    if inplace:
        input.value = outputs  # whoever holds the layer sees that it has been changed
    return outputs


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors if tensor is not None)


_RECTIFIERS = frozenset({F.relu, torch.relu, Tensor.relu})
_SUMS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
_METADATA = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__}
    | {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")}
)
