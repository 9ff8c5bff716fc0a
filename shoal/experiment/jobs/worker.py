"""A worker: loads the data of a grid once, then trains and evaluates the requested runs."""

import os
import queue
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

import torch

from shoal.core.errors import ShoalError, ShoalWarning, StorageError
from shoal.core.storage.lock import FolderLock
from shoal.data.dataset import Dataset
from shoal.experiment.build import check_device, make_data
from shoal.experiment.grid import Grid, GridPoint, resident, run_error, run_point
from shoal.experiment.jobs.messages import Task, point_of, report, task_of

__all__ = ["data_of", "main", "wait_for"]

PATIENCE = 30.0
"""Seconds to wait for a run folder that a dying worker still holds."""


def main() -> None:
    """Carry out orders until their pipe is closed, then end at once."""
    voice = _voice()
    orders = _orders()

    def note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, ShoalWarning):
            _say(voice, "note", str(message))

    warnings.showwarning = note
    try:
        task = task_of(orders.get())
        data = data_of(task)
        _say(voice, "ready")
        while True:
            _obey(voice, task.grid, point_of(orders.get()), data)
    except ShoalError as error:
        _say(voice, "stopped", str(error), type(error).__name__)
    except Exception as error:
        _say(voice, "fault", str(run_error(error)))
        raise


def data_of(task: Task) -> Dataset:
    """The data of a grid on the device of its runs; sets the number of threads first."""
    torch.set_num_threads(task.threads)
    device = task.grid.config.device
    check_device(device)
    return resident(make_data(task.grid.config), device)


def _obey(voice: TextIO, grid: Grid, point: GridPoint, data: Dataset) -> None:
    try:
        wait_for(grid.place(point))
        run_point(grid, point, data)
    except ShoalError as error:
        _say(voice, "failed", str(error), type(error).__name__)
    else:
        _say(voice, "done")


def wait_for(folder: Path) -> None:
    """Wait until no process writes to the folder of a run."""
    end = time.monotonic() + PATIENCE
    while folder.is_dir():
        try:
            with FolderLock(folder):
                return
        except StorageError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _say(voice: TextIO, event: str, text: str = "", kind: str = "") -> None:
    print(report(event, text, kind), file=voice, flush=True)


def _voice() -> TextIO:
    """The pipe to the pool; all other output goes to standard error."""
    voice = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return voice


def _orders() -> "queue.SimpleQueue[str]":
    """Incoming lines, read in a thread so that the end of the pipe is noticed at once."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            waiting.put(line)
        # The pool has finished or died; the current run resumes another time.
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return waiting


if __name__ == "__main__":
    main()
