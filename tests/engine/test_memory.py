"""Freed memory stays with the process, so that steps do not wait for pages."""

import ctypes
import platform
import subprocess
import sys

import pytest

knows = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallinfo2")
knows = knows and platform.machine() == "x86_64"  # torch on ARM brings mimalloc

# A block that glibc takes from the system for itself alone goes back as soon as it is freed.
MEGABYTES = """
import ctypes, sys, torch
from shoal.engine.resources.memory import keep_freed

class Info(ctypes.Structure):
    _fields_ = [(f"field{i}", ctypes.c_size_t) for i in range(10)]

info = ctypes.CDLL(None).mallinfo2
info.restype = Info
if sys.argv[1] == "kept":
    keep_freed()
before = info().field4  # bytes in such blocks
block = torch.ones(6_000_000)
print(round((info().field4 - before) / 1e6))
"""


@pytest.mark.skipif(not knows, reason="other allocators have rules of their own")
@pytest.mark.parametrize(("how", "alone"), [("kept", 0), ("not", 24)])
def test_a_large_block_comes_from_what_the_process_keeps(how, alone):
    asked = [sys.executable, "-c", MEGABYTES, how]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert int(done.stdout) == alone
