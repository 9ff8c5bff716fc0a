"""Readers of untrusted files, which check every claim of a file.

Nothing is unpickled. An array is read only if the file has the bytes that its header claims. An
archive is read only if it does not grow out of proportion.
"""

import gzip
import io
import itertools
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from shoal.core.errors import DataError
from shoal.core.storage.disk import storage_errors

__all__ = ["READERS", "read_arrays", "read_csv", "read_idx", "read_npy", "read_npz"]

_GROWTH, _SMALL = 200, 16 * 2**20

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}

_BROKEN_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    RuntimeError,
    ValueError,
    EOFError,
)

Arrays = tuple[np.ndarray, np.ndarray | None]


def read_npy(file: IO[bytes]) -> Arrays:
    """The array of a `.npy` file, and no targets."""
    return _array(file, _length(file)), None


def read_npz(file: IO[bytes]) -> Arrays:
    """The arrays `x` and, where there is one, `y` of a `.npz` archive."""
    arrays = read_arrays(file, ("x",), ("y",))
    return arrays["x"], arrays.get("y")


def read_arrays(
    file: IO[bytes], names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Arrays of a `.npz` archive by name; optional arrays may be missing."""
    try:
        with zipfile.ZipFile(file) as archive:
            held = [name.removesuffix(".npy") for name in archive.namelist()]
            for name in names:
                if name not in held:
                    some = ", ".join(held[:8]) or "nothing"
                    raise DataError(f"it holds {some}, but no array called {name}")
            room = _length(file)
            wanted = [*names, *(name for name in optional if name in held)]
            return {name: _member(archive, f"{name}.npy", room) for name in wanted}
    except DataError:
        raise
    except _BROKEN_ZIP as error:
        raise DataError(f"it is not a sound .npz archive ({error})") from None


def read_csv(file: IO[bytes]) -> Arrays:
    """The numbers [rows, columns] of a `.csv` file, and no targets.

    A first line without any number is a line of names and is left out.
    """
    try:
        with io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            rows = (line for line in text if line.strip())
            first = next(rows, "")
            first = next(rows, "") if _is_names(first) else first
            if not first:
                raise DataError("it holds no rows of numbers")
            rows = itertools.chain([first], rows)
            return np.loadtxt(rows, delimiter=",", comments=None, quotechar='"', ndmin=2), None
    except DataError:
        raise
    except UnicodeDecodeError:
        raise DataError("it is not text in UTF-8") from None
    except ValueError as error:
        raise DataError(f"it is not a table of numbers: {str(error).split(';')[0]}") from None


READERS: dict[str, Callable[[IO[bytes]], Arrays]] = {
    ".npz": read_npz,
    ".npy": read_npy,
    ".csv": read_csv,
}
"""The reader for each ending of a file name."""


def _member(archive: zipfile.ZipFile, name: str, room: int) -> np.ndarray:
    entries = [info for info in archive.infolist() if info.filename == name]
    info = entries[0]
    if len(entries) > 1:
        raise DataError(f"it holds {len(entries)} arrays called {name.removesuffix('.npy')}")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError("it is compressed in a way that numpy does not write")
    packed = min(info.compress_size, room)
    if info.file_size > max(_SMALL, _GROWTH * packed):
        raise DataError(
            f"{name} would grow from {packed:,} to {info.file_size:,} bytes, more than "
            f"{_GROWTH} times; if you trust the file, save it uncompressed with numpy.savez"
        )
    with archive.open(info) as file:
        return _array(file, info.file_size)


def _array(file: IO[bytes], size: int) -> np.ndarray:
    """One array in numpy's format out of `size` bytes."""
    shape, fortran, dtype = _header(file)
    if dtype.kind not in "biuf":
        raise DataError(f"it holds an array of type {dtype}; wanted real numbers or integers")
    claimed, held = math.prod(shape) * dtype.itemsize, size - file.tell()
    if claimed != held:
        raise DataError(f"its header claims {claimed:,} bytes of numbers, but it has {held:,}")
    if claimed == 0:
        raise DataError(f"it holds an empty array of shape {shape}")
    data = bytearray(claimed)
    if file.readinto(data) != claimed:  # type: ignore[attr-defined]
        raise DataError(f"it ends before the {claimed:,} bytes that its header claims")
    try:
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
    except ValueError as error:
        raise DataError(f"its header claims an impossible shape ({error})") from None


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    # Python's parser raises any error for a damaged header.
    try:
        shape, fortran, dtype = _HEADERS[npy.read_magic(file)](file)
    except (OSError, zipfile.BadZipFile, zlib.error):
        raise
    except Exception:
        raise DataError("it does not begin like an array that numpy saved") from None
    if any(side < 0 for side in shape):
        raise DataError(f"its header claims an impossible shape {shape}")
    return shape, fortran, dtype


def _is_names(line: str) -> bool:
    words = [word.strip().strip('"') for word in line.split(",")]
    return any(words) and not any(_is_number(word) for word in words)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _length(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


_BYTES = 8

_IDX_GROWTH = 1040
"""Limit of the growth; deflate packs at most 1,032 bytes into one."""


def read_idx(path: Path, axes: int) -> np.ndarray:
    """The bytes of an IDX file, gzipped or not, as an array with `axes` axes.

    Nothing is allocated that the file could not hold.
    """
    with storage_errors("read", path):
        return _idx_content(path, axes)


def _idx_content(path: Path, axes: int) -> np.ndarray:
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            room = path.stat().st_size * (_IDX_GROWTH if packed else 1)
            if not packed:
                return _content(raw, axes, room)
            with gzip.GzipFile(fileobj=raw) as content:
                return _content(content, axes, room)  # type: ignore[arg-type]
    except DataError as error:
        raise DataError(f"{path} is not a sound IDX file: {error}") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is not a sound gzip file ({error})") from None


def _content(file: IO[bytes], axes: int, room: int) -> np.ndarray:
    header = file.read(4 + 4 * axes)
    if len(header) < 4 + 4 * axes or header[:2] != b"\0\0":
        raise DataError("it does not begin with an IDX header")
    if header[2] != _BYTES or header[3] != axes:
        raise DataError(
            f"it holds type {header[2]} in {header[3]} axes; wanted bytes (8) in {axes}"
        )
    shape = struct.unpack(f">{axes}I", header[4:])
    claimed = math.prod(shape)
    if not 0 < claimed <= room:
        raise DataError(f"its header claims {claimed:,} bytes, which it cannot hold")
    data = bytearray(claimed)
    held = _fill(file, memoryview(data))
    if held < claimed:
        raise DataError(f"its header claims {claimed:,} bytes, but it holds {held:,}")
    if file.read(1):
        raise DataError(f"it has more than the {claimed:,} bytes that its header claims")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _fill(file: IO[bytes], view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
