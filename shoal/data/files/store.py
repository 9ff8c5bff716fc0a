"""The folders of data files: first `$SHOAL_DATA`, then the user's cache.

Shoal only reads `$SHOAL_DATA`, and reports bad files there. In the cache Shoal removes a bad file
and downloads it again.
"""

import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from shoal.core.display.progress import notice
from shoal.core.errors import DataError, StorageError
from shoal.core.storage.disk import replacing, storage_errors, sync
from shoal.core.storage.lock import FolderLock
from shoal.data.catalogue import COLLECTIONS, File
from shoal.data.files.download import download, flaw

__all__ = ["cache", "folders", "in_cache", "obtain", "path_of", "present", "shared", "writing"]

_PATIENCE = 3600.0
"""Seconds to wait for another process that downloads the same data set."""


def shared() -> Path | None:
    """The folder `SHOAL_DATA`, which Shoal only reads."""
    named = os.environ.get("SHOAL_DATA")
    return Path(named) if named else None


def cache() -> Path:
    """The folder for downloads, in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "shoal" / "data"
    except RuntimeError as error:
        raise StorageError(
            "there is no home folder to keep downloads in; set HOME or XDG_CACHE_HOME to a folder"
        ) from error


def folders() -> list[Path]:
    """The data folders, in the order of search."""
    named = shared()
    if named is None:
        return [cache()]
    try:
        return [named, cache()]
    except StorageError:
        return [named]


def path_of(path: str) -> Path | None:
    """An existing file below one of the folders, unchecked."""
    places = (folder / path for folder in folders())
    return next((place for place in places if place.is_file()), None)


def in_cache(path: Path) -> bool:
    """Whether Shoal wrote the file itself and may remove it."""
    return path.is_relative_to(folders()[-1]) and not path.is_relative_to(shared() or "\0")


def present(name: str) -> str:
    """Whether the files of a data set are present: `"here"`, `"partly here"` or `"not here"`."""
    held = COLLECTIONS[name]
    paths = [path for file in held.files for path in (file.path, held.instead.get(file.path, ""))]
    existing = {path for path in paths if path and path_of(path) is not None}
    whole = [
        file.path in existing or held.instead.get(file.path) in existing for file in held.files
    ]
    return "here" if all(whole) else "partly here" if any(whole) else "not here"


def obtain(*files: File, archive: File | None = None) -> list[Path]:
    """Checked files of one data set, downloaded if they are missing.

    Args:
        files: files of one folder.
        archive: archive of the files, for files without their own address.
    """
    places = {file: _sound(file) for file in files}
    if None in places.values():
        with writing(files[0].path.partition("/")[0]):
            # Another process may have downloaded them while this one waited.
            missing = [file for file in files if places[file] is None and _sound(file) is None]
            if archive is not None and missing:
                _unpack(archive, missing)
            for file in missing if archive is None else ():
                download(file, _place(file))
    return [places[file] or _place(file) for file in files]


def writing(name: str) -> FolderLock:
    """A lock against other processes that download the same data set."""
    return FolderLock(cache() / name, wait=_PATIENCE)


def _place(file: File) -> Path:
    place = cache() / file.path
    with storage_errors("write", place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _sound(file: File) -> Path | None:
    """The first copy, checked; None if there is none or a bad copy was removed."""
    path = path_of(file.path)
    if path is None:
        return None
    wrong = flaw(path, file)
    if wrong is None:
        return path
    if not in_cache(path):
        advice = f"get {file.addresses[0]}" if file.addresses else "remove it"
        raise DataError(
            f"{path} {wrong}; {advice}, or unset SHOAL_DATA, so that Shoal downloads it"
        )
    notice(f"{path} {wrong}; fetching it again")
    path.unlink(missing_ok=True)
    return None


def _unpack(archive: File, wanted: Sequence[File]) -> None:
    """Extract files from a tar archive by name; all other content is ignored.

    The archive is kept for its other files.
    """
    packed = _sound(archive)
    if packed is None:
        packed = _place(archive)
        download(archive, packed)
    notice(f"unpacking {packed.name}")
    by_name = {file.path.partition("/")[2]: file for file in wanted}
    try:
        with tarfile.open(packed, "r:*") as tar:
            for packed_file in tar:
                file = by_name.get(packed_file.name)
                if file is not None and packed_file.isreg() and packed_file.size == file.size:
                    _extract(tar, packed_file, file)
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{packed} is not a sound archive: {error}") from error
    missing = [file.path for file in wanted if _sound(file) is None]
    if missing:
        raise DataError(f"{packed} does not hold {', '.join(missing)}")


def _extract(tar: tarfile.TarFile, packed_file: tarfile.TarInfo, file: File) -> None:
    source = tar.extractfile(packed_file)
    if source is None:
        raise StorageError(f"{packed_file.name} cannot be read from its archive")
    with replacing(_place(file), file.size) as temporary, temporary.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
        sink.flush()
        sync(temporary)
