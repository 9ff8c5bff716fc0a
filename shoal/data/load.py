"""Load a data set with its shifts and OOD sets by name, file or table of settings.

Files are arrays, tables, or folders of images.
"""

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.arguments import checked, list_of, one_of, text, whole
from shoal.core.arguments import path as path_of
from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.core.optional import require
from shoal.core.registry import nearest
from shoal.core.values import check_spec, check_value
from shoal.data.batches.arrays import check_labels, check_not_negative
from shoal.data.batches.sources import as_split
from shoal.data.corruptions import with_corruptions
from shoal.data.dataset import Dataset, Split, registry
from shoal.data.files.raw import RAW
from shoal.data.files.readers import READERS
from shoal.data.sets.images import as_pixels, fitted, in_range

__all__ = ["class_folders", "file_dataset", "load", "load_file", "ood_sets", "read_images", "title"]


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
    splits: dict[str, Split] = {}
    for entry in (entries,) if isinstance(entries, str) else entries:
        name, split = _ood_set(entry, shape, pixel_range, own or {})
        if name in splits:
            raise ConfigError(f"there are two OOD sets called '{name}'; rename one of them")
        splits[name] = split
    return splits


def _ood_set(
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


@checked(path=path_of, target=one_of("class", "value"), shape=list_of(whole), classes=list_of(text))
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
    - `.csv`: numbers separated by commas, one row per data point, with or without a line of names.
    - a folder of images, or of folders of images, each named after a class; see `read_images`.

    Args:
        path: the file, whose ending is its format, or the folder.
        target: `"class"` or `"value"` to read the last column of a `.csv` or `.npy` as labels or
            as real numbers; for `.npz` it overrides the type of `y`. With None a table has no
            target, and integers in `y` are labels.
        shape: shape of one input, to which the images of a folder are resized.
        classes: names of the folders of images, in the order of the labels.
    """
    path = Path(path)
    if path.suffix.lower() not in READERS and os.path.isdir(path):
        sized = None if shape is None else tuple(shape)
        return read_images(path, sized, None if classes is None else tuple(classes))
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} ends in '{path.suffix}'; Shoal reads {', '.join(READERS)}")
    with _opened(path) as file:
        try:
            x, y = reader(file)
            if y is None and target is not None:
                x, y = _last_column(x)
            split = as_split((x, _typed(y, target)))
            if target == "class":
                check_not_negative(split.y.flatten())
            return split
        except DataError as error:
            raise DataError(f"{path} cannot be used: {error}") from None


def title(path: str | Path) -> str:
    """The name of a file or folder in tables.

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


ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")

_LARGEST = 1 << 26

_SMALL, _GROWTH = 1 << 22, 1 << 13
"""Pixels of any image, and pixels per byte of a larger one; deflate packs 2^13 black ones."""

_GREY = ("1", "L")

_GREY16 = ("I;16", "I;16L", "I;16B", "I;16N")

_BITS = 258  # the TIFF tag for the number of bits per pixel


def class_folders(folder: str | Path) -> tuple[str, ...] | None:
    """Names of the folders in a folder, in order; None if there are none."""
    names = sorted(entry.name for entry in Path(folder).iterdir() if entry.is_dir())
    return tuple(name for name in names if not name.startswith(".")) or None


def read_images(
    folder: Path,
    shape: tuple[int, ...] | None = None,
    classes: tuple[str, ...] | None = None,
) -> Split:
    """The images of a folder as floats [N, C, H, W] from 0 to 1, in the order of their names.

    Pixels of 16 bits are scaled to 8 bits. Pixels of 32 bits are refused: their range is unknown.

    Args:
        folder: a folder with a folder of images per class, or with unlabelled images.
        shape: (C, H, W) to which images are converted and resized; without it all images must have
            one size, and the result is grey if all images are grey.
        classes: names of the classes in the order of their labels; by default the sorted
            names of the folders.
    """
    files, labels = _listed(folder, classes)
    if shape is None:
        shape = _common_shape(files)
    elif len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(f"{folder} holds images, but inputs have shape {shape}")
    pixels = np.empty((len(files), *shape), np.uint8)
    for index, file in enumerate(files):
        pixels[index] = _pixels(file, shape)
    return Split(as_pixels(pixels), None if labels is None else torch.tensor(labels))


def _listed(folder: Path, classes: tuple[str, ...] | None) -> tuple[list[Path], list[int] | None]:
    names = class_folders(folder)
    if names is None:
        files = _images_in(folder)
        if not files:
            raise DataError(f"{folder} holds no images ({', '.join(ENDINGS)})")
        return files, None
    known = names if classes is None else classes
    strange = [name for name in names if name not in known]
    if strange:
        raise DataError(
            f"{folder} has a class '{strange[0]}' that the training data lack; they have "
            f"{', '.join(known)}"
        )
    images = {name: _images_in(folder / name) for name in names}
    bare = [name for name, files in images.items() if not files]
    if bare:
        raise DataError(f"{folder / bare[0]} holds no images ({', '.join(ENDINGS)})")
    labels = [known.index(name) for name, files in images.items() for _ in files]
    return [file for files in images.values() for file in files], labels


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)


