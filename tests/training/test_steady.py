"""Same seed, same machine, same bits; and a long run takes no more memory than a short one.

`python tests/reliability.py determinism memory` makes the long runs.
"""

from pathlib import Path

import pytest
from steady_runs import ENGINES, digest, digest_elsewhere, memory_of

from shoal.interaction.methods import METHODS


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["ensemble", "kde", "f-kde", "svgd", "forde"])
def test_a_run_repeated_has_the_same_bits(method, engine):
    assert digest(method, engine) == digest(method, engine)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_run_with_another_seed_has_other_bits(method):
    assert digest(method, "auto") != digest(method, "auto", seed=1)


@pytest.mark.slow
def test_another_process_with_other_hashes_has_the_same_bits():
    assert digest_elsewhere("f-kde", "vmap", hash_seed=1) == digest("f-kde", "vmap")


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is not listed here")
def test_two_thousand_steps_take_no_memory():
    found = memory_of(2000)
    # The first steps fill the allocator of torch; a leak of one batch a step would be 5 MB.
    assert found[-1][1] - found[1][1] < 3, found
