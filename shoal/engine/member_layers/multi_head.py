"""`F.multi_head_attention_forward` of one sequence with itself, without copies of its parts.

The function of torch makes three dense copies of queries, keys and values, and as many of their
gradients. Here they stay parts of one linear layer.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["self_attention"]


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
    mask = _mask(attn_mask, key_padding_mask, batch, query.dtype)
    dropped = dropout_p if training else 0.0
    q, k, v = parts
    seen = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal)
    seen = seen.permute(2, 0, 1, 3).flatten(2)
    return F.linear(seen, out_proj_weight, out_proj_bias), None


def _mask(
    mask: Tensor | None, padding: Tensor | None, batch: int, dtype: torch.dtype
) -> Tensor | None:
    """What is added to the logits [B or 1, heads or 1, T, S]; True in torch's masks hides a key."""
    found = None
    if mask is not None:
        found = _added(mask, dtype)
        found = found.unflatten(0, (batch, -1)) if found.ndim == 3 else found[None, None]
    if padding is not None:
        hidden = _added(padding, dtype)[:, None, None, :]
        found = hidden if found is None else found + hidden
    return found


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
