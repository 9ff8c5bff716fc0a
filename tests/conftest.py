"""One thread, so that sums come in one order; double precision where a test asks for it."""

import os

# Also for the processes that tests start: two workers with two threads each wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from browser import browser  # noqa: F401
from page_runs import arrays, line_runs, picture_runs, readme, undrawn  # noqa: F401
from slow_tests import SLOW, SLOW_FILES
from warm import bare, warm  # noqa: F401

from shoal.engine.members.precision import full_precision

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what `make quick`, `make test` and `make gpu` choose by, before pytest chooses."""
    for item in items:
        reasons = [str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif")]
        if any("GPU" in reason for reason in reasons):
            item.add_marker(pytest.mark.gpu)
        if getattr(item, "originalname", None) in SLOW or item.path.stem in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") and changed_parameters(item) > 1:
            item.add_marker(pytest.mark.nightly)


def changed_parameters(item):
    """How many parameters of a case differ from those of the test's first case."""
    places = dict(item.callspec.indices) if hasattr(item, "callspec") else {}
    changed = 0
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        changed += any([places.pop(name.strip(), 0) for name in names])
    return changed + sum(place > 0 for place in places.values())


@pytest.fixture(autouse=True, scope="session")
def float32_is_float32():
    """Networks that a test calls itself have all digits on a GPU too."""
    with full_precision():
        yield


@pytest.fixture
def double():
    """New tensors and networks are float64 during the test."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
