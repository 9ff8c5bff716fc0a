"""Freed memory stays with the process, so that steps do not wait for pages."""

import platform
import subprocess
import sys

import pytest

glibc = sys.platform == "linux" and platform.libc_ver()[0] == "glibc"

# Steps of 25 MB, more than 6,000 pages; in the first few, blocks find their places.
STEPS = """
import resource, torch
from shoal.training.reuse import keep_freed

def step():
    return [torch.ones(1_600_000) for _ in range(4)]

keep_freed()
for _ in range(6):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not glibc, reason="other C libraries have rules of their own")
def test_what_is_freed_is_there_to_be_allocated_again():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True)
    assert int(done.stdout) < 1_000
