"""Layers of transformers, for the tensors of all members at once."""

from shoal.engine.member_layers.attention import folded_attention
from shoal.engine.member_layers.mode import member_layers

__all__ = ["folded_attention", "member_layers"]
