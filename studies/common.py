"""What the studies share: cells in several processes, own batches, and columns of tables."""

import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple

import shoal

__all__ = ["Column", "finished", "fit_apart"]


class Column(NamedTuple):
    """A metric, its title, its unit as a factor, and its digits."""

    metric: str
    title: str
    scale: float = 1.0
    digits: int = 3


def finished(
    cells: Iterable[tuple],
    act: Callable[..., Any],
    jobs: int,
    within: float,
    prepare: Callable[..., None] | None = None,
    given: tuple = (),
    kind: Callable[[tuple], Hashable] = lambda cell: None,
) -> Iterator[tuple[tuple, Any]]:
    """Each cell with `act(*cell)`, when it ends.

    No cell starts that would end after `within` seconds, by the longest cell of its kind so far. A
    cell that fails does not stop the others: its error is printed, and the same command retries it.

    Args:
        cells: arguments of `act`.
        act: computes a cell; a function of a module.
        jobs: number of processes.
        within: seconds for all cells.
        prepare: called once in every process.
        given: arguments of `prepare`.
        kind: cells of one kind take about the same time.
    """
    begun, longest, missing = time.monotonic(), dict[Hashable, float](), list(cells)
    running: dict[Future, tuple[tuple, float]] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare, given) as pool:
        while missing or running:
            while missing and len(running) < jobs:
                cell = missing.pop(0)
                if time.monotonic() - begun + longest.get(kind(cell), 0.0) <= within:
                    running[pool.submit(act, *cell)] = cell, time.monotonic()
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                cell, started = running.pop(future)
                took = time.monotonic() - started
                longest[kind(cell)] = max(longest.get(kind(cell), 0.0), took)
                try:
                    result = future.result()
                except Exception:
                    print(*cell, "failed", flush=True)
                    traceback.print_exc()
                    continue
                yield cell, result


def fit_apart(start: shoal.Ensemble, data: Any, seed: int, **options: Any) -> shoal.Run:
    """Train each member in a run of its own, so that its batches have an order of their own.

    The run has all members, and the history of the first.
    """
    runs = [
        shoal.fit(start.slice_members(i, i + 1), data, seed=1000 * (seed + 1) + i, **options)
        for i in range(start.members)
    ]
    networks = [run.ensemble.member(0) for run in runs]
    return replace(runs[0], ensemble=shoal.Ensemble.of(networks))
