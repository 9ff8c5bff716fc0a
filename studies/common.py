"""What the studies share: CSV files, images, figures, cells in several processes."""

import csv
import fcntl
import io
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import shoal
from shoal.data.files.raw import RAW
from shoal.data.sets.image_sets import OBJECTS, image_dataset

__all__ = [
    "Column",
    "append_rows",
    "finished",
    "image_arrays",
    "image_set",
    "read_csv",
    "sheet",
    "test_of",
]

Arrays = tuple[np.ndarray, np.ndarray]
"""Images as bytes, and their labels."""


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
    arguments: tuple = (),
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
        arguments: arguments of `prepare`.
        kind: cells of one kind take about the same time.
    """
    begun, longest, missing = time.monotonic(), dict[Hashable, float](), list(cells)
    running: dict[Future, tuple[tuple, float]] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare, arguments) as pool:
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


def read_csv(path: Path, missing_ok: bool = False) -> list[dict[str, str]]:
    """The rows of a CSV file; with `missing_ok`, none if there is no file."""
    if missing_ok and not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, header: list[str], rows: Iterable[Iterable[Any]]) -> None:
    """Add rows to a CSV file; a new file begins with the header. Several processes may add."""
    with path.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([header] if file.seek(0, io.SEEK_END) == 0 else [])
        writer.writerows(rows)


def image_arrays(name: str, file: Path | None) -> tuple[Arrays, Arrays]:
    """Training and test images of a known data set, or of an .npz file with the same arrays."""
    if file is None:
        train, test = (RAW[name](split) for split in ("train", "test"))
        return train, test
    stored = np.load(file)
    return (stored["train_x"], stored["train_y"]), (stored["test_x"], stored["test_y"])


def image_set(
    name: str,
    train: Arrays,
    test: Arrays,
    classes: tuple[str, ...] = OBJECTS,
    pixels: str = "standard",
) -> shoal.Dataset:
    """A data set of images, in the scale of the training images."""
    (x, y), (x_test, y_test) = train, test
    labelled = (x, y.astype(np.int64)), (x_test, y_test.astype(np.int64))
    return image_dataset(name, classes, *labelled, {}, None, 0, pixels, ())


def test_of(data: shoal.Dataset) -> shoal.Split:
    """The test set, which every data set of a study has."""
    assert data.test is not None, f"{data.name} has no test set"
    return data.test


def sheet(figures: Iterable[Any], columns: int, path: Path) -> None:
    """All panels in one figure."""
    from PIL import Image

    panels = [Image.open(io.BytesIO(shoal.plots.png(f, 60))).convert("RGB") for f in figures]
    width, height = panels[0].size
    rows = -(-len(panels) // columns)
    whole = Image.new("RGB", (columns * width, rows * height), "white")
    for index, panel in enumerate(panels):
        whole.paste(panel, (index % columns * width, index // columns * height))
    whole.quantize(128).save(path, optimize=True)
