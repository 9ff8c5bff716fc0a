"""Checkpoints that survive a kill at any moment, and detect any changed byte.

A checkpoint is a folder `step-000000120` with a safetensors file per group of tensors,
`state.json`, and `manifest.json`. The manifest has the size and SHA-256 of each file, the run, and
its own SHA-256. A checkpoint is written under a temporary name and renamed when complete, so every
folder with a proper name was once complete. If the same step is saved again, the former folder
stays as `step-000000120-old` until the new folder is in place.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shoal.core.disk import machine_memory, staging, storage_errors, sweep, sync
from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalWarning, StorageError
from shoal.core.files import (
    MAX_JSON,
    MAX_TABLE,
    Layout,
    bytes_in,
    put_bytes,
    put_tensors,
    read_json,
    read_tensors,
)
from shoal.core.formats import to_json
from shoal.core.manifest import PART, put_manifest, read_manifest, verified

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint", "steps"]

_FOLDER = re.compile(r"step-(\d{9,18})(-old)?", re.ASCII)


@dataclass(frozen=True)
class Checkpoint:
    """The saved state of one step.

    Attributes:
        step: The training step.
        parts: Tensors by group and name, on the CPU.
        state: All other values as JSON: tuples become lists, NaN becomes None.
    """

    step: int
    parts: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class _Found(NamedTuple):
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
    return sorted({found.step for found in _checkpoints(Path(folder))})


def _checkpoints(folder: Path) -> list[_Found]:
    """Checkpoints in a folder, newest first; for one step, the folder put in place last.

    A listing beside a writer can miss a folder during its rename. So an empty listing is repeated
    while there are signs of a checkpoint.
    """
    found: list[_Found] = []
    with storage_errors("read", folder):
        for _ in range(100):
            paths = list(folder.iterdir()) if folder.exists() else []
            found = [known for path in paths if (known := _found(path))]
            if found or not any(path.name.startswith((".tmp-", "step-")) for path in paths):
                break
    return sorted(found, reverse=True)


def _found(path: Path) -> _Found | None:
    match = _FOLDER.fullmatch(path.name)
    with contextlib.suppress(FileNotFoundError):
        if match and path.is_dir():
            return _Found(int(match[1]), match[2] is None, path, _identity(path))
    return None


def save_checkpoint(
    folder: Path | str,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int = 2,
    run: Mapping[str, str] | None = None,
) -> None:
    """Save one step on the disk, then remove older checkpoints.

    The saved step becomes the newest. Checkpoints of later steps belong to an abandoned training
    and are removed, as are all but the newest `keep`.

    Args:
        folder: Folder of the checkpoints of one run, created if needed.
        step: The training step; the same step may be saved again.
        parts: Tensors by group and name; each group becomes a file.
        state: All other values of the run, of types that JSON has.
        keep: Number of checkpoints to keep, including the new one.
        run: Digests that identify the run; `load_checkpoint` requires the same.
    """
    folder = Path(folder)
    text = _checked_state(step, parts, state, keep)
    target = folder / f"step-{step:09d}"
    needed = len(text) + sum(bytes_in(tensors) for tensors in parts.values())
    with storage_errors("write", target, needed):
        sweep(folder)
        with staging(folder) as stage:
            fresh = stage / target.name
            fresh.mkdir()
            _fill(fresh, step, parts, text, run or {})
            _put_in_place(fresh, target)
            _prune(folder, step, keep, stage)


def _checked_state(
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
) -> bytes:
    if not 0 <= step < 10**18 or keep < 1:
        raise ConfigError(f"a checkpoint needs step >= 0 and keep >= 1, not {step} and {keep}")
    for part in parts:
        if not PART.fullmatch(part):
            raise ConfigError(f"a part of a checkpoint wants a plain name, not '{part}'")
    text = to_json(dict(state), indent=2).encode()
    if len(text) > MAX_TABLE:
        raise ConfigError(f"the state has {len(text)} bytes as JSON; store large values as tensors")
    return text


def _fill(
    fresh: Path,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: bytes,
    run: Mapping[str, str],
) -> None:
    for part, tensors in parts.items():
        put_tensors(fresh / f"{part}.safetensors", tensors)
    put_bytes(fresh / "state.json", state)
    put_manifest(fresh, step, run)
    sync(fresh)


def _put_in_place(fresh: Path, target: Path) -> None:
    former = target.with_name(f"{target.name}-old")
    if target.exists():
        if former.exists():
            os.replace(former, fresh.with_name(former.name))
        os.replace(target, former)
    os.replace(fresh, target)
    sync(target.parent)


def _prune(folder: Path, step: int, keep: int, stage: Path) -> None:
    """Rename superfluous checkpoints before any of their files is removed."""
    wanted = [other for other in steps(folder) if other <= step][-keep:]
    for found in _checkpoints(folder):
        if found.step in wanted:
            wanted.remove(found.step)
        else:
            os.replace(found.path, stage / f"{found.path.name}-gone")
    sync(folder)


def load_checkpoint(
    folder: Path | str,
    expected: Mapping[str, Layout] | None = None,
    run: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> Checkpoint:
    """The newest undamaged checkpoint; a warning names damaged ones.

    Another process may write meanwhile; then the folder is read again.

    Args:
        folder: The folder of `save_checkpoint`.
        expected: Tensors that the named groups must have; other groups are not checked.
        run: Digests that identify the run, as in `save_checkpoint`.
        limit: Largest size of a checkpoint in bytes; a larger one counts as damaged. The memory of
            the machine is always a limit.

    Raises:
        StorageError: There is no checkpoint.
        CheckpointCorrupt: All checkpoints are damaged.
        ConfigError: The newest undamaged checkpoint has other tensors than `expected`.
    """
    folder = Path(folder)
    limits = [most for most in (limit, machine_memory()) if most is not None]
    limit = min(limits, default=None)
    damaged: dict[_Found, StorageError] = {}
    while waiting := [found for found in _checkpoints(folder) if found not in damaged]:
        found = waiting[0]
        try:
            checkpoint = _read(found.path, found.step, expected or {}, run or {}, limit)
        except StorageError as error:
            if found.unmoved():
                damaged[found] = error
            continue
        if not found.unmoved():
            continue
        for error in damaged.values():
            message = f"{error}; step {found.step} is used instead"
            warnings.warn(message, ShoalWarning, stacklevel=2)
        return checkpoint
    if not damaged:
        raise StorageError(f"{folder} has no checkpoint; train first, or name another folder")
    newest = next(iter(damaged.values()))
    raise CheckpointCorrupt(f"every checkpoint in {folder} is damaged; the newest: {newest}")


def _read(
    path: Path,
    step: int,
    expected: Mapping[str, Layout],
    run: Mapping[str, str],
    limit: int | None,
) -> Checkpoint:
    manifest = read_manifest(path, step, run)
    names = verified(path, manifest["files"], limit)
    parts = [name.removesuffix(".safetensors") for name in names if name != "state.json"]
    for part in expected:
        if part not in parts:
            raise ConfigError(f"{path} has no tensors '{part}'; it has {', '.join(parts)}")
    state = read_json(path / "state.json", MAX_JSON if manifest["format"] == 1 else MAX_TABLE)
    if not isinstance(state, dict):
        raise CheckpointCorrupt(f"{path / 'state.json'} does not contain a table")
    tensors = {
        part: read_tensors(path / f"{part}.safetensors", expected.get(part)) for part in parts
    }
    return Checkpoint(step, tensors, state)
