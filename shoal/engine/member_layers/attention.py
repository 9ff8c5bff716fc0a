"""Attention of all members at once: members are folded into the batch.

`vmap` would batch the inner steps of `scaled_dot_product_attention` one by one, and its fused
kernels then refuse the layout of the members' tensors. Here the operation is taken as a whole:
queries [M, B, heads, T, D] become [M B, heads, T, D], and the best kernel runs once. Short
sequences in low precision have kernels of their own on a GPU.

`F.multi_head_attention_forward` makes three dense copies of queries, keys and values, and as many
of their gradients. In `self_attention` they stay parts of one linear layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F

from shoal.engine.functorch import functorch, unwrapped
from shoal.engine.member_layers.parts import whole_of
from shoal.engine.member_layers.pending import computed
from shoal.engine.member_layers.short_attention import attend, takes_attention

__all__ = ["attend_folded", "folded_attention", "self_attention"]

_attend: Any = F.scaled_dot_product_attention


@contextmanager
def folded_attention() -> Iterator[None]:
    """A block in which attention folds the members of `vmap` into its batch.

    Layers of torch and of other libraries look the function up in `torch.nn.functional` when they
    are called, so replacing it there reaches all of them.
    """
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attend_folded
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def attend_folded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *settings: Any,
    **named: Any,
) -> Tensor:
    """Attention for batched tensors: unwrap, fold, attend, unfold, wrap."""
    query, key, value, attn_mask = computed((query, key, value, attn_mask))
    tensors = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    level = functorch.maybe_current_level()
    parts = [unwrapped(tensor, level) for tensor in tensors]
    sizes = {tensor.shape[at] for tensor, at in parts if at is not None}
    depth = query.ndim
    if not sizes or depth > 4:  # no members, or those of an outer `vmap`
        return _attend(query, key, value, attn_mask, *settings, **named)
    (members,) = sizes
    folded = [_fold(tensor, at, members, depth) for tensor, at in parts[:3]]
    mask = None if attn_mask is None else _mask(*parts[3], members, depth, len(folded[0]))
    whole = whole_of((query, key, value))
    outputs = _short((folded[0], folded[1], folded[2], mask), whole, *settings, **named)
    if outputs is None:
        # The folded tensors are no longer those of `vmap`, which would draw masks for M of them.
        drops = (settings[0] if settings else named.get("dropout_p", 0.0)) > 0
        with temporarily_clear_interpreter_stack() if drops else nullcontext():
            outputs = _attend(*folded, mask, *settings, **named)
    if depth == 4:
        outputs = outputs.unflatten(0, (members, -1))
    return functorch._add_batch_dim(outputs, 0, level)


def _short(
    folded: tuple[Tensor, Tensor, Tensor, Tensor | None],
    whole: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention by the kernels for short sequences; None where they do not take it.

    Args:
        folded: folded queries, keys and values, and the mask.
        whole: queries, keys and values as one tensor [3, M, B, heads, T, D], if they are.
        dropout_p: as in torch, like the rest.
        is_causal: as in torch.
        scale: as in torch.
        enable_gqa: as in torch.
    """
    *parts, mask = folded
    if dropout_p > 0 or enable_gqa or not takes_attention(*folded):
        return None
    with temporarily_clear_interpreter_stack():
        if whole is not None and whole.ndim == 6:
            parts = [whole.flatten(1, 2)]
        return attend(tuple(parts), mask, is_causal, scale)  # pyright: ignore


def _fold(tensor: Tensor, at: int | None, members: int, depth: int) -> Tensor:
    """[M, B, heads, T, D] as [M B, heads, T, D]; tensors without a batch get M as their batch."""
    own = tensor.expand(members, *tensor.shape) if at is None else tensor.movedim(at, 0)
    return own.flatten(0, 1) if depth == 4 else own


def _mask(mask: Tensor, at: int | None, members: int, depth: int, rows: int) -> Tensor:
    """A mask [..., T, S] that fits the folded batch of `rows`."""
    if at is None and (mask.ndim < depth or mask.shape[0] == 1):
        return mask  # the same for all members and data points
    own = mask.expand(members, *mask.shape) if at is None else mask.movedim(at, 0)
    while own.ndim < depth + 1:
        own = own.unsqueeze(1)
    if depth < 4:
        return own
    return own.expand(members, rows // members, *own.shape[2:]).flatten(0, 1)


def self_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **named: Any,
) -> tuple[Tensor, None] | None:
    """Outputs [T, B, E] for tokens [T, B, E]; None for what only the function of torch does."""
    named.pop("average_attn_weights", None)
    unusual = [t for t in (bias_k, bias_v, *named.values()) if t is not None and t is not False]
    alone = query is key and key is value and query.ndim == 3
    if not alone or unusual or need_weights or add_zero_attn or in_proj_weight is None:
        return None
    if is_causal and attn_mask is None:  # torch says what is wrong
        return None
    # torch takes the word of `is_causal` for the mask unless there is padding.
    is_causal = is_causal and key_padding_mask is None
    attn_mask = None if is_causal else attn_mask
    batch = query.shape[1]
    parts = F.linear(query, in_proj_weight, in_proj_bias).unflatten(-1, (3, num_heads, -1))
    # [T, B, 3, heads, D] as three tensors [B, heads, T, D]
    parts = parts.permute(2, 1, 3, 0, 4).unbind(0)
    mask = _logit_mask(attn_mask, key_padding_mask, batch, query.dtype)
    dropped = dropout_p if training else 0.0
    q, k, v = parts
    seen = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal)
    seen = seen.permute(2, 0, 1, 3).flatten(2)
    return F.linear(seen, out_proj_weight, out_proj_bias), None


def _logit_mask(
    mask: Tensor | None, padding: Tensor | None, batch: int, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the logits [B or 1, heads or 1, T, S]; True in torch's masks hides a key."""
    added = None
    if mask is not None:
        added = _added(mask, dtype)
        added = added.unflatten(0, (batch, -1)) if added.ndim == 3 else added[None, None]
    if padding is not None:
        hidden = _added(padding, dtype)[:, None, None, :]
        added = hidden if added is None else added + hidden
    return added


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
