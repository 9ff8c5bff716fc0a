"""Checkpoints that survive a kill at any moment, and detect any changed byte.

A checkpoint is a folder `step-000000120` with a safetensors file per group of tensors,
`state.json`, and `manifest.json`. Several processes write a file each per group
(`core.storage.shards`). The manifest has the size and SHA-256 of each file, the run, and its own
SHA-256. A checkpoint is written under a temporary name and renamed when complete, so every folder
with a proper name was once complete. If the same step is saved again, the former folder stays as
`step-000000120-old` until the new folder is in place.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalWarning, StorageError
from shoal.core.exchange import Alone, Exchange, agreed
from shoal.core.storage.disk import machine_memory, size_of, staging, storage_errors, sweep, sync
from shoal.core.storage.files import (
    MAX_JSON,
    MAX_TABLE,
    Layout,
    bytes_in,
    compare_layouts,
    header_sha256,
    put_bytes,
    put_tensors,
    read_json,
    read_sealed,
    sealed,
    sha256,
)
from shoal.core.storage.formats import to_json
from shoal.core.storage.shards import Rows, Shard, SplitTensors, parts_in

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint", "steps"]

_FORMAT, _SHARDED = 2, 3
"""Format of a checkpoint that one process writes, and that several processes write."""

_MAX_MANIFEST = 1 << 20
_MANIFEST = "manifest.json"

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""Names that a file of tensors may have, without its ending."""

_FOLDER = re.compile(r"step-(\d{9,18})(-old)?", re.ASCII)
_FILE = re.compile(rf"state\.json|{_PART.pattern}\.safetensors")
_NAMES = {"format", "step", "files", "run"}
_KEYS = {1: _NAMES - {"run"}, _FORMAT: _NAMES, _SHARDED: _NAMES}

_Files = dict[str, dict[str, Any]]
"""Size and SHA-256 of files, by name."""


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


def save_checkpoint(
    folder: Path | str,
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int = 2,
    run: Mapping[str, str] | None = None,
    shard: Shard | None = None,
) -> None:
    """Save one step on the disk, then remove older checkpoints.

    The saved step becomes the newest. Checkpoints of later steps belong to an abandoned training
    and are removed, as are all but the newest `keep`.

    Several processes that share the folder save one checkpoint if each gives a `shard`. Each writes
    its rows into one temporary folder. The first process writes the rest, the manifest of all
    files, and renames the folder. An error of one process is raised in all, and nothing is saved.

    Args:
        folder: Folder of the checkpoints of one run, created if needed.
        step: The training step; the same step may be saved again.
        parts: Tensors by group and name; each group becomes a file.
        state: All other values of the run, of types that JSON has.
        keep: Number of checkpoints to keep, including the new one.
        run: Digests that identify the run; `load_checkpoint` requires the same.
        shard: The share of this process; None for the only process.
    """
    folder, shard = Path(folder), shard or Shard(Alone())
    exchange, target = shard.exchange, folder / f"step-{step:09d}"
    text = b""

    def begin() -> str | None:
        nonlocal text
        text = _checked_state(step, parts, state, keep)
        return _begin(stack, folder, target, _bytes(parts, text)) if shard.first else None

    def fill() -> _Files:
        with storage_errors("write", target, _bytes(parts, text)):
            return _fill(fresh, parts, text, shard)

    def finish() -> None:
        if shard.first:
            with storage_errors("write", target, _bytes(parts, text)):
                _put_manifest(fresh, step, run or {}, files, shard.count > 1)
                sync(fresh)
                _put_in_place(fresh, target)
                _prune(folder, step, keep, fresh.parent)

    with contextlib.ExitStack() as stack:
        fresh = folder / str(agreed(exchange, begin)[0]) / target.name
        each = agreed(exchange, fill)
        files = dict(sorted(item for written in each for item in written.items()))
        agreed(exchange, finish)


def _bytes(parts: Mapping[str, Mapping[str, Tensor]], text: bytes) -> int:
    return len(text) + sum(bytes_in(tensors) for tensors in parts.values())


