"""A linear layer or a sum that waits for what follows it.

Transformers add a residual to a linear layer and normalise the sum, or apply an activation. The
bias then joins that pass: a product with nothing to add is left to the GPU's library. Anything else
that is done with the layer makes it compute itself first. To the network it is a tensor like any
other.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from shoal.engine.derivatives.demand import wanted
from shoal.engine.functorch import Operation, functorch, unwrapped
from shoal.engine.member_layers.activation import activate, add_bias_, column_sums
from shoal.engine.member_layers.backend import by_kernels
from shoal.engine.member_layers.norm import NormSettings, add_norm
from shoal.engine.member_layers.rows import RowOrder

__all__ = ["Layer", "Pending", "computed", "of_members", "product"]


@dataclass(frozen=True, eq=False)
class Layer:
    """x W^T + bias + residual of all members, or x + residual.

    Attributes:
        x: rows [M, N, in].
        weight: [M, out, in]; None for x itself.
        bias: [M, out] or None.
        order: the axes that are folded into rows.
        level: the level of `vmap` that the members belong to.
        residual: rows [M, N, out] to be added, or None.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    order: RowOrder
    level: int
    residual: Tensor | None = None

    def wrapped(self, rows: Tensor) -> Tensor:
        """Rows [M, N, out] as the network sees them: [..., out] of one member."""
        return functorch._add_batch_dim(self.order.restored(rows), 0, self.level)

    def computed(self) -> Tensor:
        """The layer by itself."""
        with temporarily_clear_interpreter_stack():
            rows = self.x if self.weight is None else product(self.x, self.weight, self.bias)
            rows = rows if self.residual is None else self.residual + rows
        return self.wrapped(rows)

    def activated(self, kind: str) -> Tensor:
        """An activation of the layer."""
        with temporarily_clear_interpreter_stack():
            rows = activate(self._without_bias(), self.bias, kind)
        return self.wrapped(rows)

    def normalised(
        self, weight: Tensor | None, shift: Tensor | None, how: NormSettings
    ) -> tuple[Tensor, Tensor]:
        """The layer, and its normalisation."""
        with temporarily_clear_interpreter_stack():
            rows = self._without_bias()
            s, y = add_norm(rows, self.residual, self.bias, weight, shift, how)
        return self.wrapped(s), self.wrapped(y)

    def _without_bias(self) -> Tensor:
        return self.x if self.weight is None else product(self.x, self.weight)

    @property
    def width(self) -> int:
        """Length of a row of the result."""
        return (self.x.shape if self.weight is None else self.weight.shape[:2])[-1]

    @property
    def versions(self) -> tuple[int, ...]:
        """How often the tensors were changed in place."""
        tensors = self.x, self.weight, self.bias, self.residual
        return tuple(each._version for each in tensors if each is not None)


class Pending(Tensor):
    """A layer that has not been computed.

    Attributes:
        layer: what it is.
        value: the result, once somebody wanted it.
    """

    layer: Layer
    value: Tensor | None
    _versions: tuple[int, ...]

    @staticmethod
    def of(layer: Layer) -> "Pending":
        """A layer that waits."""
        sizes = (*layer.order.sizes, layer.width)
        made: Any = torch.Tensor._make_wrapper_subclass(
            Pending, sizes, dtype=layer.x.dtype, device=layer.x.device
        )
        made.layer, made.value, made._versions = layer, None, layer.versions
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
            if func in _ACTIVATIONS:
                joined = args[0].activated(_ACTIVATIONS[func](*args[1:], **kwargs))
            elif func in _SUMS and len(args) == 2 and not kwargs:
                joined = _sum(*args)
            else:
                joined = None
            return func(*computed(args), **computed(kwargs)) if joined is None else joined

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Below autograd a stand-in has nothing to offer: `__torch_function__` comes first."""
        return NotImplemented

    def compute(self) -> Tensor:
        """What the layer would have been from the start."""
        if self.value is None:
            self._check()
            self.value = self.layer.computed()
        return self.value

    @property
    def is_bare(self) -> bool:
        """Whether nothing has been added to the layer, and nobody has wanted its value."""
        return self.value is None and self.layer.residual is None

    def activated(self, kind: str | None) -> Tensor | None:
        """The layer and an activation in one pass; None where there is no such pass."""
        if kind is None or not self.is_bare:
            return None
        self._check()
        return self.layer.activated(kind)

    def normalised(self, weight: Tensor | None, shift: Tensor | None, how: NormSettings) -> Tensor:
        """The normalisation of a layer that waits; its sum is computed in the same pass."""
        self._check()
        self.value, normalised = self.layer.normalised(weight, shift, how)
        return normalised

    def plus(self, other: Tensor) -> "Pending | None":
        """The layer with a residual, or None where the sum is of another kind."""
        layer = self.layer
        other = computed(other)
        if other.shape != self.shape:
            return None
        residual = of_members(other, layer.level)
        if residual is None or residual.dtype != layer.x.dtype:
            return None
        self._check()
        with temporarily_clear_interpreter_stack():
            rows = layer.order.rows(residual).contiguous()
        return Pending.of(replace(layer, residual=rows))

    def _check(self) -> None:
        if self.layer.versions != self._versions:
            # Members then run one after another, with a warning that quotes this.
            raise RuntimeError(
                "a tensor that enters a linear layer or a sum was changed in place before the "
                "result was used; make the change out of place"
            )


def computed(tree: Any) -> Any:
    """Arguments with every stand-in replaced by what it stands for."""
    return tree_map_only(Pending, Pending.compute, tree)


def of_members(tensor: Tensor, level: int | None) -> Tensor | None:
    """The tensor of all members [M, ...]; None if `vmap` does not batch it at this level."""
    members, at = unwrapped(tensor, level)
    return None if at is None else members.movedim(at, 0)


def _sum(first: Any, second: Any) -> Pending | None:
    for layer, other in ((first, second), (second, first)):
        if isinstance(layer, Pending) and layer.is_bare and isinstance(other, Tensor):
            return layer.plus(other)
    return None


def _gelu(approximate: str = "none") -> str:
    return "gelu" if approximate == "none" else "gelu-tanh"


def _rectifier(inplace: bool = False) -> str | None:
    return None if inplace else "relu"


def _swish(inplace: bool = False) -> str | None:
    return None if inplace else "silu"


_ACTIVATIONS: dict[Callable, Callable[..., str | None]] = {
    F.gelu: _gelu,
    F.silu: _swish,
    F.relu: _rectifier,
    torch.relu: _rectifier,
    Tensor.relu: _rectifier,
}
_SUMS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
_METADATA = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__}
    | {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")}
    | {getattr(Tensor, name).__get__ for name in ("is_cuda", "is_nested")}
)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias [M, N, out] for weights [M, out, in] and a bias [M, out]."""
    return _Product.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


class _Product(Operation):
    """The gradient at W has the layout of W, so that no later pass has to turn it."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return torch.bmm(x, weight.mT)
        if by_kernels(x):  # `baddbmm` would write the bias to memory first, row by row
            return add_bias_(torch.bmm(x, weight.mT), bias)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        x, weight, bias = ctx.saved_tensors
        g = gradients[0]
        at_x = torch.bmm(g, weight) if wanted(ctx, 0) else None
        at_weight = torch.bmm(g.mT, x) if wanted(ctx, 1) else None
        at_bias = None
        if bias is not None and wanted(ctx, 2):
            once = by_kernels(g) and not torch.is_grad_enabled()
            at_bias = column_sums(g).to(bias.dtype) if once else g.sum(1)
        return at_x, at_weight, at_bias
