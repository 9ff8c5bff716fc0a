"""The cells of a study in several processes, as long as there is time."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any


def finished(
    cells: Iterable[tuple],
    act: Callable[..., Any],
    jobs: int,
    within: float,
    prepare: Callable[..., None] | None = None,
    given: tuple = (),
) -> Iterator[tuple[tuple, Any]]:
    """Each cell with `act(*cell)`, when it ends.

    No cell starts that would end after `within` seconds, by the longest cell so far. A cell that
    fails does not stop the others: its error is printed, and the same command retries it.

    Args:
        cells: arguments of `act`.
        act: computes a cell; a function of a module.
        jobs: number of processes.
        within: seconds for all cells.
        prepare: called once in every process.
        given: arguments of `prepare`.
    """
    begun, longest, missing = time.monotonic(), 0.0, list(cells)
    running: dict[Future, tuple[tuple, float]] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare, given) as pool:
        while missing or running:
            while missing and len(running) < jobs:
                if time.monotonic() - begun + longest > within:
                    missing = []
                    break
                cell = missing.pop(0)
                running[pool.submit(act, *cell)] = cell, time.monotonic()
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                cell, started = running.pop(future)
                longest = max(longest, time.monotonic() - started)
                try:
                    result = future.result()
                except Exception:
                    print(*cell, "failed", flush=True)
                    traceback.print_exc()
                    continue
                yield cell, result
