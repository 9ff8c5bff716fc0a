"""IDX, the format of MNIST and its relatives: a header of sizes, then bytes.

Two zeros, the code 8 for bytes, the number of axes, each axis as four bytes, then the content. See
LeCun & Cortes, the MNIST database.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from shoal.core.errors import DataError

__all__ = ["read_idx"]

_BYTES = 8
_GROWTH = 1040
"""Deflate packs at most 1,032 bytes into one."""


def read_idx(path: Path, axes: int) -> np.ndarray:
    """The bytes of an IDX file, gzipped or not, as an array with `axes` axes.

    Nothing is allocated that the file could not hold.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            room = path.stat().st_size * (_GROWTH if packed else 1)
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
        raise DataError("it does not begin with the header of one")
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
        raise DataError(f"it goes on after the {claimed:,} bytes that its header claims")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _fill(file: IO[bytes], view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