def _begin(stack: contextlib.ExitStack, folder: Path, target: Path, needed: int) -> str:
    """The name of the temporary folder that all processes write to."""
    with storage_errors("write", target, needed):
        sweep(folder)
        stage = stack.enter_context(staging(folder))
        (stage / target.name).mkdir()
    return stage.name


def _checked_state(
    step: int,
    parts: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
) -> bytes:
    if not 0 <= step < 10**18 or keep < 1:
        raise ConfigError(f"a checkpoint needs step >= 0 and keep >= 1, not {step} and {keep}")
    for part in parts:
        if not _PART.fullmatch(part):
            raise ConfigError(f"a part of a checkpoint wants a plain name, not '{part}'")
    text = to_json(dict(state), indent=2).encode()
    if len(text) > MAX_TABLE:
        raise ConfigError(f"the state has {len(text)} bytes as JSON; store large values as tensors")
    return text


def _fill(
    fresh: Path, parts: Mapping[str, Mapping[str, Tensor]], state: bytes, shard: Shard
) -> _Files:
    """Write the files of this process; returns what the manifest says about them."""
    if not fresh.is_dir():
        raise StorageError(
            f"process {shard.exchange.rank} does not see {fresh}; "
            f"put the run's folder on a disk that all processes share"
        )
    files: _Files = {}
    for part, tensors in parts.items():
        name = shard.file(part)
        if shard.first or part in shard.parts:
            put_tensors(fresh / name, tensors)
            files[name] = _entry(fresh / name, sharded=name != f"{part}.safetensors")
    if shard.first:
        put_bytes(fresh / "state.json", state)
        files["state.json"] = _entry(fresh / "state.json")
    return files


def load_checkpoint(
    folder: Path | str,
    expected: Mapping[str, Layout] | None = None,
    run: Mapping[str, str] | None = None,
    limit: int | None = None,
    rows: Rows | None = None,
    exchange: Exchange | None = None,
) -> Checkpoint:
    """The newest undamaged checkpoint; a warning names damaged ones.

    Another process may write meanwhile; then the folder is read again.

    Without `rows`, every file is compared with its SHA-256. With `rows`, a process compares the
    headers of all shards, and the whole of the shards that it reads from. Several processes with an
    `exchange` load the same step: what one process finds damaged is damaged for all.

    Args:
        folder: The folder of `save_checkpoint`.
        expected: Whole tensors that the named groups must have; other groups are not checked.
        run: Digests that identify the run, as in `save_checkpoint`.
        limit: Largest size of a checkpoint in bytes; a larger one counts as damaged. The memory of
            the machine is always a limit of what is read.
        rows: The rows to read of every tensor; None for all rows.
        exchange: Reaches the other processes that load the checkpoint now.

    Raises:
        StorageError: There is no checkpoint.
        CheckpointCorrupt: All checkpoints are damaged.
        ConfigError: The newest undamaged checkpoint has other tensors than `expected`.
    """
    folder, exchange = Path(folder), exchange or Alone()
    read = _Reader(expected or {}, run or {}, limit, rows)
    damaged: dict[_CheckpointFolder | str, StorageError] = {}
    while True:
        waiting = [loaded for loaded in _checkpoints_in(folder) if loaded not in damaged]
        # The first process leads: others may still see an older listing of a network disk.
        chosen = exchange.gather([waiting[0].path.name, waiting[0].step] if waiting else None)[0]
        if chosen is None:
            break
        loaded = _attempt(read, folder / chosen[0], chosen[1], exchange)
        if not exchange.gather(bool(waiting) and waiting[0].unmoved())[0]:
            continue
        if isinstance(loaded, StorageError):
            damaged[waiting[0] if waiting else chosen[0]] = loaded
            continue
        for error in damaged.values():
            message = f"{error}; step {chosen[1]} is used instead"
            warnings.warn(message, ShoalWarning, stacklevel=2)
        return loaded
    if not damaged:
        raise StorageError(f"{folder} has no checkpoint; train first, or name another folder")
    newest = next(iter(damaged.values()))
    raise CheckpointCorrupt(f"every checkpoint in {folder} is damaged; the newest: {newest}")


