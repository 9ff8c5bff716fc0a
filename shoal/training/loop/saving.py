"""Checkpoints of a run, written beside the training.

A save copies the state into host memory and returns; a thread writes the copy. Training waits only
for the copy, and for the write before if that is still in progress. A checkpoint that cannot be
written (disk full, folder read-only) leaves the one before in place: a warning says so, training
goes on, and the next interval tries again. The last save of a run waits, and its error is raised.
"""

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ShoalWarning, StorageError
from shoal.core.exchange import Alone, agreed
from shoal.core.storage.background import BackgroundWriter
from shoal.core.storage.checkpoints import Checkpoint, save_checkpoint
from shoal.core.storage.files import Layout, sealed, write_json
from shoal.core.storage.shards import Shard
from shoal.training.folder.mesh_shards import Shards
from shoal.training.folder.run import RunFolder
from shoal.training.loop.trainer import Trainer

__all__ = ["RunState", "Saver", "host_copy"]

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
                return [folder.history.keep(self.values["history"]), folder.belongings]

        def end() -> None:
            if shard.first:
                write_json(folder.path / "provenance.json", self.provenance)

        kept, run = agreed(shard.exchange, begin)[0]
        values = self.values | {"history": kept}
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
        if not isinstance(error, StorageError):
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
    found: Parts = {}
    for part, tensors in parts.items():
        copies = found[part] = {}
        for name, tensor in tensors.items():
            pinned = tensor.is_cuda
            on_gpu |= pinned
            host = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
            copies[name] = host.copy_(tensor.detach(), non_blocking=pinned)
    if on_gpu:
        torch.cuda.synchronize()
    return found
