"""Skips tests of kernels where Triton cannot run them, with the reason."""

import pytest
import torch


def runs_kernels(module):
    """The mark for tests of a module of kernels, which is None where Triton is missing."""
    if module is None:
        why = "Triton is not installed"
    elif not torch.cuda.is_available() and not module.triton.knobs.runtime.interpret:
        why = "needs a GPU, or TRITON_INTERPRET=1"
    else:
        why = ""
    return pytest.mark.skipif(bool(why), reason=why)
