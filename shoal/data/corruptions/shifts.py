"""Corrupted copies of the test set as shifts, computed one at a time or read from files.

The published files of CIFAR-10-C are Zenodo record 2535967: for each corruption one `.npy` of
50,000 byte images [N, 32, 32, 3], those of severity 1 first, and `labels.npy`. The files are mapped
into memory and read on demand.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from shoal.core.arguments import checked, instance_of, whole_or_zero
from shoal.core.arguments import device as usable
from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.core.registry import nearest
from shoal.core.storage.disk import storage_errors
from shoal.core.values import describe_value
from shoal.data.batches.arrays import check_labels
from shoal.data.corruptions.registry import SEVERITIES, Draws, registry
from shoal.data.dataset import Dataset, LazySplits, Split, sizes
from shoal.data.files.store import folders
from shoal.data.sets.images import in_range, in_unit

__all__ = [
    "FOLDER",
    "PublishedFiles",
    "check_images",
    "check_severity",
    "corrupt",
    "parse_shift",
    "selected",
    "with_corruptions",
]

_AT_ONCE = 2**22
"""Pixel values per chunk: enough to keep a GPU busy, with little memory."""


@checked(
    images=instance_of(Tensor, "a tensor of images"),
    severity=lambda _, value: check_severity(value),
    first=whole_or_zero,
    device=usable,
)
def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    seed: int = 0,
    *,
    first: int = 0,
    device: str | torch.device | None = None,
) -> Tensor:
    """Images [B, 1 or 3, H, W] in [0, 1], corrupted; shape, type and device stay.

    The result for image i depends only on the seed, the corruption, the severity and i. Chunks of a
    data set can be corrupted in any order, with `first` the index of their first image.

    >>> corrupt(torch.full((1, 1, 4, 4), 0.5), "brightness", 3)[0, 0, 0]
    tensor([0.6500, 0.6500, 0.6500, 0.6500])

    Args:
        images: grey or colour images.
        name: one of `shoal list corruptions`.
        severity: 1 to 5.
        seed: fixes all randomness.
        first: index of the first image.
        device: device to compute on; None keeps that of the images.
    """
    corruption = registry[name]
    check_images(images)
    done = torch.empty_like(images)
    count = max(1, _AT_ONCE // images[0].numel())
    there = images.device if device is None else torch.device(device)
    exact = torch.float64 if images.dtype == torch.float64 else torch.float32
    for start in range(0, len(images), count):
        chunk = images[start : start + count].to(there, exact)
        index = torch.arange(len(chunk), device=there) + first + start
        draws = Draws(seed, f"{name}-{severity}", index)
        done[start : start + count] = corruption(chunk, draws, severity)
    return done


def check_severity(severity: int) -> int:
    """The severity, if it is valid."""
    try:
        whole = operator.index(severity)
    except TypeError:
        whole = 0
    if whole not in SEVERITIES:
        what = describe_value(severity)
        raise ConfigError(f"a severity is a whole number from 1 to 5, not {what}")
    return whole


def check_images(images: Tensor) -> None:
    """Refuse what is not at least one image of at least 4 x 4 pixels in [0, 1]."""
    shape = list(images.shape)
    if len(shape) != 4 or shape[1] not in (1, 3) or not len(images) or min(shape[2:]) < 4:
        raise DataError(
            f"only images [B, 1 or 3, H, W] of at least 4 x 4 pixels can be corrupted, "
            f"not shape {shape}"
        )
    if not images.is_floating_point():
        raise DataError(f"images must be numbers from 0 to 1, not {images.dtype}; divide by 255")
    low, high = (float(end) for end in images.aminmax())
    if not (low >= 0 and high <= 1):
        raise DataError(
            f"images must lie in [0, 1] to be corrupted, not in [{low:.3g}, {high:.3g}]; "
            f"corrupt them before normalisation"
        )


_SETS = ("all", "standard")

_UNIT = (0.0, 1.0)


def parse_shift(shift: str) -> tuple[str, int] | None:
    """Corruption and severity of a shift; None for a shift that is no corruption.

    >>> parse_shift("gaussian-noise-3"), parse_shift("rotated-15")
    (('gaussian-noise', 3), None)
    """
    name, _, severity = shift.rpartition("-")
    known = name in registry and severity in map(str, SEVERITIES)
    return (name, int(severity)) if known else None


def selected(corruptions: str | Sequence[str], channels: int) -> tuple[str, ...]:
    """The corruptions of "all", of "standard", of a name or of several names.

    For grey images, "all" and "standard" leave out corruptions that change colours only, since
    these would count clean images as corrupted.

    >>> len(selected("all", 3)), len(selected("standard", 3)), len(selected("all", 1))
    (19, 15, 18)
    """
    if isinstance(corruptions, str) and corruptions in _SETS:
        entries = {name: registry[name] for name in registry}
        wanted = [n for n, e in entries.items() if e.standard or corruptions == "all"]
        return tuple(name for name in wanted if channels == 3 or not entries[name].colour)
    names = (corruptions,) if isinstance(corruptions, str) else tuple(corruptions)
    for name in names:
        if name not in registry:
            raise ConfigError(
                f"there is no corruption called '{name}'; {nearest(name, [*registry, *_SETS])}"
            )
    if not names:
        raise ConfigError("corruptions is empty; leave it out, or write corruptions = 'all'")
    return tuple(dict.fromkeys(names))


def with_corruptions(
    data: Dataset,
    corruptions: str | Sequence[str] = "all",
    severities: Sequence[int] = SEVERITIES,
    files: bool = False,
    seed: int = 0,
) -> Dataset:
    """The data set with corrupted copies of its test set as shifts.

    The name of a shift is corruption and severity, such as `fog-3`. A shift is computed on access,
    on a GPU if there is one, and not kept, so 95 shifts need the memory of one.

    Args:
        data: a data set of images with a test set. Pixels of images and copies lie in
            `pixel_range`, or in [0, 1] if there is none.
        corruptions: "all" (nineteen), "standard" (fifteen), a name or several names.
        severities: severities from 1 to 5.
        files: read the published files of CIFAR-10-C instead.
        seed: fixes all randomness.
    """
    if not severities:
        raise ConfigError("severities is empty; leave it out for all five")
    chosen = tuple(dict.fromkeys(map(check_severity, severities)))
    channels = data.input_shape[0] if data.input_shape else 0
    names = selected(corruptions, channels)
    make, counts = _from_files(data, names) if files else _computed(data, names, seed)
    makers = {name: partial(data.shifts.__getitem__, name) for name in data.shifts}
    pairs = [(name, severity) for name in names for severity in chosen]
    makers |= {f"{name}-{severity}": partial(make, name, severity) for name, severity in pairs}
    known = sizes(data.shifts) | {f"{n}-{severity}": counts[n] for n, severity in pairs}
    return replace(data, shifts=LazySplits(makers, known))


Source = tuple[Callable[[str, int], Split], dict[str, int]]


def _computed(data: Dataset, names: Sequence[str], seed: int) -> Source:
    test = data.test
    if test is None:
        raise DataError(f"the data set '{data.name}' has no test set to corrupt")
    values = data.pixel_range or _UNIT
    check_images(in_unit(test.x, values))
    device = "cuda" if torch.cuda.is_available() else None

    def make(name: str, severity: int) -> Split:
        corrupted = corrupt(in_unit(test.x, values), name, severity, seed, device=device)
        return Split(in_range(corrupted, values), test.y)

    return make, dict.fromkeys(names, len(test))


def _from_files(data: Dataset, names: Sequence[str]) -> Source:
    published = PublishedFiles()
    counts = {name: published.count(name) for name in names}
    first = published(names[0], 1)
    if tuple(first.x.shape[1:]) != data.input_shape:
        raise DataError(
            f"the files of CIFAR-10-C hold images of shape {tuple(first.x.shape[1:])}, but "
            f"'{data.name}' has shape {data.input_shape}; leave out corruption_files"
        )
    if first.y is not None:
        check_labels(first.y, data.outputs)
    values = data.pixel_range or _UNIT

    def read(name: str, severity: int) -> Split:
        split = published(name, severity)
        return replace(split, x=in_range(split.x, values))

    return read, counts


FOLDER = "CIFAR-10-C"


class PublishedFiles:
    """The files of CIFAR-10-C; errors in a file appear when it is first opened.

    Args:
        place: folder of the files; None for `CIFAR-10-C` in the data folders.
    """

    def __init__(self, place: Path | str | None = None) -> None:
        candidates = [place / FOLDER for place in folders()] if place is None else [Path(place)]
        self.place = next((path for path in candidates if path.is_dir()), candidates[0])

    def __call__(self, name: str, severity: int) -> Split:
        """Images of one corruption and severity, with their labels."""
        images, labels = self._images(name), self._labels()
        count = len(images) // len(SEVERITIES)
        rows = slice((severity - 1) * count, severity * count)
        x = torch.from_numpy(np.array(images[rows])).permute(0, 3, 1, 2).float() / 255
        return Split(x.contiguous(), torch.from_numpy(labels[rows].astype(np.int64)))

    def count(self, name: str) -> int:
        """Number of images per severity, after a check of the file."""
        images, labels = self._images(name), self._labels()
        if len(labels) != len(images):
            raise DataError(
                f"{self.place} has {len(labels):,} labels, but {len(images):,} images in "
                f"{_file(name)}; download them again"
            )
        return len(images) // len(SEVERITIES)

    def _images(self, name: str) -> np.ndarray:
        images = self._mapped(_file(name))
        sound = images.dtype == np.uint8 and images.ndim == 4 and images.shape[-1] == 3
        if not sound or not len(images) or len(images) % len(SEVERITIES):
            raise DataError(
                f"{self.place / _file(name)} holds {images.dtype} {list(images.shape)}; "
                f"wanted bytes [5 n, 32, 32, 3], n images at each of five severities"
            )
        return images

    def _labels(self) -> np.ndarray:
        labels = self._mapped("labels.npy")
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise DataError(
                f"{self.place / 'labels.npy'} holds {labels.dtype} {list(labels.shape)}; "
                f"wanted one whole number per image"
            )
        return labels

    def _mapped(self, file: str) -> np.ndarray:
        path = self.place / file
        if not path.is_file():
            raise StorageError(
                f"there is no file {path}; unpack CIFAR-10-C (Zenodo record 2535967) there, or "
                f"leave out corruption_files, so that Shoal computes the corruptions"
            )
        # Python's parser raises any error for a damaged header.
        with storage_errors("read", path):
            try:
                return npy.open_memmap(path, mode="r")
            except OSError:
                raise
            except Exception as error:
                raise DataError(f"{path} is not a sound array of numpy ({error})") from None


def _file(name: str) -> str:
    return f"{name.replace('-', '_')}.npy"
