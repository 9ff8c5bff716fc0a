"""Attention of all members at once: members are folded into the batch.

`vmap` would batch the inner steps of `scaled_dot_product_attention` one by one, and its fused
kernels then refuse the layout of the members' tensors. Here the operation is taken as a whole:
queries [M, B, heads, T, D] become [M B, heads, T, D], and the best kernel runs once. Short
sequences in low precision have kernels of their own on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import functional as F

from shoal.engine.member_layers.parts import whole_of
from shoal.engine.member_layers.short_attention import attend, takes_attention
from shoal.engine.members.layers import functorch, unwrapped

__all__ = ["attend_folded", "folded_attention"]

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
    given = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    level = functorch.maybe_current_level()
    parts = [unwrapped(tensor, level) for tensor in given]
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
        outputs = _attend(*folded, mask, *settings, **named)
    if depth == 4:
        outputs = outputs.unflatten(0, (members, -1))
    return functorch._add_batch_dim(outputs, 0, level)


def _short(
    given: tuple[Tensor, Tensor, Tensor, Tensor | None],
    whole: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Attention by the kernels for short sequences; None where they do not take it.

    Args:
        given: folded queries, keys and values, and the mask.
        whole: queries, keys and values as one tensor [3, M, B, heads, T, D], if they are.
        dropout_p: as in torch, like the rest.
        is_causal: as in torch.
        scale: as in torch.
        enable_gqa: as in torch.
    """
    *parts, mask = given
    if dropout_p > 0 or enable_gqa or not takes_attention(*given):
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
