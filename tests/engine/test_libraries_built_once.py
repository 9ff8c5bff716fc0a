"""What launches kernels is built once, whichever thread needs it."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from shoal.engine.kernels.builds import libraries_built_once


def test_threads_wait_for_the_same_library_and_not_for_others():
    busy, most, others = Counter(), Counter(), threading.Barrier(2)

    def compiled(src, name):
        busy[src] += 1
        most[src] = max(most[src], busy[src])
        if src == "same":
            time.sleep(0.005)  # for a thread that does not wait its turn
        else:
            others.wait(60)
        busy[src] -= 1
        return src, name

    backend = SimpleNamespace(compile_module_from_src=compiled)
    with libraries_built_once(backend), ThreadPoolExecutor(12) as pool:
        asked = ["same"] * 10 + ["one", "other"]
        call = lambda src: backend.compile_module_from_src(src=src, name="launcher")  # noqa: E731
        assert list(pool.map(call, asked)) == [(src, "launcher") for src in asked]
    assert backend.compile_module_from_src is compiled
    assert most == {"same": 1, "one": 1, "other": 1}
