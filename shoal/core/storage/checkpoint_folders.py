"""The folders of checkpoints: how they are found, put in place and removed beside readers."""

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from shoal.core.storage.disk import storage_errors, sync

__all__ = ["Found", "checkpoints_in", "prune", "put_in_place", "steps"]

_FOLDER = re.compile(r"step-(\d{9,18})(-old)?", re.ASCII)


class Found(NamedTuple):
    """A checkpoint in a folder, and which folder on the disk it is."""

    step: int
    in_place: bool
    path: Path
    identity: tuple[int, int]

    def unmoved(self) -> bool:
        """Whether the path still leads to this folder and not to a newer one."""
        try:
            return _identity(self.path) == self.identity
        except FileNotFoundError:
            return False


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_ctime_ns


def steps(folder: Path | str) -> list[int]:
    """Steps of the checkpoints in a folder, the newest last; empty if there is no folder."""
    return sorted({found.step for found in checkpoints_in(Path(folder))})


def checkpoints_in(folder: Path) -> list[Found]:
    """Checkpoints in a folder, newest first; for one step, the folder put in place last.

    A listing beside a writer can miss a folder during its rename. So an empty listing is repeated
    while there are signs of a checkpoint.
    """
    found: list[Found] = []
    with storage_errors("read", folder):
        for _ in range(100):
            paths = list(folder.iterdir()) if folder.exists() else []
            found = [known for path in paths if (known := _found(path))]
            if found or not any(path.name.startswith((".tmp-", "step-")) for path in paths):
                break
    return sorted(found, reverse=True)


def _found(path: Path) -> Found | None:
    match = _FOLDER.fullmatch(path.name)
    with contextlib.suppress(FileNotFoundError):
        if match and path.is_dir():
            return Found(int(match[1]), match[2] is None, path, _identity(path))
    return None


def put_in_place(fresh: Path, target: Path) -> None:
    """Rename a complete folder; a former one of the same step stays until then."""
    former = target.with_name(f"{target.name}-old")
    if target.exists():
        if former.exists():
            os.replace(former, fresh.with_name(former.name))
        os.replace(target, former)
    os.replace(fresh, target)
    sync(target.parent)


def prune(folder: Path, step: int, keep: int, stage: Path) -> None:
    """Rename superfluous checkpoints before any of their files is removed."""
    wanted = [other for other in steps(folder) if other <= step][-keep:]
    for found in checkpoints_in(folder):
        if found.step in wanted:
            wanted.remove(found.step)
        else:
            os.replace(found.path, stage / f"{found.path.name}-gone")
    sync(folder)
