"""Derivatives of networks with convolutions, above all the second, by kernels and closed forms."""

from shoal.inference.second_order.mode import fast_second_order, fused_layers
from shoal.inference.second_order.shared_statistics import with_part

__all__ = ["fast_second_order", "fused_layers", "with_part"]
