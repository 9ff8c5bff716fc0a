"""Saving a run, and what must be equal when the run is resumed.

Checkpoints are written beside the training. A save copies the state into host memory and returns;
a thread writes the copy. Training waits only for the copy, and for the write before if that is
still in progress. A checkpoint that cannot be written (disk full, folder read-only) leaves the one
before in place: a warning says so, training goes on, and the next interval tries again. The last
save of a run waits, and its error is raised.

A run may go on longer than was planned: `epochs`, `steps` and `patience` may change. All other
settings and the data must be those of the run.
"""

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, ShoalWarning, StorageError
from shoal.core.exchange import Alone, agreed
from shoal.core.storage.background import BackgroundWriter
from shoal.core.storage.checkpoints import Checkpoint, save_checkpoint
from shoal.core.storage.files import Layout, sealed, write_json
from shoal.core.storage.shards import Shard
from shoal.training.folder.mesh_shards import Shards
from shoal.training.folder.own_data import has_own_data
from shoal.training.folder.run_folder import CHANGEABLE, FolderLost, RunFolder
from shoal.training.loop.trainer import Trainer
from shoal.training.options.options import DEFAULTS

__all__ = [
    "RunState",
    "Saver",
    "check_length",
    "check_same_data",
    "check_same_settings",
    "has_new_length",
    "host_copy",
]

Parts = dict[str, dict[str, Tensor]]


@dataclass
class RunState:
    """What a checkpoint holds, as it was after one step.

    Attributes:
        step: number of finished steps.
        parts: tensors by group and name.
        values: plain values.
        provenance: the sealed provenance, with the notes so far.
    """

    step: int
    parts: Parts
    values: dict[str, Any]
    provenance: dict[str, Any]

    @classmethod
    def of(cls, trainer: Trainer, provenance: dict[str, Any], notes: list[str]) -> "RunState":
        """The state of a trainer; its tensors are the trainer's own."""
        values = trainer.state()
        values["history"] = list(values["history"])
        table = sealed(provenance | {"notes": list(notes)})
        return cls(trainer.step, trainer.parts(), values, table)

    def write(self, folder: RunFolder, shard: Shard | None = None) -> None:
        """Write the history so far, then a checkpoint that refers to it, and the wall time.

        Of several processes, each gives its shard, and the first writes what is not divided.
        """
        shard = shard or Shard(Alone())

        def begin() -> Any:
            if shard.first:
                folder.check_present(self.provenance.get("run_id"))
                return [folder.history.keep(self.values["history"]), folder.belongings]

        def end() -> None:
            if shard.first:
                write_json(folder.path / "provenance.json", self.provenance)

        reference, run = agreed(shard.exchange, begin)[0]
        values = self.values | {"history": reference}
        save_checkpoint(folder.checkpoints, self.step, self.parts, values, run=run, shard=shard)
        agreed(shard.exchange, end)


@dataclass
class Saver:
    """Writes the checkpoints of one run.

    Attributes:
        folder: the run's folder.
        every: seconds between checkpoints.
        shards: the share of this process; None for one process.
    """

    folder: RunFolder
    every: float
    shards: Shards | None = None

    def __post_init__(self) -> None:
        self._writer = BackgroundWriter()
        self._saved = time.monotonic()
        self._failed = False

    @property
    def due(self) -> float:
        """When the next checkpoint is due."""
        return self._saved + self.every

    def checkpoint(self, expected: Mapping[str, Layout]) -> Checkpoint:
        """What this process continues with, from the last valid checkpoint."""
        if self.shards is None:
            return self.folder.checkpoint(expected)
        rows, exchange = self.shards.rows, self.shards.exchange
        return self.shards.own(self.folder.checkpoint(expected, None, rows, exchange))

    def save(self, trainer: Trainer, provenance: dict[str, Any], notes: list[str]) -> None:
        """Copy the state, and write the copy in the background."""
        self._settle(self._writer.wait())
        state = self._state(trainer, provenance, notes)
        limited = trainer.mover.memory.limit is not None and trainer.ensemble.device.type == "cpu"
        if not limited:
            state.parts = host_copy(state.parts)
        self._writer.start(lambda: state.write(self.folder, self._shard))
        if limited:  # a limit of host memory leaves no room for a copy
            self._settle(self._writer.wait())
        self._saved = time.monotonic()

    def finish(self, trainer: Trainer, provenance: dict[str, Any], notes: list[str]) -> None:
        """Write the last checkpoint, and return when it is on the disk."""
        self._settle(self._writer.wait())
        self._state(trainer, provenance, notes).write(self.folder, self._shard)

    @property
    def _shard(self) -> Shard | None:
        return None if self.shards is None else self.shards.shard

    def _state(self, trainer: Trainer, provenance: dict[str, Any], notes: list[str]) -> RunState:
        state = RunState.of(trainer, provenance, notes)
        if self.shards is not None:
            state.parts = self.shards.share(state.parts)
        return state

    def close(self) -> None:
        """Wait for the write in progress."""
        self._settle(self._writer.wait())

    def _settle(self, error: Exception | None) -> None:
        """Warn of the first of several checkpoints that could not be written."""
        if error is None:
            self._failed = False
            return
        if not isinstance(error, StorageError) or isinstance(error, FolderLost):
            raise error
        if not self._failed and (self._shard is None or self._shard.first):
            self._failed = True
            warnings.warn(
                f"{error}; training goes on, earlier checkpoints stay, and Shoal tries again "
                f"every {self.every:g} s",
                ShoalWarning,
                stacklevel=7,
            )


