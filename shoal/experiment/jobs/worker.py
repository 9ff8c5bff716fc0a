"""A worker: loads the data of a grid once, then trains and judges the cells it is told to."""

import os
import queue
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, TextIO

import torch

from shoal.core.errors import DataError, ShoalError, ShoalWarning, StorageError
from shoal.core.lock import FolderLock
from shoal.data.dataset import Dataset
from shoal.experiment.build import check_device, make_data
from shoal.experiment.grid import Grid, GridPoint, resident, run_cell
from shoal.experiment.jobs.messages import cell_of, report, task_of

__all__ = ["main"]

PATIENCE = 30.0
"""Seconds to wait for a run folder whose former worker is still dying."""


def main() -> None:
    """Obey until the pipe with the orders is closed, then end at once."""
    voice = _voice()
    orders = _orders()

    def note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, ShoalWarning):
            _say(voice, "note", str(message))

    warnings.showwarning = note
    try:
        task = task_of(orders.get())
        torch.set_num_threads(task.threads)
        check_device(task.grid.config.device)
        data = resident(make_data(task.grid.config), task.grid.config.device)
        _say(voice, "ready")
        while True:
            _obey(voice, task.grid, cell_of(orders.get()), data)
    except ShoalError as error:
        _say(voice, "stopped", str(error), type(error).__name__)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        _say(voice, "fault", f"{type(error).__name__}: {reason}")
        raise


def _obey(voice: TextIO, grid: Grid, cell: GridPoint, data: Dataset) -> None:
    try:
        _wait_for(grid.place(cell))
        run_cell(grid, cell, data)
    except DataError as error:
        _say(voice, "failed", str(error), type(error).__name__)
    else:
        _say(voice, "done")


def _wait_for(folder: Path) -> None:
    """Until nobody writes to the folder of a run."""
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
    """The pipe to the pool; whatever else is printed goes to standard error instead."""
    voice = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return voice


def _orders() -> "queue.SimpleQueue[str]":
    """The lines that come in, read beside the work so that their end is noticed at once."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            waiting.put(line)
        # Whoever gave the orders has finished or died; what is under way resumes another time.
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return waiting


if __name__ == "__main__":
    main()
