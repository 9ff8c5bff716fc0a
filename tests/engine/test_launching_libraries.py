"""What launches kernels is compiled and loaded by several threads at the same time."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest

from shoal.engine.kernels.builds import libraries_apart


@pytest.fixture
def triton():
    """Stands in for the modules of Triton, with what Python does to libraries of one name."""
    shared, busy, most, others = ModuleType("launcher"), Counter(), Counter(), threading.Barrier(2)

    def load(name, path):
        shared.launch = path
        time.sleep(0.002)  # for a thread that does not wait its turn
        return shared

    def compiled(src, name):
        busy[src] += 1
        most[src] = max(most[src], busy[src])
        if src in ("one", "other"):
            others.wait(60)  # different libraries are compiled at the same time
        module = modules._load_module_from_path(name, f"{src}.so")
        busy[src] -= 1
        return module

    modules = SimpleNamespace(_load_module_from_path=load, compile_module_from_src=compiled)
    modules.plain, modules.most = (load, compiled), most
    return modules


def test_every_thread_gets_the_library_that_it_asked_for(triton):
    asked = ["same"] * 6 + ["one", "other"] + [f"number {i}" for i in range(20)]

    def launcher(src):
        return triton.compile_module_from_src(src=src, name="launcher").launch

    with libraries_apart(triton, triton), ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(launcher, asked)) == [f"{src}.so" for src in asked]
    assert (triton._load_module_from_path, triton.compile_module_from_src) == triton.plain
    assert set(triton.most.values()) == {1}