def host_copy(parts: Mapping[str, Mapping[str, Tensor]]) -> Parts:
    """A copy of all tensors in host memory, which is pinned for tensors of a GPU."""
    on_gpu = False
    host_parts: Parts = {}
    for part, tensors in parts.items():
        copies = host_parts[part] = {}
        for name, tensor in tensors.items():
            pinned = tensor.is_cuda
            on_gpu |= pinned
            host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            copies[name] = host.copy_(tensor.detach(), non_blocking=pinned)
    if on_gpu:
        torch.cuda.synchronize()
    return host_parts


def check_same_settings(folder: RunFolder, config: Mapping[str, Any]) -> None:
    """Refuse settings that differ from those of the run in a folder."""
    known, wanted = _settings(folder.config()), _settings(config)
    # The initial members do not matter: the checkpoint replaces them.
    # What a search was asked for does not matter either: method and strength are its result.
    free = {"init_seed", "asked", *CHANGEABLE}
    for key in {**wanted, **known}:
        if key in free or (key == "data" and has_own_data(known) and has_own_data(wanted)):
            continue
        if known.get(key) != wanted.get(key):
            raise ConfigError(
                f"the run in {folder.path} has {key} = {known.get(key)!r}, this call has "
                f"{wanted.get(key)!r}; resume with the same settings or choose another folder"
            )


def check_same_data(folder: RunFolder, provenance: Mapping[str, Any], counted: bool) -> None:
    """Refuse other data; of a stream, the number of points may not be counted yet."""
    before = folder.provenance()
    known = before.get("data")
    if known != (provenance["data"] if counted else {**(known or {}), "sha256": None}):
        raise ConfigError(
            f"the run in {folder.path} was trained on other data; resume with the same data"
        )
    if before.get("validation") != provenance.get("validation"):
        raise ConfigError(
            f"the run in {folder.path} has other validation data; resume with the same data"
        )


def has_new_length(folder: RunFolder, config: Mapping[str, Any]) -> bool:
    """Whether the run is to go on for another time than its folder says."""
    known, wanted = _settings(folder.config()), _settings(config)
    return any(known.get(key) != wanted.get(key) for key in CHANGEABLE)


def check_length(trainer: Trainer, folder: RunFolder) -> None:
    """Refuse fewer steps than the run has taken."""
    if trainer.step <= trainer.steps:
        return
    options, size = trainer.settings.options, trainer.batches.steps_per_epoch
    unit, wanted, done = "steps", trainer.steps, trainer.step
    if options.steps is None:
        unit, wanted, done = "epochs", wanted // size, -(-done // size)
    raise ConfigError(
        f"the run in {folder.path} has already trained for {done} {unit}, this call has "
        f"{unit}={wanted}; type {unit}={done} or more"
    )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """All settings, with defaults for those that are missing, as read back from a file."""
    settings = {key: _plain(value) for key, value in config.items() if value is not None}
    return {**DEFAULTS, **settings}


def _plain(value: Any) -> Any:
    """The value after writing it as TOML and reading it back."""
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
