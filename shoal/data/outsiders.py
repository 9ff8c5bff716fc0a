"""Data of another kind, chosen by the user: other data sets, files and folders."""

import os
from collections.abc import Mapping, Sequence

from torch import Tensor

from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.core.registry import nearest
from shoal.data.dataset import Split
from shoal.data.files import load_file, title
from shoal.data.images import as_pixels, fitted, in_range
from shoal.data.raw import RAW
from shoal.data.registry import registry

__all__ = ["outsiders"]


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
