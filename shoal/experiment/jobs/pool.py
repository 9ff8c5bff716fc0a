"""The pool: gives the cells of a grid to worker processes, and outlives any of them."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from shoal.core.errors import PeerLost, ShoalError, ShoalWarning
from shoal.core.formats import parse_json
from shoal.core.interruption import Interruption
from shoal.core.lock import FolderLock
from shoal.experiment.grid import Grid, GridPoint
from shoal.experiment.jobs.messages import cell_order, error_of, first_order
from shoal.training.provenance import COMMAND, command

__all__ = ["run_jobs"]

TRIES = 2
"""How many workers may die over a cell before it is given up."""

_PULSE = 0.2
_FAREWELL = 60.0

Inbox = queue.SimpleQueue[tuple["Worker", dict[str, Any] | None]]


def run_jobs(
    grid: Grid,
    jobs: int,
    after: Callable[[GridPoint], None] = lambda cell: None,
    *,
    threads: int = 1,
    debug: bool = False,
) -> dict[GridPoint, ShoalError]:
    """Train and judge what is not done yet in several processes; the numbers are those of one.

    Args:
        grid: what to run; it has been checked.
        jobs: how many processes, each with the data and, on a GPU, a context of its own.
        after: called when a run is done or given up.
        threads: CPU threads of each process.
        debug: let the processes write to standard error.

    Returns:
        The runs that came to nothing, and why.
    """
    with FolderLock(grid.folder), Interruption() as stop:
        pool = Pool(grid, jobs, after, threads, debug)
        try:
            while pool.workers:
                pool.attend(_PULSE)
                if stop.received is not None:
                    pool.dismiss()
                    stop.stop()
        finally:
            pool.kill()
    return pool.failed


class Pool:
    """Workers, the cells that wait for one, and what came of the others.

    Attributes:
        workers: those at work.
        waiting: cells that nobody has begun, in order.
        failed: cells that came to nothing, and why.
    """

    def __init__(
        self, grid: Grid, jobs: int, after: Callable[[GridPoint], None], threads: int, debug: bool
    ) -> None:
        self.grid, self.after, self.threads, self.debug = grid, after, threads, debug
        self.waiting = deque(grid.queue)
        self.failed: dict[GridPoint, ShoalError] = {}
        self.workers: list[Worker] = []
        self._inbox: Inbox = queue.SimpleQueue()
        self._deaths: dict[GridPoint, int] = {}
        for _ in range(min(jobs, len(self.waiting))):
            self._hire()

    def attend(self, seconds: float) -> None:
        """Hear one worker, or none within so many seconds."""
        try:
            worker, told = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        if worker not in self.workers:
            return
        if told is None:
            self._bury(worker)
        elif told["event"] == "ready":
            worker.ready = True
        elif told["event"] == "note":
            warnings.warn(told["text"], ShoalWarning, stacklevel=3)
        elif told["event"] == "stopped":
            raise error_of(told)
        elif told["event"] == "fault":
            raise RuntimeError(told["text"])
        else:
            self._close(worker, error_of(told) if told["event"] == "failed" else None)

    def dismiss(self) -> None:
        """Let every worker save what it has and end."""
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_FAREWELL)

    def kill(self) -> None:
        """End every worker at once."""
        for worker in self.workers:
            worker.process.kill()
            worker.end()

    def _hire(self) -> None:
        cell = self.waiting.popleft()
        worker = Worker(self.grid, cell, self._inbox, self.threads, self.debug)
        self.workers.append(worker)

    def _close(self, worker: "Worker", error: ShoalError | None) -> None:
        """A cell is done or has come to nothing; its worker takes the next, or leaves."""
        if error is not None:
            self.failed[worker.cell] = error
        self.after(worker.cell)
        if self.waiting:
            worker.give(self.waiting.popleft())
        else:
            self.workers.remove(worker)
            worker.end()

    def _bury(self, worker: "Worker") -> None:
        """A worker has died: another takes its place, and its cell goes on where it was."""
        self.workers.remove(worker)
        cell, how = worker.cell, _fate(worker.end())
        if not worker.ready:
            raise PeerLost(f"a worker could not begin: it {how}; run again with --debug to see why")
        self._deaths[cell] = self._deaths.get(cell, 0) + 1
        if self._deaths[cell] < TRIES:
            text = f"a worker {how} during {cell.name}, which another one goes on with"
            warnings.warn(text, ShoalWarning, stacklevel=4)
            self.waiting.appendleft(cell)
        else:
            self.failed[cell] = PeerLost(f"its worker {how}, as had the one before")
            self.after(cell)
        if self.waiting:
            self._hire()


class Worker:
    """One process, the cell it is at, and a thread that listens to it.

    It has a session of its own: Ctrl-C reaches the pool alone, which tells the workers.
    """

    def __init__(
        self, grid: Grid, cell: GridPoint, inbox: Inbox, threads: int, debug: bool
    ) -> None:
        self.cell, self.ready = cell, False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal.experiment.jobs.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if debug else subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=_environment(threads),
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._orders, told = self.process.stdin, self.process.stdout
        self._listener = threading.Thread(target=_listen, args=(self, told, inbox), daemon=True)
        self._listener.start()
        self._tell(first_order(grid, threads))
        self.give(cell)

    def give(self, cell: GridPoint) -> None:
        """Ask for one more run."""
        self.cell = cell
        self._tell(cell_order(cell))

    def end(self) -> int:
        """Close the pipe with the orders, whose end is the worker's; returns its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        status = self.process.wait()
        self._listener.join()
        return status

    def _tell(self, line: str) -> None:
        # Where it has died, its listener tells.
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self._orders, flush=True)


def _listen(worker: Worker, told: IO[str], inbox: Inbox) -> None:
    with told:
        for line in told:
            inbox.put((worker, parse_json(line)))
    inbox.put((worker, None))


def _fate(status: int) -> str:
    """How a worker ended.

    >>> _fate(-9)
    'was ended by SIGKILL, perhaps for want of memory'
    """
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")


def _environment(threads: int) -> dict[str, str]:
    """That of this process, where the worker also finds the package that is running here."""
    home = str(Path(__file__).resolve().parents[3])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        COMMAND: command(),
    }
