"""Which tensors the kernels of member-wise layers take."""

import functools
import importlib.util
import os

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["LOW_PRECISION", "by_kernels", "takes_device"]

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _interpreted() -> bool:
    """Triton's interpreter runs kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


LOW_PRECISION = _TYPES if _interpreted() else (torch.bfloat16, torch.float16)
"""Types of products inside kernels; in float32 the libraries of the GPU are as fast."""


def takes_device(device: torch.device) -> bool:
    """Whether Triton runs kernels on this device."""
    return (device.type == "cuda" or _interpreted()) and _has_triton()


def by_kernels(*tensors: Tensor) -> bool:
    """Whether Triton takes these tensors: real data on a GPU, of one type."""
    first = tensors[0]
    if not takes_device(first.device):
        return False
    same = all(each.dtype == first.dtype for each in tensors)
    return same and first.dtype in _TYPES and not any(isinstance(t, FakeTensor) for t in tensors)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
