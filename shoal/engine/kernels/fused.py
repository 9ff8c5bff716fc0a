"""Which tensors the kernels of whole stages serve: single precision on a GPU that has Triton.

Each of these kernels does what torch does with a dozen or more launches. They compute the same as
the formulas of the stages, to rounding; `ENABLED = False` selects the formulas.
"""

import warnings

import torch
from torch import Tensor

# The thread of a backward pass that starts with such a kernel has no context yet; torch makes one.
warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current")

try:
    from shoal.engine.kernels import (
        interaction_kernels,
        likelihood_kernels,
        noise_kernels,
        step_kernels,
    )
except Exception:  # Triton is missing or does not work
    interaction_kernels = likelihood_kernels = noise_kernels = step_kernels = None

__all__ = [
    "ENABLED",
    "interaction_kernels",
    "kernel_supports",
    "likelihood_kernels",
    "noise_kernels",
    "step_kernels",
]

ENABLED = True

DEVICES = ("cuda",)
"""Devices with kernels. Triton's interpreter, for tests, also takes tensors on the CPU."""


def kernel_supports(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors; compiled code has kernels of its own.

    >>> kernel_supports(torch.zeros(3))
    False
    """
    if not ENABLED or step_kernels is None or torch.compiler.is_compiling():
        return False
    return all(
        tensor.device.type in DEVICES and not tensor.requires_grad
        and (tensor.dtype == torch.float32 or not tensor.is_floating_point())
        for tensor in tensors
    )  # fmt: skip
