"""Layers of transformers for all members at once: functions of torch, replaced under `vmap`.

    with member_layers():
        outputs = vmap(member)(tensors)

Inside the block every linear layer is one batched product, and the bias, the activation or the
residual and the normalisation that follow it are one pass. Attention folds members into its batch,
and short sequences have kernels of their own. All of them are differentiable twice. A convolution
that only cuts patches is a linear layer of patches. Everything else is left to `vmap`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.engine.derivatives.convolution import Geometry
from shoal.engine.functorch import functorch
from shoal.engine.member_layers.attention import attend_folded, self_attention
from shoal.engine.member_layers.backend import by_kernels
from shoal.engine.member_layers.norm import WIDEST, NormSettings, norm
from shoal.engine.member_layers.parts import divided, mark_parts, unbound
from shoal.engine.member_layers.pending import Layer, Pending, computed, of_members
from shoal.engine.member_layers.rows import as_rows

__all__ = ["member_layers"]


class member_layers(TorchFunctionMode):  # noqa: N801
    """A block within which the layers of transformers run for all members of `vmap` at once."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Replace the functions that are known, and call all others."""
        kwargs = kwargs or {}
        replaced = _REPLACED.get(func)
        if replaced is None:
            return func(*args, **kwargs)
        outputs = replaced(*args, **kwargs)
        return func(*computed(args), **computed(kwargs)) if outputs is None else outputs


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """x W^T + bias; None where `vmap` does as well."""
    level = functorch.maybe_current_level()
    own, input = of_members(weight, level), computed(input)
    x = of_members(input, level)
    if own is None:
        return _shared_linear(x, weight, bias, level)
    if input.ndim < 2 or own.ndim != 3:
        return None
    x = input.expand(len(own), *input.shape) if x is None else x
    column = None if bias is None else of_members(bias, level)
    if not by_kernels(x, own) or (bias is not None and column is None):
        return None
    with temporarily_clear_interpreter_stack():
        rows, order = as_rows(x)
        own, column = own.contiguous(), None if column is None else column.contiguous()
    layer = Layer(rows, own, column, order, level)
    return layer.computed() if bias is None else Pending.of(layer)


def _shared_linear(
    x: Tensor | None, weight: Tensor, bias: Tensor | None, level: int
) -> Tensor | None:
    """The product with a weight of all members: their rows are the rows of one matrix."""
    if x is None or x.ndim < 3 or functorch.is_batchedtensor(weight):
        return None
    if bias is not None and functorch.is_batchedtensor(bias):
        return None
    with temporarily_clear_interpreter_stack():
        rows, order = as_rows(x)
        outputs = F.linear(rows.flatten(0, 1), weight, bias).unflatten(0, rows.shape[:2])
    return functorch._add_batch_dim(order.restored(outputs), 0, level)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    return _normalised(input, normalized_shape, weight, bias, NormSettings(eps, True))


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    smallest = torch.finfo(input.dtype).eps if eps is None else eps
    return _normalised(input, normalized_shape, weight, None, NormSettings(smallest, False))


def _normalised(
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    shift: Tensor | None,
    how: NormSettings,
) -> Tensor | None:
    level = functorch.maybe_current_level()
    if len(shape) != 1 or shape[0] > WIDEST or input.ndim < 2:
        return None
    if isinstance(input, Pending) and input.value is not None:
        input = input.value
    like = input.layer.x if isinstance(input, Pending) else of_members(input, level)
    if like is None:
        return None
    factors = weight, shift
    gamma, beta = (None if t is None else _numbers(t, level, len(like)) for t in factors)
    if not by_kernels(like, *(each for each in (gamma, beta) if each is not None)):
        return None
    if isinstance(input, Pending):
        return input.normalised(gamma, beta, how)
    with temporarily_clear_interpreter_stack():
        rows, order = as_rows(like)
        outputs = order.restored(norm(rows.contiguous(), gamma, beta, how))
    return functorch._add_batch_dim(outputs, 0, level)


def _numbers(numbers: Tensor, level: int, members: int) -> Tensor:
    """Numbers [M, C] of all members."""
    own = of_members(numbers, level)
    with temporarily_clear_interpreter_stack():
        return (numbers.expand(members, -1) if own is None else own).contiguous()


