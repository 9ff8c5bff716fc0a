"""Checkpoints that survive a kill at any moment, and detect any changed byte.

A checkpoint is a folder `step-000000120` with a safetensors file per group of tensors,
`state.json`, and `manifest.json`. Several processes write a file each per group
(`core.storage.shards`). The manifest has the size and SHA-256 of each file, the run, and its own
SHA-256. A checkpoint is written under a temporary name and renamed when complete, so every folder
with a proper name was once complete. If the same step is saved again, the former folder stays as
`step-000000120-old` until the new folder is in place.
"""

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalWarning, StorageError
from shoal.core.exchange import Alone, Exchange, agreed
from shoal.core.storage.checkpoint_folders import Found, checkpoints_in, prune, put_in_place, steps
from shoal.core.storage.disk import machine_memory, staging, storage_errors, sweep, sync
from shoal.core.storage.files import (
    MAX_JSON,
    MAX_TABLE,
    Layout,
    bytes_in,
    compare_layouts,
    put_bytes,
    put_tensors,
    read_json,
)
from shoal.core.storage.formats import to_json
from shoal.core.storage.manifest import (
    PART,
    SHARDED,
    Files,
    check_digests,
    check_headers,
    check_sizes,
    entry,
    put_manifest,
    read_manifest,
)
from shoal.core.storage.shards import Rows, Shard, SplitTensors, parts_in

__all__ = ["Checkpoint", "load_checkpoint", "save_checkpoint", "steps"]


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

    def fill() -> Files:
        with storage_errors("write", target, _bytes(parts, text)):
            return _fill(fresh, parts, text, shard)

    def finish() -> None:
        if shard.first:
            with storage_errors("write", target, _bytes(parts, text)):
                put_manifest(fresh, step, run or {}, files, shard.count > 1)
                sync(fresh)
                put_in_place(fresh, target)
                prune(folder, step, keep, fresh.parent)

    with contextlib.ExitStack() as stack:
        fresh = folder / str(agreed(exchange, begin)[0]) / target.name
        each = agreed(exchange, fill)
        files = dict(sorted(item for found in each for item in found.items()))
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
        if not PART.fullmatch(part):
            raise ConfigError(f"a part of a checkpoint wants a plain name, not '{part}'")
    text = to_json(dict(state), indent=2).encode()
    if len(text) > MAX_TABLE:
        raise ConfigError(f"the state has {len(text)} bytes as JSON; store large values as tensors")
    return text


def _fill(
    fresh: Path, parts: Mapping[str, Mapping[str, Tensor]], state: bytes, shard: Shard
) -> Files:
    """Write the files of this process; returns what the manifest says about them."""
    if not fresh.is_dir():
        raise StorageError(
            f"process {shard.exchange.rank} does not see {fresh}; "
            f"put the run's folder on a disk that all processes share"
        )
    files: Files = {}
    for part, tensors in parts.items():
        name = shard.file(part)
        if shard.first or part in shard.parts:
            put_tensors(fresh / name, tensors)
            files[name] = entry(fresh / name, sharded=name != f"{part}.safetensors")
    if shard.first:
        put_bytes(fresh / "state.json", state)
        files["state.json"] = entry(fresh / "state.json")
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
    damaged: dict[Found | str, StorageError] = {}
    while True:
        waiting = [found for found in checkpoints_in(folder) if found not in damaged]
        # The first process leads: others may still see an older listing of a network disk.
        chosen = exchange.gather([waiting[0].path.name, waiting[0].step] if waiting else None)[0]
        if chosen is None:
            break
        found = _attempt(read, folder / chosen[0], chosen[1], exchange)
        if not exchange.gather(bool(waiting) and waiting[0].unmoved())[0]:
            continue
        if isinstance(found, StorageError):
            damaged[waiting[0] if waiting else chosen[0]] = found
            continue
        for error in damaged.values():
            message = f"{error}; step {chosen[1]} is used instead"
            warnings.warn(message, ShoalWarning, stacklevel=2)
        return found
    if not damaged:
        raise StorageError(f"{folder} has no checkpoint; train first, or name another folder")
    newest = next(iter(damaged.values()))
    raise CheckpointCorrupt(f"every checkpoint in {folder} is damaged; the newest: {newest}")


def _attempt(
    read: "_Reader", path: Path, step: int, exchange: Exchange
) -> Checkpoint | StorageError:
    """The checkpoint if all processes could read theirs; otherwise the error of one of them."""
    found: list[Checkpoint] = []
    try:
        agreed(exchange, lambda: found.append(read(path, step)))
    except StorageError as error:
        return error
    return found[0]


class _Reader(NamedTuple):
    """Reads one checkpoint, as `load_checkpoint` was asked to."""

    expected: Mapping[str, Layout]
    run: Mapping[str, str]
    limit: int | None
    rows: Rows | None

    def __call__(self, path: Path, step: int) -> Checkpoint:
        manifest = read_manifest(path, step, self.run)
        files, memory = manifest["files"], machine_memory()
        limits = [self.limit, memory if self.rows is None else None]
        check_sizes(path, files, min((most for most in limits if most is not None), default=None))
        check_headers(path, files)
        if self.rows is None:
            check_digests(path, files, files)
        names = [name.removesuffix(".safetensors") for name in files if name != "state.json"]
        parts = parts_in(names, manifest["format"] == SHARDED, path)
        with contextlib.ExitStack() as stack:
            tensors = {
                part: stack.enter_context(
                    SplitTensors(part, [path / f"{name}.safetensors" for name in split]).open()
                )
                for part, split in parts.items()
            }
            found = self._tensors(path, tensors, files, memory)
        state = read_json(path / "state.json", MAX_JSON if manifest["format"] == 1 else MAX_TABLE)
        if not isinstance(state, dict):
            raise CheckpointCorrupt(f"{path / 'state.json'} does not contain a table")
        return Checkpoint(step, found, state)

    def _tensors(
        self,
        path: Path,
        tensors: dict[str, SplitTensors],
        files: Files,
        memory: int | None,
    ) -> dict[str, dict[str, Tensor]]:
        wanted = {part: split.wanted(self.rows) for part, split in tensors.items()}
        if self.rows is not None:
            needed = [f for part, split in tensors.items() for f in split.needed(wanted[part])]
            check_digests(path, files, ["state.json", *(file.name for file in needed)])
            size = sum(split.bytes_of(wanted[part]) for part, split in tensors.items())
            if memory is not None and size > memory:
                raise CheckpointCorrupt(f"the wanted rows of {path} are larger than the memory")
        for part, layout in self.expected.items():
            if part not in tensors:
                raise ConfigError(f"{path} has no tensors '{part}'; it has {', '.join(tensors)}")
            compare_layouts(tensors[part].whole, layout, path)
        return {part: split.read(wanted[part]) for part, split in tensors.items()}
