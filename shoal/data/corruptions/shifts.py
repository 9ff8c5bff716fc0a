"""Corrupted copies of a test set as shifts of the data set, made one at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import nearest
from shoal.data.arrays import check_labels
from shoal.data.corruptions.corrupt import check_images, check_severity, corrupt
from shoal.data.corruptions.files import PublishedFiles
from shoal.data.corruptions.registry import SEVERITIES, registry
from shoal.data.dataset import Dataset, Split
from shoal.data.images import in_range, in_unit
from shoal.data.lazy import LazySplits, sizes

__all__ = ["parse_shift", "selected", "with_corruptions"]

_SETS = ("all", "standard")
_UNIT = (0.0, 1.0)


def parse_shift(shift: str) -> tuple[str, int] | None:
    """Corruption and severity of a shift, or None when it is one of another kind.

    >>> parse_shift("gaussian-noise-3"), parse_shift("rotated-15")
    (('gaussian-noise', 3), None)
    """
    name, _, severity = shift.rpartition("-")
    known = name in registry and severity in map(str, SEVERITIES)
    return (name, int(severity)) if known else None


def selected(corruptions: str | Sequence[str], channels: int) -> tuple[str, ...]:
    """The corruptions that are meant by "all", by "standard", by a name or by several.

    The two words leave out what changes colours alone where there are none: it would count clean
    images as corrupted ones.

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
        raise ConfigError("corruptions names none; leave it out, or write corruptions = 'all'")
    return tuple(dict.fromkeys(names))


def with_corruptions(
    data: Dataset,
    corruptions: str | Sequence[str] = "all",
    severities: Sequence[int] = SEVERITIES,
    files: bool = False,
    seed: int = 0,
) -> Dataset:
    """The data set with corrupted copies of its test part among its shifts.

    A shift is called after corruption and severity, `fog-3`. It is computed when it is looked at,
    on the GPU where there is one, and not kept, so 95 of them take the memory of one.

    Args:
        data: a data set of images with a test part; their values lie in `pixel_range`, or from 0
            to 1 where it has none, and so do those of the copies.
        corruptions: "all" nineteen, the fifteen "standard" ones, a name or several.
        severities: some of 1 to 5.
        files: read them from the published files of CIFAR-10-C instead.
        seed: chooses everything random about them.
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
        raise DataError(f"the data set '{data.name}' has no test part that could be corrupted")
    values = data.pixel_range or _UNIT
    check_images(in_unit(test.x, values))
    device = "cuda" if torch.cuda.is_available() else None

    def make(name: str, severity: int) -> Split:
        worse = corrupt(in_unit(test.x, values), name, severity, seed, device=device)
        return Split(in_range(worse, values), test.y)

    return make, dict.fromkeys(names, len(test))


def _from_files(data: Dataset, names: Sequence[str]) -> Source:
    published = PublishedFiles()
    counts = {name: published.count(name) for name in names}
    first = published(names[0], 1)
    if tuple(first.x.shape[1:]) != data.input_shape:
        raise DataError(
            f"the files of CIFAR-10-C hold images of shape {tuple(first.x.shape[1:])}, those of "
            f"'{data.name}' have shape {data.input_shape}; leave out corruption_files"
        )
    if first.y is not None:
        check_labels(first.y, data.outputs)
    values = data.pixel_range or _UNIT

    def read(name: str, severity: int) -> Split:
        found = published(name, severity)
        return replace(found, x=in_range(found.x, values))

    return read, counts