def _sum(input: Any, other: Any, *rest: Any, **named: Any) -> Tensor | None:
    """A sum of two tensors of the members, which may be normalised next."""
    if rest or named or not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return None
    if any(isinstance(each, Pending) and each.is_bare for each in (input, other)):
        return input + other  # the bias of one of them joins the sum
    input, other = computed((input, other))
    if input.ndim < 3 or input.shape != other.shape:
        return None
    level = functorch.maybe_current_level()
    first, second = of_members(input, level), of_members(other, level)
    if first is None or second is None or not by_kernels(first, second):
        return None
    with temporarily_clear_interpreter_stack():
        rows, order = as_rows(first)
        layer = Layer(rows.contiguous(), None, None, order, level, order.rows(second).contiguous())
    return Pending.of(layer)


def _multi_head(*arguments: Any, **named: Any) -> Any:
    with member_layers():
        return self_attention(*arguments, **named)


def _unbound(input: Tensor, dim: int = 0) -> tuple[Tensor, ...] | None:
    """The slices of a member's tensor along an axis."""
    x, level = _members(input)
    if x is None:
        return None
    with temporarily_clear_interpreter_stack():
        parts, whole = unbound(x, dim % input.ndim + 1), x.movedim(dim % input.ndim + 1, 0)
    slices = _parts(parts, level)
    mark_parts(slices, whole)
    return slices


def _chunks(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...] | None:
    """Equal parts along an axis; others are left to torch."""
    length = input.shape[dim]
    return None if length % chunks else _split(input, length // chunks, dim)


def _split(input: Tensor, size: Any, dim: int = 0) -> tuple[Tensor, ...] | None:
    """Parts of one size along an axis; others are left to torch."""
    length = input.shape[dim]
    if not isinstance(size, int):
        size = size[0] if len(set(size)) == 1 else 0
    if size <= 0 or length % size:
        return None
    x, level = _members(input)
    with temporarily_clear_interpreter_stack():
        parts = None if x is None else divided(x, size, dim % input.ndim + 1)
    return None if parts is None else _parts(parts, level)


def _members(input: Tensor) -> tuple[Tensor | None, int]:
    level = functorch.maybe_current_level()
    return of_members(computed(input), level), level


def _parts(parts: tuple[Tensor, ...], level: int) -> tuple[Tensor, ...]:
    return tuple(functorch._add_batch_dim(part, 0, level) for part in parts)


def _patches(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """A convolution that cuts an image into patches [B, C, ...] is a product of patches."""
    axes = weight.ndim - 2
    sides = tuple(weight.shape[2:])
    if input.ndim != axes + 2 or isinstance(padding, str):
        return None
    if Geometry.of(stride, padding, dilation, groups, axes) != Geometry.of(sides, 0, 1, 1, axes):
        return None
    if of_members(weight, functorch.maybe_current_level()) is None:
        return None
    x = computed(input)
    for axis, side in enumerate(sides, start=2):
        x = x.narrow(axis, 0, x.shape[axis] // side * side)
    for axis in reversed(range(axes)):  # [B, C, count, side, count, side, ...]
        x = x.unflatten(axis + 2, (-1, sides[axis]))
    counts, within = range(2, 2 * axes + 2, 2), range(3, 2 * axes + 3, 2)
    patches = x.permute(0, *counts, 1, *within).flatten(axes + 1)
    outputs = _linear(patches, weight.flatten(1), bias)
    return None if outputs is None else computed(outputs).movedim(-1, 1)


def _drawn(
    input: Tensor, p: float | Tensor = 0.5, *, generator: torch.Generator | None = None
) -> Tensor | None:
    """`Tensor.bernoulli_` with draws of every member, as stochastic depth asks for.

    They have no place in a tensor of one member, which becomes NaN: who reads it shall notice.
    """
    level = functorch.maybe_current_level()
    one = of_members(input, level) is None and input.is_floating_point()
    if not one or isinstance(p, Tensor) or generator is not None:
        return None
    draws = torch.rand(input.shape, device=input.device) < p
    input.fill_(torch.nan)
    return draws.to(input.dtype)


_REPLACED: dict[Callable, Callable[..., Any]] = {
    Tensor.bernoulli_: _drawn,
    F.linear: _linear,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.scaled_dot_product_attention: attend_folded,
    F.multi_head_attention_forward: _multi_head,
    torch.add: _sum,
    Tensor.add: _sum,
    Tensor.__add__: _sum,
    Tensor.__radd__: _sum,
    torch.unbind: _unbound,
    Tensor.unbind: _unbound,
    torch.chunk: _chunks,
    Tensor.chunk: _chunks,
    torch.split: _split,
    Tensor.split: _split,
    F.conv1d: _patches,
    F.conv2d: _patches,
    F.conv3d: _patches,
}