def _attempt(
    read: "_Reader", path: Path, step: int, exchange: Exchange
) -> Checkpoint | StorageError:
    """The checkpoint if all processes could read theirs; otherwise the error of one of them."""
    loaded: list[Checkpoint] = []
    try:
        agreed(exchange, lambda: loaded.append(read(path, step)))
    except StorageError as error:
        return error
    return loaded[0]


class _Reader(NamedTuple):
    """Reads one checkpoint, as `load_checkpoint` was asked to."""

    expected: Mapping[str, Layout]
    run: Mapping[str, str]
    limit: int | None
    rows: Rows | None

    def __call__(self, path: Path, step: int) -> Checkpoint:
        manifest = _read_manifest(path, step, self.run)
        files, memory = manifest["files"], machine_memory()
        limits = [self.limit, memory if self.rows is None else None]
        _check_sizes(path, files, min((most for most in limits if most is not None), default=None))
        _check_headers(path, files)
        if self.rows is None:
            _check_digests(path, files, files)
        names = [name.removesuffix(".safetensors") for name in files if name != "state.json"]
        files_of_parts = parts_in(names, manifest["format"] == _SHARDED, path)
        with contextlib.ExitStack() as stack:
            tensors = {
                part: stack.enter_context(
                    SplitTensors(part, [path / f"{name}.safetensors" for name in split]).open()
                )
                for part, split in files_of_parts.items()
            }
            parts = self._tensors(path, tensors, files, memory)
        state = read_json(path / "state.json", MAX_JSON if manifest["format"] == 1 else MAX_TABLE)
        if not isinstance(state, dict):
            raise CheckpointCorrupt(f"{path / 'state.json'} does not contain a table")
        return Checkpoint(step, parts, state)

    def _tensors(
        self,
        path: Path,
        tensors: dict[str, SplitTensors],
        files: _Files,
        memory: int | None,
    ) -> dict[str, dict[str, Tensor]]:
        wanted = {part: split.wanted(self.rows) for part, split in tensors.items()}
        if self.rows is not None:
            needed = [f for part, split in tensors.items() for f in split.needed(wanted[part])]
            _check_digests(path, files, ["state.json", *(file.name for file in needed)])
            size = sum(split.bytes_of(wanted[part]) for part, split in tensors.items())
            if memory is not None and size > memory:
                raise CheckpointCorrupt(f"the wanted rows of {path} are larger than the memory")
        for part, layout in self.expected.items():
            if part not in tensors:
                raise ConfigError(f"{path} has no tensors '{part}'; it has {', '.join(tensors)}")
            compare_layouts(tensors[part].whole, layout, path)
        return {part: split.read(wanted[part]) for part, split in tensors.items()}


def _entry(path: Path, sharded: bool = False) -> dict[str, Any]:
    """What the manifest says about a file.

    A process that reads one shard needs the headers of all, so each has a digest of its own.
    """
    facts = {"size": path.stat().st_size, "sha256": sha256(path)}
    return facts | ({"header": header_sha256(path)} if sharded else {})


def _put_manifest(
    folder: Path, step: int, run: Mapping[str, str], files: _Files, sharded: bool = False
) -> None:
    """Write the manifest of a folder which is still temporary.

    Args:
        folder: of one checkpoint, complete but for its manifest.
        step: of training.
        run: digests of what the checkpoint belongs to.
        files: all files of the checkpoint.
        sharded: whether parts may have several files.
    """
    kind = _SHARDED if sharded else _FORMAT
    manifest = sealed({"format": kind, "step": step, "files": files, "run": dict(run)})
    put_bytes(folder / _MANIFEST, to_json(manifest, indent=2).encode())


def _read_manifest(folder: Path, step: int, run: Mapping[str, str]) -> dict[str, Any]:
    """The manifest of a checkpoint of this step and run, with the keys of its format alone."""
    manifest = read_sealed(folder / _MANIFEST, _MAX_MANIFEST, since="run")
    version = manifest.get("format")
    if type(version) is not int or version not in _KEYS:
        raise CheckpointCorrupt(f"{folder} is not a checkpoint of a format from 1 to {_SHARDED}")
    if odd := sorted(manifest.keys() ^ _KEYS[version]):
        raise CheckpointCorrupt(f"{folder} has a manifest that lacks or does not know {odd[0]!r}")
    files = manifest["files"]
    if manifest["step"] != step or not isinstance(files, dict) or "state.json" not in files:
        raise CheckpointCorrupt(f"{folder} has a manifest of another step or without files")
    _check_run(folder, manifest.get("run", {}), run)
    return manifest


