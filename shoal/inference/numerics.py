"""The types that a run calculates in, for as long as it lasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

__all__ = ["Computes", "calculating_in", "rough_products"]


class Computes(Protocol):
    """Networks whose type of calculation can be chosen."""

    @property
    def compute(self) -> torch.dtype | None:
        """Type the networks calculate in, when it is not that of the weights."""
        ...

    def compute_in(self, dtype: torch.dtype | None) -> object:
        """Calculate the networks in another type than that of the weights; None undoes it."""
        ...


@contextmanager
def calculating_in(precision: str | None, networks: Computes) -> Iterator[None]:
    """Networks in bfloat16, or everything in the type of the weights; TensorFloat only if asked.

    A GPU would otherwise convolve in TensorFloat, with three digits, under the name of float32.
    """
    matmul: Any = torch.backends.cuda.matmul
    convolution: Any = torch.backends.cudnn
    before, compute = (matmul.allow_tf32, convolution.allow_tf32), networks.compute
    matmul.allow_tf32 = convolution.allow_tf32 = precision == "tf32"
    networks.compute_in(torch.bfloat16 if precision == "bfloat16" else None)
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before
        networks.compute_in(compute)


@contextmanager
def rough_products(compute: torch.dtype | None) -> Iterator[None]:
    """A block in which single-precision products go through TensorFloat, if networks are rougher.

    TensorFloat keeps eleven bits of a number. What networks calculate in bfloat16 has eight, so
    that products of their results lose next to nothing by it, and are seven times faster.
    """
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = before or compute == torch.bfloat16
    try:
        yield
    finally:
        matmul.allow_tf32 = before
