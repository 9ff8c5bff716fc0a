"""A folder of images as data: one folder a class, or images alone."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.errors import DataError
from shoal.core.optional import require
from shoal.data.dataset import Split
from shoal.data.images import as_pixels

__all__ = ["class_folders", "read_pictures"]

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
_LARGEST = 1 << 26
_GREY = ("1", "L")


def class_folders(folder: str | Path) -> tuple[str, ...] | None:
    """Names of the folders in a folder, in order; None where there are none."""
    names = sorted(entry.name for entry in Path(folder).iterdir() if entry.is_dir())
    return tuple(name for name in names if not name.startswith(".")) or None


def read_pictures(
    folder: Path,
    shape: tuple[int, ...] | None = None,
    classes: tuple[str, ...] | None = None,
) -> Split:
    """The images of a folder as floats [N, C, H, W] from 0 to 1, in the order of their names.

    Args:
        folder: has a folder of images for each class, or images, which then have no labels.
        shape: (C, H, W) to which they are brought, grey or coloured and resized; without it they
            must be of one size, and are grey when all of them are.
        classes: names of the classes in the order of their labels; by default those of the
            folders, sorted.
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
            f"{folder} has a class '{strange[0]}' that is not trained on; those are "
            f"{', '.join(known)}"
        )
    found = {name: _images_in(folder / name) for name in names}
    bare = [name for name, files in found.items() if not files]
    if bare:
        raise DataError(f"{folder / bare[0]} holds no images ({', '.join(ENDINGS)})")
    labels = [known.index(name) for name, files in found.items() for _ in files]
    return [file for files in found.values() for file in files], labels


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in ENDINGS)


def _common_shape(files: Sequence[Path]) -> tuple[int, int, int]:
    """Every header is read before any image is, so that nothing is allocated for a mixture."""
    grey, first = True, None
    for file in files:
        with _opened(file) as image:
            size, grey = image.size, grey and image.mode in _GREY
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
        with _opened(file) as image:
            plain = image.convert("L" if channels == 1 else "RGB")
            if plain.size != (width, height):
                plain = plain.resize((width, height), resample=2)
            array = np.asarray(plain, np.uint8)
    except (OSError, ValueError, SyntaxError) as error:
        raise _unsound(file, error) from error
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _opened(file: Path) -> Any:
    image_module = require("PIL.Image", extra="report")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own bound on sizes, which is wider than ours
            image = image_module.open(file)
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        raise _unsound(file, error) from error
    if image.width * image.height > _LARGEST:
        image.close()
        raise DataError(f"{file} has {image.width:,} x {image.height:,} pixels, which is too large")
    return image


def _unsound(file: Path, error: Exception) -> DataError:
    return DataError(f"{file} is not an image that can be read ({str(error).splitlines()[0]})")