def _check_run(folder: Path, stored: Any, wanted: Mapping[str, str]) -> None:
    if stored == dict(wanted):
        return
    known = stored if isinstance(stored, dict) else {}
    names = [name for name in {**known, **wanted} if known.get(name) != wanted.get(name)]
    raise CheckpointCorrupt(
        f"{folder} does not belong to this run, or {names[0] if names else 'a file'} was changed "
        f"since it was saved; put the file back as it was"
    )


def _check_sizes(folder: Path, files: Mapping[str, Any], limit: int | None) -> None:
    """Refuse a checkpoint whose files have other names or sizes than the manifest says.

    More than `limit` bytes in all are refused before any file is read through.
    """
    for name, facts in files.items():
        if not _FILE.fullmatch(name) or not isinstance(facts, dict):
            raise CheckpointCorrupt(f"{folder} has a manifest with the strange file name {name!r}")
        size = size_of(folder / name)
        if facts.keys() - {"header"} != {"size", "sha256"} or size != facts["size"]:
            raise CheckpointCorrupt(
                f"{folder / name} has {size} bytes where the manifest says {facts.get('size')!r}"
            )
        limit = None if limit is None else limit - size
        if limit is not None and limit < 0:
            raise CheckpointCorrupt(f"{folder / name} is larger than it can be")


def _check_headers(folder: Path, files: Mapping[str, Any]) -> None:
    """Refuse shards whose header is not what the manifest says."""
    for name, facts in files.items():
        if "header" in facts and header_sha256(folder / name) != facts["header"]:
            raise CheckpointCorrupt(f"{folder / name} is not what was saved: its header differs")


def _check_digests(folder: Path, files: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse files whose content is not what the manifest says; each is read through once."""
    for name in names:
        if sha256(folder / name) != files[name]["sha256"]:
            raise CheckpointCorrupt(f"{folder / name} is not what was saved: its SHA-256 differs")


class _CheckpointFolder(NamedTuple):
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
    return sorted({checkpoint.step for checkpoint in _checkpoints_in(Path(folder))})


def _checkpoints_in(folder: Path) -> list[_CheckpointFolder]:
    """Checkpoints in a folder, newest first; for one step, the folder put in place last.

    A listing beside a writer can miss a folder during its rename. So an empty listing is repeated
    while there are signs of a checkpoint.
    """
    folders: list[_CheckpointFolder] = []
    with storage_errors("read", folder):
        for _ in range(100):
            paths = list(folder.iterdir()) if folder.exists() else []
            folders = [each for path in paths if (each := _as_checkpoint(path))]
            if folders or not any(path.name.startswith((".tmp-", "step-")) for path in paths):
                break
    return sorted(folders, reverse=True)


def _as_checkpoint(path: Path) -> _CheckpointFolder | None:
    match = _FOLDER.fullmatch(path.name)
    with contextlib.suppress(FileNotFoundError):
        if match and path.is_dir():
            return _CheckpointFolder(int(match[1]), match[2] is None, path, _identity(path))
    return None


def _put_in_place(fresh: Path, target: Path) -> None:
    """Rename a complete folder; a former one of the same step stays until then."""
    former = target.with_name(f"{target.name}-old")
    if target.exists():
        if former.exists():
            os.replace(former, fresh.with_name(former.name))
        os.replace(target, former)
    os.replace(fresh, target)
    sync(target.parent)


def _prune(folder: Path, step: int, keep: int, stage: Path) -> None:
    """Rename superfluous checkpoints before any of their files is removed."""
    wanted = [saved for saved in steps(folder) if saved <= step][-keep:]
    for checkpoint in _checkpoints_in(folder):
        if checkpoint.step in wanted:
            wanted.remove(checkpoint.step)
        else:
            os.replace(checkpoint.path, stage / f"{checkpoint.path.name}-gone")
    sync(folder)