def _common_shape(files: Sequence[Path]) -> tuple[int, int, int]:
    """The common shape, from all headers, so that nothing is allocated if shapes differ."""
    grey, first = True, None
    for file in files:
        with _opened_image(file) as image:
            size, grey = image.size, grey and (image.mode in _GREY or _is_grey16(image))
        first = size if first is None else first
        if size != first:
            raise DataError(
                f"{file} has {size[0]} x {size[1]} pixels, {files[0]} has {first[0]} x {first[1]}; "
                f"resize them to one size"
            )
    width, height = first or (0, 0)
    return (1 if grey else 3), height, width


def _pixels(file: Path, shape: tuple[int, ...]) -> np.ndarray:
    channels, height, width = shape
    try:
        with _quiet_pillow(), _opened_image(file) as image:
            plain = _eight_bits(image, file).convert("L" if channels == 1 else "RGB")
            if plain.size != (width, height):
                plain = plain.resize((width, height), resample=2)
            array = np.asarray(plain, np.uint8)
    except DataError:
        raise
    except Exception as error:  # decoders raise any error for a damaged file
        raise _unsound(file, error) from error
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _is_grey16(image: Any) -> bool:
    """Whether pixels go from 0 to 65535; Pillow keeps some of these images as 32-bit integers."""
    return image.mode in _GREY16 or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _eight_bits(image: Any, file: Path) -> Any:
    """The image with 8 bits per channel; Pillow itself would clip at 255."""
    if _is_grey16(image):
        bits = image.tag_v2.get(_BITS, (16,))[0] if image.format == "TIFF" else 16
        shades = np.asarray(image, np.float64) * (255 / (2**bits - 1))
        return require("PIL.Image", extra="report").fromarray(shades.round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(
            f"{file} has pixels of 32 bits, whose range is not known; save it with 8 or 16 bits"
        )
    return image


@contextmanager
def _quiet_pillow() -> Iterator[None]:
    """A block without warnings of Pillow: its size limit is larger than ours, and an image with
    damaged tags is read or refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _opened_image(file: Path) -> Any:
    if not file.is_file():
        raise DataError(f"{file} is not an ordinary file")
    image_module = require("PIL.Image", extra="report")
    try:
        with _quiet_pillow():
            image = image_module.open(file)
    except Exception as error:
        raise _unsound(file, error) from error
    if image.width * image.height > _LARGEST:
        image.close()
        raise DataError(f"{file} has {image.width:,} x {image.height:,} pixels, which is too large")
    size = file.stat().st_size
    if image.width * image.height > max(_SMALL, _GROWTH * size):
        image.close()
        raise DataError(
            f"{file} claims {image.width:,} x {image.height:,} pixels in {size:,} bytes, "
            f"which is out of proportion; if you trust the image, save it as .bmp"
        )
    return image


def _unsound(file: Path, error: Exception) -> DataError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return DataError(f"{file} is not an image that can be read ({reason})")
