"""The types that a run calculates in, for as long as it lasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shoal.inference.ensemble import Ensemble

__all__ = ["calculating_in"]


@contextmanager
def calculating_in(precision: str | None, ensemble: Ensemble) -> Iterator[None]:
    """Networks in bfloat16, or everything in the type of the weights; TensorFloat only if asked.

    A GPU would otherwise convolve in TensorFloat, with three digits, under the name of float32.
    """
    matmul: Any = torch.backends.cuda.matmul
    convolution: Any = torch.backends.cudnn
    before, compute = (matmul.allow_tf32, convolution.allow_tf32), ensemble.groups[0].compute
    matmul.allow_tf32 = convolution.allow_tf32 = precision == "tf32"
    ensemble.compute_in(torch.bfloat16 if precision == "bfloat16" else None)
    try:
        yield
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before
        ensemble.compute_in(compute)
