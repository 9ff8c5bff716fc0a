"""Messages between a pool and its workers, one JSON value per line.

To a worker: first the grid and the threads, then one grid point after another. From a worker:
"ready" once the data are loaded, "note" for a warning, and for each grid point "done", or "failed"
with a sentence. "stopped" and "fault" have a sentence too, and then the worker ends.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core import errors
from shoal.core.errors import ShoalError
from shoal.core.storage.formats import parse_json, to_json
from shoal.experiment.config import make_config
from shoal.experiment.grid import Grid, GridPoint
from shoal.experiment.variants import Variant

__all__ = ["Task", "error_of", "first_order", "point_of", "point_order", "report", "task_of"]


class Task(NamedTuple):
    """The first message to a worker."""

    grid: Grid
    threads: int


def first_order(grid: Grid, threads: int) -> str:
    """The line that describes the grid to a worker."""
    config = grid.config
    folder = str(grid.folder.absolute())
    return to_json(
        {"config": config.table, "name": config.name, "folder": folder, "threads": threads}
    )


def task_of(line: str) -> Task:
    """The message of `first_order`; its grid has only the settings of single runs."""
    message = parse_json(line)
    config = make_config(message["config"], message["name"])
    return Task(Grid(config, Path(message["folder"]), (), (), 1), message["threads"])


def point_order(point: GridPoint) -> str:
    """The line that requests one run."""
    return to_json(asdict(point))


def point_of(line: str) -> GridPoint:
    """The grid point of `point_order`.

    >>> point = GridPoint(Variant("forde", 10.0, (("fraction", 0.25),), (("lr", "0.1"),)), 5, 0)
    >>> point_of(point_order(point)) == point
    True
    """
    message = parse_json(line)
    variant = message.pop("variant")
    for name in ("settings", "options"):
        variant[name] = tuple(map(tuple, variant[name]))
    return GridPoint(Variant(**variant), **message)


def report(event: str, text: str = "", kind: str = "") -> str:
    """A line from a worker."""
    return to_json({"event": event, "text": text, "kind": kind})


def error_of(message: dict[str, Any]) -> ShoalError:
    """The error of a worker, with its type.

    >>> error_of({"kind": "StorageError", "text": "disk full"}).exit_status
    74
    """
    kind = getattr(errors, message["kind"]) if message["kind"] in errors.__all__ else ShoalError
    return kind(message["text"])
