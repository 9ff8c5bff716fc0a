"""The history file of a run: one line of JSON per epoch, tied to the checkpoints.

New rows are appended, and are on the disk before the checkpoint that refers to them. A checkpoint
stores the number of bytes of its rows and their SHA-256. The next save removes bytes that a killed
process wrote after them. A damaged file does not affect the weights: a warning reports it, and
unreadable rows load without numbers.
"""

import hashlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointCorrupt, ShoalWarning, StorageError
from shoal.core.storage.disk import flush, open_plain, size_of, storage_errors
from shoal.core.storage.files import write_bytes
from shoal.core.storage.formats import parse_json, to_json

__all__ = ["HistoryFile", "is_row", "read_history"]

MAX_BYTES = 1 << 30
_MAX_LOST = 1_000_000
_FORCES = ("loss", "drive", "push", "ratio", "ratio_max", "h2", "effective")
_NUMBERS = ("step", *_FORCES, "lr", "seconds")
_MEMBERS = "member_loss"

Row = dict[str, Any]


class HistoryFile:
    """The rows that a run has written so far.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._knows(b"", 0)

    def keep(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Write the new rows; returns the reference by which `read` finds all rows.

        Args:
            rows: all rows of the run; rows written or read before must be unchanged.
        """
        fresh = _lines(rows[self._rows :])
        if not (self._size and self._add(fresh)):
            fresh = _lines(rows)
            write_bytes(self.path, fresh)
            self._knows(b"", 0)
        self._digest.update(fresh)
        self._size, self._rows = self._size + len(fresh), len(rows)
        return {"rows": self._rows, "bytes": self._size, "sha256": self._digest.hexdigest()}

    def read(self, kept: Mapping[str, Any], step: int) -> list[Row]:
        """The rows that a checkpoint of this step refers to."""
        count, size = _counted(kept, self.path)
        data, trouble = b"", "it is shorter than it was"
        try:
            data = _bytes_of(self.path, size)
        except StorageError as error:
            trouble = str(error)
        if len(data) == size:
            trouble = "its SHA-256 differs"
            if hashlib.sha256(data).hexdigest() == kept["sha256"]:
                rows, lost = _parsed(data, count)
                if not lost:
                    self._knows(data, count)
                    return rows
        rows, lost = _parsed(data, count)
        if lost and rows[-1]["step"] is None:
            rows[-1]["step"] = step
        warnings.warn(
            f"{self.path} is damaged ({trouble}): {lost} of {count} epochs have no numbers, other "
            f"epochs may have wrong numbers; the weights are not affected",
            ShoalWarning,
            stacklevel=4,
        )
        return rows

    def _knows(self, data: bytes, rows: int) -> None:
        self._digest, self._size, self._rows = hashlib.sha256(data), len(data), rows

    def _add(self, fresh: bytes) -> bool:
        """Append lines to the known lines; False if the known lines are missing."""
        with storage_errors("write", self.path, len(fresh)):
            try:
                descriptor = open_plain(self.path, os.O_RDWR)
            except FileNotFoundError:
                return False
            with open(descriptor, "r+b") as file:
                if file.seek(0, os.SEEK_END) < self._size:
                    return False
                file.truncate(self._size)
                file.seek(self._size)
                file.write(fresh)
                file.flush()
                flush(file.fileno())
        return True


def read_history(path: Path) -> list[Row]:
    """All complete rows of a file, none without a file; unreadable rows have no numbers."""
    if not path.exists():
        return []
    data = _bytes_of(path, MAX_BYTES)
    data = data[: data.rfind(b"\n") + 1]  # another process may be writing the rest
    rows, lost = _parsed(data, data.count(b"\n"))
    if lost:
        warnings.warn(
            f"{path} cannot be read as history: {lost} of {len(rows)} epochs have no numbers",
            ShoalWarning,
            stacklevel=2,
        )
    return rows


def _lines(rows: Sequence[Row]) -> bytes:
    return "".join(to_json(row) + "\n" for row in rows).encode()


def _counted(kept: Mapping[str, Any], path: Path) -> tuple[int, int]:
    sound = isinstance(kept, dict) and kept.keys() == {"rows", "bytes", "sha256"}
    counts = [kept["rows"], kept["bytes"]] if sound else []
    if not sound or any(type(n) is not int or not 0 <= n <= MAX_BYTES for n in counts):
        raise CheckpointCorrupt(f"the checkpoint has no valid reference to {path}")
    return counts[0], counts[1]


def _bytes_of(path: Path, most: int) -> bytes:
    if size_of(path) > MAX_BYTES:
        raise StorageError(f"{path} is larger than the limit of {MAX_BYTES:,} bytes for a history")
    with storage_errors("read", path), path.open("rb") as file:
        return file.read(most)


def _parsed(data: bytes, count: int) -> tuple[list[Row], int]:
    """`count` rows, and how many of them have no numbers."""
    lines = data.split(b"\n")[:count]
    found = [_row(line, epoch) for epoch, line in enumerate(lines, 1)]
    lost = count - len(found) + found.count(None)
    if lost > _MAX_LOST:
        raise CheckpointCorrupt(f"the history has {lost:,} rows that cannot be read")
    found += [None] * (count - len(found))
    return [_blank(epoch) if row is None else row for epoch, row in enumerate(found, 1)], lost


def _row(line: bytes, epoch: int) -> Row | None:
    try:
        row = parse_json(line.decode())
    except ValueError:
        return None
    return row if is_row(row, epoch) else None


def is_row(row: Any, epoch: int) -> bool:
    """Whether keys and types are those of the history row of this epoch."""
    if not isinstance(row, dict) or row.get("epoch") != epoch or type(row["epoch"]) is not int:
        return False
    members, held = row.get(_MEMBERS) or [], row.get("validation") or {}
    return (
        isinstance(members, list)
        and all(map(_is_number, members))
        and all(_is_number(row.get(name)) for name in _NUMBERS)
        and type(row.get("alive", 0)) is int
        and isinstance(held, dict)
        and all(map(_is_number, held.values()))
    )


def _is_number(value: Any) -> bool:
    # A JSON integer may have thousands of digits, which no float can hold.
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _blank(epoch: int) -> Row:
    return {"epoch": epoch, **dict.fromkeys(_NUMBERS), _MEMBERS: []}
