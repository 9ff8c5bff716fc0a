"""Derivatives of networks with convolutions, above all the second, by kernels and closed forms."""

from shoal.engine.derivatives.shared_statistics import forward_with_rows
from shoal.engine.derivatives.torch_overrides import fast_second_order, fused_layers, second_order

__all__ = ["fast_second_order", "forward_with_rows", "fused_layers", "second_order"]
