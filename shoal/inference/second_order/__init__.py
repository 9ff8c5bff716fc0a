"""Second derivatives of networks with convolutions, by fast kernels and closed forms."""

from shoal.inference.second_order.mode import fast_second_order

__all__ = ["fast_second_order"]
