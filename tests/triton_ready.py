"""Marks of tests that need a GPU or Triton, which skip them with the reason where there is none.

`make gpu` runs these tests: the mark `gpu` goes with every reason here (see conftest.py).
"""

import importlib.util

import pytest
import torch

__all__ = ["needs_gpu", "needs_triton", "runs_kernels"]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, on a GPU or interpreted"
)


def runs_kernels(module):
    """The mark for tests of a module of kernels, which is None where Triton is missing."""
    absent = module is None or not (
        torch.cuda.is_available() or module.triton.knobs.runtime.interpret
    )
    return pytest.mark.skipif(absent, reason="needs Triton and a GPU, or TRITON_INTERPRET=1")
