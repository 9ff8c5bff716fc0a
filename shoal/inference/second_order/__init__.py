"""Derivatives of networks with convolutions, above all the second, by kernels and closed forms."""

from shoal.inference.second_order.mode import fast_second_order, fused_layers

__all__ = ["fast_second_order", "fused_layers"]
