"""The user's own data: .npz, .npy and .csv files, and folders of images."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.data.dataset import Split
from shoal.data.picture_folder import read_pictures
from shoal.data.readers import READERS
from shoal.data.sources import as_split

__all__ = ["load_file", "title"]


def load_file(
    path: str | Path,
    target: str | None = None,
    *,
    shape: tuple[int, ...] | None = None,
    classes: tuple[str, ...] | None = None,
) -> Split:
    """Data points from one file or folder.

    - `.npz`: the array `x` and, where there is one, `y`.
    - `.npy`: the inputs.
    - `.csv`: numbers separated by commas, one row a point, with or without a line of names.
    - a folder of images, or of folders of images, each named after a class; see `read_pictures`.

    Args:
        path: the file, whose ending says what it is, or the folder.
        target: `"class"` or `"value"` to read the last column of a `.csv` or `.npy` as labels or
            as real numbers; for `.npz` it overrides what the type of `y` says. None: a table has
            no target, and integers in `y` are labels.
        shape: of one input, to which the images of a folder are brought.
        classes: names of the folders of images, in the order of the labels.
    """
    path = Path(path)
    if path.suffix.lower() not in READERS and os.path.isdir(path):
        return read_pictures(path, shape, classes)
    if target not in (None, "class", "value"):
        raise ConfigError(f"target must be 'class' or 'value', not {target!r}")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} ends in '{path.suffix}'; Shoal reads {', '.join(READERS)}")
    with _opened(path) as file:
        try:
            x, y = reader(file)
            if y is None and target is not None:
                x, y = _last_column(x)
            return as_split((x, _typed(y, target)))
        except DataError as error:
            raise DataError(f"{path} cannot be used: {error}") from None


def title(path: str | Path) -> str:
    """What a file or folder is called in tables.

    >>> title("shots/night.npz")
    'night'
    """
    path = Path(path)
    return path.name if os.path.isdir(path) else path.stem


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        if not path.exists():
            raise StorageError(f"there is no file called {path}")
        if not path.is_file():
            raise StorageError(f"{path} is not a regular file")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def _last_column(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if table.ndim != 2 or table.shape[1] < 2:
        raise DataError(
            f"its shape is {table.shape}; to take the last column as the target "
            f"there must be rows of at least two numbers"
        )
    return table[:, :-1], table[:, -1]


def _typed(y: np.ndarray | None, target: str | None) -> np.ndarray | None:
    if y is None or target is None:
        return y
    if target == "value":
        return y.astype(np.float64)
    if y.dtype.kind != "f":
        return y
    whole = np.isfinite(y) & (y == np.round(y)) & (np.abs(y) < 2**31)
    if not whole.all():
        first = np.argwhere(~whole)[0].tolist()
        raise DataError(
            f"target number {first[0]} is {y[tuple(first)]:g}, which is not a class; "
            f"type target = 'value' to regress on it"
        )
    return y.astype(np.int64)
