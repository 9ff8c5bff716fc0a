"""Load a data set with its shifts and OOD sets by name, file or table of settings."""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.core.registry import nearest
from shoal.core.values import check_spec, check_value
from shoal.data.batches.arrays import check_labels
from shoal.data.corruptions import with_corruptions
from shoal.data.dataset import Dataset, Split, registry
from shoal.data.files.file_dataset import class_folders, load_file, title
from shoal.data.files.raw import RAW
from shoal.data.sets.images import as_pixels, fitted, in_range

__all__ = ["file_dataset", "load", "ood_sets"]


def ood_sets(
    entries: str | Sequence[str],
    shape: tuple[int, ...],
    pixel_range: tuple[float, float] | None = None,
    own: Mapping[str, Split] | None = None,
) -> dict[str, Split]:
    """Out-of-distribution (OOD) inputs by name.

    Args:
        entries: each the name of an OOD set of the data (`own`), of a registered data set, whose
            test set is used, or a file or folder for `load_file`. Write `./name` for a file with
            the name of a data set.
        shape: shape of one training input; see `fitted` for conversions.
        pixel_range: range of the training images; OOD images are assumed to be in [0, 1].
        own: OOD sets of the data.
    """
    found: dict[str, Split] = {}
    for entry in (entries,) if isinstance(entries, str) else entries:
        name, split = _one(entry, shape, pixel_range, own or {})
        if name in found:
            raise ConfigError(f"there are two OOD sets called '{name}'; rename one of them")
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
        raise DataError(f"the data set '{name}' has no test set that could be an OOD set")
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
        test: file or folder in the same form.
        ood: OOD sets: files or folders, or names of data sets.
        shifts: file or files with changed test inputs and targets.
        target: type of the last column of a table, `"class"` or `"value"`; see `load_file`.
    """
    if not train:
        raise ConfigError("dataset 'file' needs a file to train on; type train = 'your.npz'")
    known = load_file(train, target)
    shape = tuple(known.x.shape[1:])
    has_images = os.path.isdir(train)
    classes = class_folders(train) if has_images else None

    def like(path: str) -> Split:
        return load_file(path, target, shape=shape, classes=classes)

    data = Dataset(
        name=title(train),
        train=known,
        test=None if test is None else like(test),
        shifts={title(p): like(p) for p in _paths(shifts)},
        ood=ood_sets(ood, shape),
        classes=classes,
        pixel_range=(0.0, 1.0) if has_images else None,
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
    for name, split in labelled.items():
        if tuple(split.x.shape[1:]) != data.input_shape:
            raise DataError(
                f"inputs of '{name}' have shape {tuple(split.x.shape[1:])}, "
                f"but training inputs {data.input_shape}; they must agree"
            )
        if split.y is None:
            raise DataError(f"the file of '{name}' has no targets, which an evaluation needs")
        if data.has_classes:
            check_labels(split.y, data.outputs)


def _paths(paths: str | tuple[str, ...]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths)


_CORRUPTED = {
    "corruptions": str | tuple[str, ...],
    "severities": tuple[int, ...],
    "corruption_files": bool,
}


def load(spec: str | Mapping[str, Any]) -> Dataset:
    """The data set of a name or a table; its `spec` is the complete table.

    Every data set has the setting `ood`, which replaces its OOD sets: names of its own OOD sets, of
    other data sets, or files and folders; see `ood_sets`.

    >>> load({"name": "toy-regression", "points": 10}).spec["noise_std"]
    0.25

    Args:
        spec: a name from `shoal list datasets`, or {"name": ..., settings}. Every image data
            set also has the settings `corruptions` ("all", "standard" or names from `shoal list
            corruptions`: corrupted copies of the test images become shifts), `severities` (from 1
            to 5) and `corruption_files` (true for the published files of CIFAR-10-C).
    """
    table, corrupted = _divided(spec)
    check_spec("data", table, registry)
    settings = inspect.signature(registry[table["name"]]).parameters
    ood = table.get("ood") if "ood" not in settings else None
    check_value("data.ood", ood, str | tuple[str, ...] | None)
    data = registry.make({k: v for k, v in table.items() if k != "ood" or k in settings})
    if ood is not None:
        chosen = ood_sets(ood, data.input_shape, data.pixel_range, data.ood)
        data = replace(data, ood=chosen)
    defaults = {name: setting.default for name, setting in settings.items()}
    data = replace(data, spec={"name": table["name"], **defaults, **table, **corrupted})
    return _corrupted(data, corrupted, table.get("seed", 0)) if corrupted else data


def _divided(spec: Any) -> tuple[Any, dict[str, Any]]:
    """The settings of the data set itself, and the settings about corruptions."""
    if not isinstance(spec, Mapping):
        return ({"name": spec} if isinstance(spec, str) else spec), {}
    corrupted = {key: spec[key] for key in _CORRUPTED if key in spec}
    for key, value in corrupted.items():
        check_value(f"data.{key}", value, _CORRUPTED[key])
    if corrupted and "corruptions" not in corrupted:
        raise ConfigError(
            f"data.{next(iter(corrupted))} needs corruptions; add corruptions = 'all'"
        )
    return {key: value for key, value in spec.items() if key not in corrupted}, corrupted


def _corrupted(data: Dataset, keys: Mapping[str, Any], seed: int) -> Dataset:
    options = {"severities": keys["severities"]} if "severities" in keys else {}
    files = bool(keys.get("corruption_files", False))
    return with_corruptions(data, keys["corruptions"], files=files, seed=seed, **options)
