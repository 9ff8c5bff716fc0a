"""Which tensors the kernels of member-wise layers take."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shoal.engine.derivatives.backend import TYPES, interpreted, takes_device

__all__ = ["LOW_PRECISION", "by_kernels"]

LOW_PRECISION = TYPES if interpreted() else (torch.bfloat16, torch.float16)
"""Types of products inside kernels; in float32 the libraries of the GPU are as fast."""


def by_kernels(*tensors: Tensor) -> bool:
    """Whether Triton takes these tensors: real data on a GPU, of one type.

    Unlike layers of images, these are called with tensors that `vmap` has unwrapped.
    """
    first = tensors[0]
    same = all(each.dtype == first.dtype for each in tensors)
    real = not any(isinstance(each, FakeTensor) for each in tensors)
    return takes_device(first.device) and first.dtype in TYPES and same and real
