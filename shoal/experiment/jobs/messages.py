"""What goes through the pipes between a pool and its workers, a JSON value a line.

To a worker: first the grid and the threads, then one cell after another. From it: "ready" once the
data are loaded, "note" for a warning, and for each cell "done", or "failed", "stopped" or "fault"
with a sentence.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core import errors
from shoal.core.errors import ShoalError
from shoal.core.formats import parse_json, to_json
from shoal.experiment.config import make_config
from shoal.experiment.grid import Grid, GridPoint
from shoal.experiment.variants import Variant

__all__ = ["Task", "cell_of", "cell_order", "error_of", "first_order", "report", "task_of"]


class Task(NamedTuple):
    """What a worker has to know before its first cell."""

    grid: Grid
    threads: int


def first_order(grid: Grid, threads: int) -> str:
    """The line that tells a worker about the grid."""
    config = grid.config
    folder = str(grid.folder.absolute())
    return to_json(
        {"config": config.table, "name": config.name, "folder": folder, "threads": threads}
    )


def task_of(line: str) -> Task:
    """What `first_order` told; the grid has only what a single cell needs."""
    told = parse_json(line)
    config = make_config(told["config"], told["name"])
    return Task(Grid(config, Path(told["folder"]), (), (), 1), told["threads"])


def cell_order(cell: GridPoint) -> str:
    """The line that asks for one run."""
    return to_json(asdict(cell))


def cell_of(line: str) -> GridPoint:
    """What `cell_order` asked for.

    >>> cell = Cell(Variant("forde", 10.0, (("fraction", 0.25),)), 5, 0)
    >>> cell_of(cell_order(cell)) == cell
    True
    """
    told = parse_json(line)
    variant = told.pop("variant")
    settings = tuple((key, value) for key, value in variant.pop("settings"))
    return GridPoint(Variant(**variant, settings=settings), **told)


def report(event: str, text: str = "", kind: str = "") -> str:
    """A line from a worker."""
    return to_json({"event": event, "text": text, "kind": kind})


def error_of(told: dict[str, Any]) -> ShoalError:
    """The error that a worker met, as it was there.

    >>> error_of({"kind": "StorageError", "text": "disk full"}).exit_status
    74
    """
    kind = getattr(errors, told["kind"]) if told["kind"] in errors.__all__ else ShoalError
    return kind(told["text"])
