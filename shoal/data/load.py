"""From a name, a file or a table of settings to a data set, with its shifts and OOD sets."""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.core.registry import nearest
from shoal.core.values import check_spec, check_value
from shoal.data.arrays import check_labels
from shoal.data.corruptions import with_corruptions
from shoal.data.dataset import Dataset, Split, registry
from shoal.data.files import class_folders, load_file, title
from shoal.data.images import as_pixels, fitted, in_range
from shoal.data.raw import RAW

__all__ = ["file_dataset", "load", "outsiders"]


def outsiders(
    entries: str | Sequence[str],
    shape: tuple[int, ...],
    pixel_range: tuple[float, float] | None = None,
    own: Mapping[str, Split] | None = None,
) -> dict[str, Split]:
    """Inputs that an ensemble should not be sure about, by name.

    Args:
        entries: each the name of a set that the data bring along (`own`), of a registered data
            set, whose test part is taken, or a file or folder as `load_file` reads it. A file
            that is called like a data set is meant by `./name`.
        shape: of one input to train on; see `fitted` for what is turned into it.
        pixel_range: that of the images to train on; what comes is taken to be from 0 to 1.
        own: sets that the data bring along.
    """
    found: dict[str, Split] = {}
    for entry in (entries,) if isinstance(entries, str) else entries:
        name, split = _one(entry, shape, pixel_range, own or {})
        if name in found:
            raise ConfigError(f"there are two foreign sets called '{name}'; rename one of them")
        found[name] = split
    return found


def _one(
    entry: str,
    shape: tuple[int, ...],
    pixel_range: tuple[float, float] | None,
    own: Mapping[str, Split],
) -> tuple[str, Split]:
    if entry in own:
        return entry, own[entry]
    if entry in registry:
        name, x = entry, _test_inputs(entry)
    elif os.path.exists(entry):
        name, x = title(entry), load_file(entry, shape=shape).x
    else:
        raise ConfigError(
            f"ood '{entry}' is neither a data set nor a file or folder; "
            f"{nearest(entry, [*own, *registry])}"
        )
    x = fitted(x, shape, name)
    return name, Split(x if pixel_range is None else in_range(x, pixel_range))


def _test_inputs(name: str) -> Tensor:
    try:
        if name in RAW:
            return as_pixels(RAW[name]("test")[0])
        test = registry.make(name).test
    except StorageError as error:
        raise StorageError(f"{error}; or leave '{name}' out of ood") from error
    if test is None:
        raise DataError(f"the data set '{name}' has no test part that could be foreign data")
    return test.x


@registry.register("file")
def file_dataset(
    train: str = "",
    test: str | None = None,
    ood: str | tuple[str, ...] = (),
    shifts: str | tuple[str, ...] = (),
    target: str | None = None,
) -> Dataset:
    """Your own data from .npz, .npy or .csv files, or from folders of images.

    Args:
        train: file with inputs and targets, or folder with a folder of images for each class.
        test: file or folder like it.
        ood: inputs of another kind: files or folders, called by their names, or data sets.
        shifts: file or files with inputs and targets that differ in something.
        target: what the last column of a table is, `"class"` or `"value"`; see `load_file`.
    """
    if not train:
        raise ConfigError("dataset 'file' needs a file to train on; type train = 'your.npz'")
    known = load_file(train, target)
    shape = tuple(known.x.shape[1:])
    pictures = os.path.isdir(train)
    classes = class_folders(train) if pictures else None

    def like(path: str) -> Split:
        return load_file(path, target, shape=shape, classes=classes)

    data = Dataset(
        name=title(train),
        train=known,
        test=None if test is None else like(test),
        shifts={title(p): like(p) for p in _paths(shifts)},
        ood=outsiders(ood, shape),
        classes=classes,
        pixel_range=(0.0, 1.0) if pictures else None,
    )
    _check_together(data)
    return data


def _check_together(data: Dataset) -> None:
    if data.train.y is None:
        raise DataError(
            f"the training file of '{data.name}' has no targets; add an array y, "
            f"or type target = 'class' to read the last column"
        )
    labelled = {**({} if data.test is None else {"test": data.test}), **data.shifts}
    for name, part in labelled.items():
        if tuple(part.x.shape[1:]) != data.input_shape:
            raise DataError(
                f"inputs of '{name}' have shape {tuple(part.x.shape[1:])}, "
                f"those to train on {data.input_shape}; they must agree"
            )
        if part.y is None:
            raise DataError(f"the file of '{name}' has no targets, which are needed to judge by")
        if data.has_classes:
            check_labels(part.y, data.outputs)


def _paths(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths)


_CORRUPTED = {
    "corruptions": str | tuple[str, ...],
    "severities": tuple[int, ...],
    "corruption_files": bool,
}


def load(spec: str | Mapping[str, Any]) -> Dataset:
    """The data set that a name or a table describes; its `spec` is the complete table.

    Every data set takes `ood`, the foreign data to judge by instead of its own: names of its own
    foreign sets, of other data sets, or files and folders; see `outsiders`.

    >>> load({"name": "toy-regression", "points": 10}).spec["noise_std"]
    0.25

    Args:
        spec: a name from `shoal list datasets`, or {"name": ..., settings}. Beside its own, every
            set of images has the settings `corruptions` ("all", "standard" or names from `shoal
            list corruptions`: corrupted copies of the test images become shifts), `severities` (of
            1 to 5) and `corruption_files` (true for the published files of CIFAR-10-C).
    """
    table, corrupted = _parted(spec)
    check_spec("data", table, registry)
    settings = inspect.signature(registry[table["name"]]).parameters
    ood = table.get("ood") if "ood" not in settings else None
    check_value("data.ood", ood, str | tuple[str, ...] | None)
    data = registry.make({k: v for k, v in table.items() if k != "ood" or k in settings})
    if ood is not None:
        chosen = outsiders(ood, data.input_shape, data.pixel_range, data.ood)
        data = replace(data, ood=chosen)
    defaults = {name: setting.default for name, setting in settings.items()}
    data = replace(data, spec={"name": table["name"], **defaults, **table, **corrupted})
    return _corrupted(data, corrupted, table.get("seed", 0)) if corrupted else data


def _parted(spec: Any) -> tuple[Any, dict[str, Any]]:
    """The settings of the data set itself, and those that any set of images has."""
    if not isinstance(spec, Mapping):
        return ({"name": spec} if isinstance(spec, str) else spec), {}
    corrupted = {key: spec[key] for key in _CORRUPTED if key in spec}
    for key, value in corrupted.items():
        check_value(f"data.{key}", value, _CORRUPTED[key])
    if corrupted and "corruptions" not in corrupted:
        raise ConfigError(
            f"data.{next(iter(corrupted))} needs corruptions; write corruptions = 'all' beside it"
        )
    return {key: value for key, value in spec.items() if key not in corrupted}, corrupted


def _corrupted(data: Dataset, keys: Mapping[str, Any], seed: int) -> Dataset:
    options = {"severities": keys["severities"]} if "severities" in keys else {}
    files = bool(keys.get("corruption_files", False))
    return with_corruptions(data, keys["corruptions"], files=files, seed=seed, **options)
