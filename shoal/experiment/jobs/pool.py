"""The pool: distributes grid points and GPUs to worker processes, and replaces dead workers."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from shoal.core.errors import PeerLost, RunFailed, ShoalError, ShoalWarning
from shoal.core.interruption import Interruption
from shoal.core.storage.formats import parse_json
from shoal.core.storage.lock import FolderLock
from shoal.experiment.grid import Attempts, Grid, GridPoint
from shoal.experiment.jobs.messages import error_of, first_order, point_order
from shoal.training.folder.provenance import COMMAND, command

__all__ = ["VISIBLE", "Gpus", "run_jobs", "visible_gpus"]


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(
    device: str | None, environment: Mapping[str, str] = os.environ, count: int | None = None
) -> tuple[str, ...]:
    """The GPUs that jobs share out; none if the config names another device, or one GPU.

    >>> visible_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "2,5"})
    ('2', '5')
    >>> visible_gpus("cuda", {}, count=3)
    ('0', '1', '2')
    >>> visible_gpus("cuda:1", {}, count=3)
    ()

    Args:
        device: the device of the config.
        environment: environment variables of this process.
        count: number of GPUs of the machine; None counts them.
    """
    if device != "cuda":
        return ()
    if VISIBLE in environment:
        names = tuple(word.strip() for word in environment[VISIBLE].split(",") if word.strip())
    else:
        names = tuple(map(str, range(torch.cuda.device_count() if count is None else count)))
    return names if len(names) > 1 else ()


class Gpus:
    """Hands every new job the GPU with the fewest jobs, the first of equals.

    >>> gpus = Gpus(("0", "1"))
    >>> [gpus.take() for _ in range(3)]
    ['0', '1', '0']
    >>> gpus.give_back("1")
    >>> gpus.take()
    '1'

    Args:
        names: GPUs, as `CUDA_VISIBLE_DEVICES` names them; without any, jobs choose nothing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._jobs = dict.fromkeys(names, 0)

    def take(self) -> str | None:
        """The GPU of one more job; None if the job keeps the devices of this process."""
        if not self._jobs:
            return None
        name = min(self._jobs, key=lambda each: self._jobs[each])
        self._jobs[name] += 1
        return name

    def give_back(self, name: str | None) -> None:
        """A job on this GPU has ended."""
        if name is not None:
            self._jobs[name] -= 1


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
    retries: int = 1,
) -> dict[GridPoint, ShoalError]:
    """Train and evaluate unfinished runs in several processes; results equal those of one process.

    Args:
        grid: the runs, already checked.
        jobs: number of processes, each with its own data and, on a GPU, its own context.
        after: called after each run, finished or failed.
        threads: CPU threads per process.
        debug: let the processes write to standard error.
        retries: further attempts at a failed run, as `Attempts` counts them.

    Returns:
        The failed runs with their errors.
    """
    with FolderLock(grid.folder), Interruption() as stop:
        start = partial(Worker, grid, threads=threads, debug=debug)
        pool = Pool(grid, jobs, after, start, Attempts(retries))
        try:
            while pool.workers:
                pool.attend(_PULSE)
                if stop.received is not None:
                    pool.dismiss()
                    stop.stop()
        finally:
            pool.kill()
    return pool.attempts.failed


class Pool:
    """Workers and waiting grid points.

    Args:
        grid: the runs.
        jobs: largest number of workers.
        after: called after each run, finished or failed.
        start: starts a worker with a grid point, an inbox and a GPU.
        attempts: decides which failed runs are tried again.

    Attributes:
        workers: active workers.
        waiting: grid points that no worker has started, in order.
    """

    def __init__(
        self,
        grid: Grid,
        jobs: int,
        after: Callable[[GridPoint], None],
        start: Callable[[GridPoint, Inbox, str | None], "Worker"],
        attempts: Attempts,
    ) -> None:
        self.after, self.attempts, self._start = after, attempts, start
        self.waiting = deque(grid.queue)
        self.workers: list[Worker] = []
        self._inbox: Inbox = queue.SimpleQueue()
        self._gpus = Gpus(visible_gpus(grid.config.device))
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
            worker.fault = message["text"]
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
        gpu = self._gpus.take()
        self.workers.append(self._start(self.waiting.popleft(), self._inbox, gpu))

    def _leave(self, worker: "Worker") -> int:
        self.workers.remove(worker)
        self._gpus.give_back(worker.gpu)
        return worker.end()

    def _close(self, worker: "Worker", error: ShoalError | None) -> None:
        """A run has finished or failed; its worker takes the next grid point, or ends."""
        self._settle(worker.point, error)
        if self.waiting:
            worker.give(self.waiting.popleft())
        else:
            self._leave(worker)

    def _settle(self, point: GridPoint, error: ShoalError | None) -> None:
        if error is not None and self.attempts.again(point, error):
            self.waiting.append(point)
        else:
            self.after(point)

    def _replace(self, worker: "Worker") -> None:
        """A worker has died: another worker continues its run."""
        how = _ending(self._leave(worker))
        if not worker.ready:
            why = worker.fault or f"it {how}"
            raise PeerLost(f"a worker could not start: {why}; run again with --debug to see why")
        lost = PeerLost(f"its worker {how}") if worker.fault is None else RunFailed(worker.fault)
        self._settle(worker.point, lost)
        if self.waiting:
            self._hire()


class Worker:
    """One process, its current grid point, and a thread that reads its messages.

    The process has its own session: Ctrl-C reaches the pool only, which then stops the workers.

    Attributes:
        point: the current grid point.
        gpu: the only GPU that the process sees; None if it sees those of this process.
        ready: whether the data are loaded.
        fault: the unexpected error that ends the process.
    """

    def __init__(
        self,
        grid: Grid,
        point: GridPoint,
        inbox: Inbox,
        gpu: str | None,
        *,
        threads: int,
        debug: bool,
    ) -> None:
        self.point, self.gpu = point, gpu
        self.ready = False
        self.fault: str | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal.experiment.jobs.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if debug else subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=_environment(threads, gpu),
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


def _environment(threads: int, gpu: str | None) -> dict[str, str]:
    """The environment of this process, with the path of the running package."""
    home = str(Path(__file__).resolve().parents[3])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    seen = {} if gpu is None else {VISIBLE: gpu}
    return (
        os.environ
        | seen
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
            COMMAND: command(),
        }
    )
