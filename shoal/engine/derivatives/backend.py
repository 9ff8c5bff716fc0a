"""Where the arithmetic of layers runs: kernels of Triton on a GPU, else operations of torch."""

import functools
import importlib
import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shoal.engine.derivatives import affine_formulas, formulas
from shoal.engine.derivatives.layout import CHANNELS_LAST
from shoal.engine.functorch import functorch

__all__ = [
    "TYPES",
    "arithmetic",
    "by_kernels",
    "interpreted",
    "is_mapped",
    "launchers",
    "takes_device",
]


def arithmetic(x: Tensor, layer: str) -> ModuleType:
    """Functions of a layer for its input: its formulas, or those that start its kernels.

    Args:
        x: the input.
        layer: `batchnorm` or `affine`.
    """
    if by_kernels(x):
        return launchers(layer)
    return formulas if layer == "batchnorm" else affine_formulas


def by_kernels(x: Tensor) -> bool:
    """Whether Triton takes it: real data on a GPU, with the channels of images or videos last.

    The kernels go through memory row by row. Tensors that are mapped by `vmap` or merely traced
    have no memory to go through, and images with channels first would have to be turned.
    """
    if not takes_device(x.device) or x.dtype not in TYPES:
        return False
    if isinstance(x, FakeTensor) or is_mapped():
        return False
    if x.ndim in CHANNELS_LAST:
        return x.is_contiguous(memory_format=CHANNELS_LAST[x.ndim])
    return x.ndim == 2 and x.is_contiguous()


def takes_device(device: torch.device) -> bool:
    """Whether Triton runs kernels on this device."""
    return (device.type == "cuda" or interpreted()) and _has_triton()


def is_mapped() -> bool:
    """Whether this happens within `vmap` or another transform of `torch.func`."""
    return functorch.peek_interpreter_stack() is not None


TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of numbers that kernels take."""


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Triton's interpreter runs kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def launchers(layer: str) -> ModuleType:
    """The functions that start the kernels of a layer."""
    return importlib.import_module(f"shoal.engine.derivatives.launch_{layer}_kernels")
