"""The user's own files as data: .npz, .npy and .csv."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.data.arrays import check_labels
from shoal.data.dataset import Dataset, Split
from shoal.data.readers import READERS
from shoal.data.registry import registry
from shoal.data.sources import as_split

__all__ = ["file_dataset", "load_file"]


def load_file(path: str | Path, target: str | None = None) -> Split:
    """Data points from one file.

    - `.npz`: the array `x` and, where there is one, `y`.
    - `.npy`: the inputs.
    - `.csv`: numbers separated by commas, one row a point, with or without a line of names.

    Args:
        path: the file; its ending says what it is.
        target: `"class"` or `"value"` to read the last column of a `.csv` or `.npy` as labels or
            as real numbers; for `.npz` it overrides what the type of `y` says. None: a table has
            no target, and integers in `y` are labels.
    """
    path = Path(path)
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


@registry.register("file")
def file_dataset(
    train: str = "",
    test: str | None = None,
    ood: str | tuple[str, ...] = (),
    shifts: str | tuple[str, ...] = (),
    target: str | None = None,
) -> Dataset:
    """Your own arrays from .npz, .npy or .csv files.

    Args:
        train: file with inputs and targets to train on.
        test: file with inputs and targets like them.
        ood: file or files with inputs of another kind, called by their file names.
        shifts: file or files with inputs and targets that differ in something.
        target: what the last column of a table is, `"class"` or `"value"`; see `load_file`.
    """
    if not train:
        raise ConfigError("dataset 'file' needs a file to train on; type train = 'your.npz'")
    data = Dataset(
        name=Path(train).stem,
        train=load_file(train, target),
        test=None if test is None else load_file(test, target),
        shifts={Path(p).stem: load_file(p, target) for p in _paths(shifts)},
        ood={Path(p).stem: Split(load_file(p).x) for p in _paths(ood)},
    )
    _check_together(data)
    return data


def _check_together(data: Dataset) -> None:
    if data.train.y is None:
        raise DataError(
            f"the training file of '{data.name}' has no targets; add an array y, "
            f"or type target = 'class' to read the last column"
        )
    labelled = {} if data.test is None else {"test": data.test}
    labelled |= data.shifts
    for name, part in (labelled | data.ood).items():
        if tuple(part.x.shape[1:]) != data.input_shape:
            raise DataError(
                f"inputs of '{name}' have shape {tuple(part.x.shape[1:])}, "
                f"those to train on {data.input_shape}; they must agree"
            )
    for name, part in labelled.items():
        if part.y is None:
            raise DataError(f"the file of '{name}' has no targets, which are needed to judge by")
        if data.task == "classification":
            check_labels(part.y, data.outputs)


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


def _paths(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths)
