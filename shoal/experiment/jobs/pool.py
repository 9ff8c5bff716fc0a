"""The pool: distributes grid points to worker processes, and replaces workers that die."""

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
from shoal.experiment.jobs.messages import error_of, first_order, point_order
from shoal.training.provenance import COMMAND, command

__all__ = ["run_jobs"]

TRIES = 2
"""Number of workers that may die on a grid point before it counts as failed."""

_PULSE = 0.2
_FAREWELL = 60.0

Inbox = queue.SimpleQueue[tuple["Worker", dict[str, Any] | None]]


def run_jobs(
    grid: Grid,
    jobs: int,
    after: Callable[[GridPoint], None] = lambda point: None,
    *,
    threads: int = 1,
    debug: bool = False,
) -> dict[GridPoint, ShoalError]:
    """Train and evaluate unfinished runs in several processes; results equal those of one process.

    Args:
        grid: the runs, already checked.
        jobs: number of processes, each with its own data and, on a GPU, its own context.
        after: called after each run, finished or failed.
        threads: CPU threads per process.
        debug: let the processes write to standard error.

    Returns:
        The failed runs with their errors.
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
    """Workers, waiting grid points, and failed grid points.

    Attributes:
        workers: active workers.
        waiting: grid points that no worker has started, in order.
        failed: failed grid points with their errors.
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
        """Handle one message of a worker; wait at most so many seconds."""
        try:
            worker, message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return
        if worker not in self.workers:
            return
        if message is None:
            self._replace(worker)
        elif message["event"] == "ready":
            worker.ready = True
        elif message["event"] == "note":
            warnings.warn(message["text"], ShoalWarning, stacklevel=3)
        elif message["event"] == "stopped":
            raise error_of(message)
        elif message["event"] == "fault":
            raise RuntimeError(message["text"])
        else:
            self._close(worker, error_of(message) if message["event"] == "failed" else None)

    def dismiss(self) -> None:
        """Let every worker save its run and end."""
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
        point = self.waiting.popleft()
        worker = Worker(self.grid, point, self._inbox, self.threads, self.debug)
        self.workers.append(worker)

    def _close(self, worker: "Worker", error: ShoalError | None) -> None:
        """A run has finished or failed; its worker takes the next grid point, or ends."""
        if error is not None:
            self.failed[worker.point] = error
        self.after(worker.point)
        if self.waiting:
            worker.give(self.waiting.popleft())
        else:
            self.workers.remove(worker)
            worker.end()

    def _replace(self, worker: "Worker") -> None:
        """A worker has died: another worker continues its run."""
        self.workers.remove(worker)
        point, how = worker.point, _ending(worker.end())
        if not worker.ready:
            raise PeerLost(f"a worker could not start: it {how}; run again with --debug to see why")
        self._deaths[point] = self._deaths.get(point, 0) + 1
        if self._deaths[point] < TRIES:
            text = f"a worker {how} during {point.name}; another worker continues the run"
            warnings.warn(text, ShoalWarning, stacklevel=4)
            self.waiting.appendleft(point)
        else:
            self.failed[point] = PeerLost(f"its worker {how}, like the worker before")
            self.after(point)
        if self.waiting:
            self._hire()


class Worker:
    """One process, its current grid point, and a thread that reads its messages.

    The process has its own session: Ctrl-C reaches the pool only, which then stops the workers.
    """

    def __init__(
        self, grid: Grid, point: GridPoint, inbox: Inbox, threads: int, debug: bool
    ) -> None:
        self.point, self.ready = point, False
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
        self._orders, messages = self.process.stdin, self.process.stdout
        self._listener = threading.Thread(target=_listen, args=(self, messages, inbox), daemon=True)
        self._listener.start()
        self._send(first_order(grid, threads))
        self.give(point)

    def give(self, point: GridPoint) -> None:
        """Request one more run."""
        self.point = point
        self._send(point_order(point))

    def end(self) -> int:
        """Close the pipe of orders, which ends the worker, and return its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()
        status = self.process.wait()
        self._listener.join()
        return status

    def _send(self, line: str) -> None:
        # If the worker has died, its listener reports it.
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self._orders, flush=True)


def _listen(worker: Worker, messages: IO[str], inbox: Inbox) -> None:
    with messages:
        for line in messages:
            inbox.put((worker, parse_json(line)))
    inbox.put((worker, None))


def _ending(status: int) -> str:
    """How a worker ended.

    >>> _ending(-9)
    'was ended by SIGKILL, perhaps for lack of memory'
    """
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")


def _environment(threads: int) -> dict[str, str]:
    """The environment of this process, with the path of the running package."""
    home = str(Path(__file__).resolve().parents[3])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        COMMAND: command(),
    }
