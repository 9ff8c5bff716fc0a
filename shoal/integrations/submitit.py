"""Grids on a cluster: every run is a job of `submitit`, on SLURM or, for a trial, on this machine.

A job trains and evaluates one grid point in its run folder. The folder survives a kill, so a job
that is preempted or out of time is queued again and resumes. The state of a grid is in files: the
scores of a run mark completion, `jobs/NAME.json` holds the error of a failed run, and
`jobs/submitted.json` the numbers of submitted jobs. Whoever types the same command again
therefore finds the jobs that still run.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.core.display.progress import notice
from shoal.core.errors import ConfigError, PeerLost, ShoalError
from shoal.core.interruption import Interruption
from shoal.core.optional import require
from shoal.core.storage.disk import read_plain
from shoal.core.storage.files import write_text
from shoal.core.storage.formats import parse_json, to_json
from shoal.core.storage.lock import FolderLock
from shoal.experiment.grid import Attempts, Grid, GridPoint, run_error, run_point
from shoal.experiment.jobs.messages import (
    error_of,
    first_order,
    point_of,
    point_order,
    report,
    task_of,
)
from shoal.experiment.jobs.pool import Gpus, visible_gpus
from shoal.experiment.jobs.worker import data_of, wait_for
from shoal.training.folder.provenance import COMMAND, command

__all__ = ["Cluster", "PointJob", "Request", "parse_request", "run_submitted"]

_PULSE = {"local": 0.2, "slurm": 2.0}
_TIMEOUTS = 100
"""How often a job may run out of time; each time the run has come further."""
_PATIENCE = 60.0
"""Seconds that a job waits, after SIGTERM, for the signal to queue it again."""


@dataclass(frozen=True)
class Request:
    """What a grid asks of a cluster.

    Attributes:
        cluster: "slurm" or "local".
        minutes: time limit of a job.
        jobs: most jobs at a time; None leaves this to SLURM.
        threads: CPU threads of each job.
        parameters: further parameters of submitit, such as `slurm_partition`.
    """

    cluster: str
    minutes: int = 60
    jobs: int | None = None
    threads: int = 1
    parameters: Mapping[str, Any] = field(default_factory=dict)


def parse_request(words: Sequence[str], partition: str | None = None) -> dict[str, Any]:
    """The parameters of submitit from the command line.

    >>> parse_request(["mem_gb=32", "slurm_account=bio"], "gpu")
    {'slurm_partition': 'gpu', 'mem_gb': 32, 'slurm_account': 'bio'}
    """
    parameters: dict[str, Any] = {} if partition is None else {"slurm_partition": partition}
    for word in words:
        key, sign, value = word.partition("=")
        if not (key.isidentifier() and sign and value):
            raise ConfigError(
                f"a request has a key and a value, such as --request mem_gb=32, not {word!r}"
            )
        parameters[key] = int(value) if value.isdecimal() else value
    return parameters


def run_submitted(
    grid: Grid,
    request: Request,
    after: Callable[[GridPoint], None] = lambda point: None,
    *,
    retries: int = 1,
) -> dict[GridPoint, ShoalError]:
    """Submit unfinished runs as jobs and wait for them; results equal those of one process.

    Ctrl-C stops the waiting, not the jobs of SLURM; the same call finds them again.

    Args:
        grid: the runs, already checked.
        request: what to ask of the cluster.
        after: called after each run, finished or failed.
        retries: further attempts at a failed run, as `Attempts` counts them.

    Returns:
        The failed runs with their errors.
    """
    with FolderLock(grid.folder), Interruption() as stop:
        cluster = Cluster(grid, request, after, Attempts(retries))
        while cluster.waiting or cluster.running:
            cluster.submit()
            cluster.collect()
            if stop.received is not None:
                cluster.leave()
                stop.stop()
            time.sleep(_PULSE[request.cluster])
    return cluster.attempts.failed


class Cluster:
    """The submitted and the waiting runs of a grid.

    Attributes:
        waiting: grid points that are not submitted, in order.
        running: submitted grid points with their jobs.
        attempts: decides which failed runs are tried again.
    """

    def __init__(
        self,
        grid: Grid,
        request: Request,
        after: Callable[[GridPoint], None],
        attempts: Attempts,
    ) -> None:
        self.grid, self.request, self.after, self.attempts = grid, request, after, attempts
        self.folder = grid.folder.absolute() / "jobs"
        self.waiting = deque(grid.queue)
        self.running: dict[GridPoint, Any] = {}
        self._gpus = Gpus(visible_gpus(grid.config.device))
        self._executor = _executor(self.folder, grid, request)
        if request.cluster == "slurm":
            self._find_again()

    def submit(self) -> None:
        """Submit waiting runs: to SLURM all as one array, to this machine as many as have room."""
        room = len(self.waiting)
        if self.request.cluster == "local":
            room = min(room, (self.request.jobs or 1) - len(self.running))
        points = [self.waiting.popleft() for _ in range(room)]
        if not points:
            return
        for point in points:
            self._failure(point).unlink(missing_ok=True)
        if self.request.cluster == "local":
            self.running |= {point: self._submit_here(point) for point in points}
        else:
            with self._executor.batch():
                jobs = {point: self._executor.submit(self._job(point)) for point in points}
            self.running |= jobs
            self._remember()

    def collect(self) -> None:
        """Take note of every job that has ended."""
        for point, job in list(self.running.items()):
            if job.done():
                del self.running[point]
                self._gpus.give_back(getattr(job, "gpu", None))
                self._settle(point, job)

    def leave(self) -> None:
        """Stop waiting: jobs on this machine end, jobs of SLURM continue."""
        if self.request.cluster == "local":
            for job in self.running.values():
                job.cancel()
            for job in self.running.values():
                job._process.wait()
        elif self.running:
            notice("the jobs of SLURM continue; scancel ends them, the same command waits again")

    def _settle(self, point: GridPoint, job: Any) -> None:
        if not self.grid.is_done(point) and self.attempts.again(point, self._error(point, job)):
            self.waiting.append(point)
        else:
            self.after(point)

    def _error(self, point: GridPoint, job: Any) -> ShoalError:
        """The error that the job has left, or the last line of its log."""
        path = self._failure(point)
        if path.exists():
            return error_of(parse_json(read_plain(path).decode()))
        log = Path(job.paths.stderr)
        lines = (
            log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
        )
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        return PeerLost(f"its job {job.job_id} ended without a result: {last}")

    def _failure(self, point: GridPoint) -> Path:
        return self.folder / f"{point.name}.json"

    def _job(self, point: GridPoint) -> "PointJob":
        order = first_order(self.grid, self.request.threads)
        return PointJob(order, point_order(point), command(), str(self._failure(point)))

    def _submit_here(self, point: GridPoint) -> Any:
        gpu = self._gpus.take()
        if gpu is not None and gpu.isdecimal():
            self._executor.update_parameters(gpus_per_node=1, visible_gpus=[int(gpu)])
        job = self._executor.submit(self._job(point))
        job.gpu = gpu
        return job

    def _remember(self) -> None:
        known = {point.name: job.job_id for point, job in self.running.items()}
        write_text(self.folder / "submitted.json", to_json(known))

    def _find_again(self) -> None:
        """Jobs that an earlier command has submitted and that have not ended."""
        path = self.folder / "submitted.json"
        known = parse_json(read_plain(path).decode()) if path.exists() else {}
        make = require("submitit", extra="cluster").SlurmJob
        for point in list(self.waiting):
            job = make(self.folder, known[point.name]) if point.name in known else None
            if job is not None and not job.done(force_check=True):
                self.running[point] = job
                self.waiting.remove(point)


def _executor(folder: Path, grid: Grid, request: Request) -> Any:
    """The executor of submitit, with the settings of a request."""
    submitit = require("submitit", extra="cluster")
    asked = {"name": grid.config.name, "timeout_min": request.minutes, "nodes": 1}
    asked |= {"cpus_per_task": request.threads}
    device = grid.config.device or ""
    if request.cluster == "slurm":
        asked |= {"gpus_per_node": 1} if device.startswith("cuda") else {}
        asked |= {} if request.jobs is None else {"slurm_array_parallelism": request.jobs}
    elif device.startswith("cuda"):
        asked |= {"gpus_per_node": 1}
    try:
        executor = submitit.AutoExecutor(
            folder, cluster=request.cluster, **{f"{request.cluster}_max_num_timeout": _TIMEOUTS}
        )
        executor.update_parameters(**asked | dict(request.parameters))
    except (RuntimeError, ValueError, NameError, TypeError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ConfigError(f"submitit refuses the request to {request.cluster}: {reason}") from error
    return executor


@dataclass(frozen=True)
class PointJob:
    """A job: trains and evaluates one grid point; texts only, so that any machine can read it.

    Attributes:
        order: the grid and the threads, as `first_order` writes them.
        point: the grid point, as `point_order` writes it.
        typed: the command that the user typed.
        failure: file for the error of the run.
    """

    order: str
    point: str
    typed: str
    failure: str

    def __call__(self) -> str:
        """Train and evaluate; an error goes into a file, since the job itself has worked."""
        os.environ[COMMAND] = self.typed
        again = _queue_again_after_saving()
        try:
            task, point = task_of(self.order), point_of(self.point)
            wait_for(task.grid.place(point))
            run_point(task.grid, point, data_of(task))
        except SystemExit as stopped:
            _queue_again(again, stopped)
        except Exception as error:
            known = run_error(error)
            write_text(self.failure, report("failed", str(known), type(known).__name__))
            return "failed"
        return "done"

    def checkpoint(self) -> Any:
        """The job that submitit queues after a preemption: the same, which resumes its run."""
        return require("submitit", extra="cluster").helpers.DelayedSubmission(self)


Handler = Callable[[int, FrameType | None], Any]


def _queue_again_after_saving() -> Handler | None:
    """Let the signal of a preemption save the run first; returns what submitit does with it.

    A training run listens to SIGUSR1: it ends its step, saves, and raises SystemExit. At other
    moments nothing is to be saved, and submitit acts at once.
    """
    again = signal.getsignal(signal.SIGUSR2)
    if not callable(again):  # the job runs outside submitit, as its DebugExecutor lets it
        return None
    before = signal.getsignal(signal.SIGUSR1)

    def preempted(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGUSR1) is before:
            again(number, frame)
        else:
            signal.raise_signal(signal.SIGUSR1)

    signal.signal(signal.SIGUSR2, preempted)
    return again


def _queue_again(again: Handler | None, stopped: SystemExit) -> None:
    """The run was stopped by a signal and is saved: queue the job again, or end it."""
    if again is not None and stopped.code == 128 + signal.SIGUSR1:
        again(signal.SIGUSR2, None)
    if again is not None and stopped.code == 128 + signal.SIGTERM:
        # SLURM sends SIGTERM first, to a preempted job and to a cancelled one
        time.sleep(_PATIENCE)
    raise stopped
