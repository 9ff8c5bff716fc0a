"""Attention over short sequences by the kernels of `attention_kernels`, twice differentiable.

$$ O = P V, \\quad P = \\operatorname{softmax}(c\\, Q K^\\top + mask) $$

Queries are [B, heads, T, D], keys and values [B, heads, S, D]. Members are part of B.
"""

import importlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.engine.derivatives.demand import refuse_third
from shoal.engine.functorch import Operation
from shoal.engine.member_layers.backend import LOW_PRECISION, by_kernels

__all__ = ["attend", "takes_attention"]

LONGEST = 128
"""Tokens of a sequence, and numbers of a head, that fit into the registers of a program."""


def takes_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernels take this attention."""
    sizes = (*q.shape[-2:], k.shape[-2])
    alike = q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[-1] == k.shape[-1] == v.shape[-1]
    usual = q.ndim == 4 and alike and max(sizes) <= LONGEST and q.dtype in LOW_PRECISION
    return usual and by_kernels(q, k, v) and (mask is None or not mask.requires_grad)


def attend(
    parts: tuple[Tensor, ...],
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention [B, heads, T, D]; in memory, the heads of a token are side by side.

    Args:
        parts: queries, keys and values; or one tensor [3, B, heads, T, D] of all, whose gradient
            then comes as one tensor.
        mask: booleans (True where a query looks) or numbers that are added to the logits, of a
            shape that expands to [B, heads, T, S].
        causal: a query looks at no later key.
        scale: factor c of the logits; None for 1 / sqrt(D).
    """
    q, k, _ = _three(parts)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    dense = (_dense(each) for each in parts)
    return _Attention.apply(mask, _How(causal, factor), *dense)  # pyright: ignore


class _How(NamedTuple):
    causal: bool
    scale: float


class _Attention(Operation):
    """P V."""

    @staticmethod
    def forward(mask: Tensor | None, how: _How, *parts: Tensor) -> Tensor:
        q, k, v = _three(parts)
        out = _rows_of_heads(q)
        _launch("attend", [q, k, v], mask, how, [out], [out])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        mask, ctx.how, *parts = inputs
        ctx.save_for_backward(mask, *parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        mask, *parts = ctx.saved_tensors
        at_parts: Any = _AttentionBack.apply(mask, ctx.how, _dense(gradients[0]), *parts)
        return None, None, *at_parts


class _AttentionBack(Operation):
    """Gradients at queries, keys and values."""

    @staticmethod
    def forward(mask: Tensor | None, how: _How, g: Tensor, *parts: Tensor) -> tuple:
        q, k, v = _three(parts)
        at_parts = _like(parts)
        at_q, at_k, at_v = _three(at_parts)
        _launch("attend_back", [q, k, v], mask, how, [g, at_q, at_k, at_v], [g, at_q, at_k])
        return at_parts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        mask, ctx.how, *tensors = inputs
        ctx.save_for_backward(mask, *tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        refuse_third()
        mask, g, *parts = ctx.saved_tensors
        a, b, e = (_dense(each) for each in _three(cotangents))
        if b.stride() != e.stride():
            b, e = b.contiguous(), e.contiguous()
        three, at_parts = _three(tuple(parts)), _like(tuple(parts))
        at_g, (at_q, at_k, at_v) = _rows_of_heads(three[0]), _three(at_parts)
        tensors = [g, a, b, e, at_g, at_q, at_k, at_v]
        strided = [g, a, b, at_g, at_q, at_k]
        _launch("attend_twice", list(three), mask, ctx.how, tensors, strided)
        return None, None, at_g, *at_parts


def _launch(
    name: str,
    parts: list[Tensor],
    mask: Tensor | None,
    how: _How,
    more: list[Tensor],
    strided: list[Tensor],
) -> None:
    """Start a kernel with one program for every head of the batch.

    Args:
        name: of the kernel.
        parts: queries, keys and values.
        mask: [B, heads, T, S] or None.
        how: settings.
        more: further tensors.
        strided: those whose strides the kernel takes.
    """
    kernels: Any = importlib.import_module("shoal.engine.member_layers.attention_kernels")
    batch, heads, tokens, width = parts[0].shape
    sources = parts[1].shape[2]
    masked = 0 if mask is None else 1 if mask.dtype == torch.uint8 else 2
    steps = (0, 0, 0, 0) if mask is None else mask.stride()
    strides = [step for each in parts for step in each.stride()[:3]]
    beside = [step for each in strided for step in each.stride()[:3]]
    sides = {name: _block(size) for name, size in zip("TSD", (tokens, sources, width), strict=True)}
    large = max(sides["T"], sides["S"]) > 64
    getattr(kernels, name)[(batch * heads,)](
        *parts, parts[0] if mask is None else mask, *more, *strides, *steps, *beside, heads,
        tokens, sources, width, how.scale, MASKED=masked, CAUSAL=how.causal, **sides,
        num_warps=8 if large else 4,
    )  # fmt: skip


def _three(parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values."""
    return parts[0].unbind(0) if len(parts) == 1 else parts  # pyright: ignore


def _like(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Empty gradients; side by side for each token if there are as many keys as queries."""
    q, k, v = _three(parts)
    if q.shape != k.shape:
        return _rows_of_heads(q), _rows_of_heads(k), _rows_of_heads(v)
    batch, heads, tokens, width = q.shape
    whole = q.new_empty(batch, tokens, 3, heads, width).permute(2, 0, 3, 1, 4)
    return (whole,) if len(parts) == 1 else tuple(whole.unbind(0))


def _rows_of_heads(q: Tensor) -> Tensor:
    batch, heads, tokens, width = q.shape
    return q.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _dense(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _block(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
