"""The folder of a run: its files, and what ties them together."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointCorrupt, ConfigError, StorageError
from shoal.core.exchange import Exchange
from shoal.core.storage.checkpoints import Checkpoint, load_checkpoint
from shoal.core.storage.disk import size_of, storage_errors, sync_name
from shoal.core.storage.files import (
    Layout,
    read_sealed,
    read_tensors,
    sealed,
    sha256,
    write_bytes,
    write_json,
    write_text,
)
from shoal.core.storage.formats import MAX_BYTES, parse_toml, to_json, to_toml
from shoal.core.storage.shards import Rows
from shoal.core.types import Tree
from shoal.training.folder.choice import Choice, read_choice
from shoal.training.folder.folder_checks import checked_config, checked_provenance, checked_state
from shoal.training.folder.history_file import HistoryFile, is_row
from shoal.training.mover.prepare import AXES, SHARED

__all__ = ["BEST", "CHANGEABLE", "RunFolder"]

BEST = "best"
"""The tensors of a checkpoint with the members of the best epoch, beside those of the last."""

CHANGEABLE = ("epochs", "steps", "patience")
"""Settings that may change when a run is resumed."""

_CONFIG, _FIRST_CONFIG = "config.toml", "first_config.toml"
"""The settings; and, after a change of the length, the settings with which the run began."""


@dataclass(frozen=True)
class RunFolder:
    """The files of a run.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @cached_property
    def history(self) -> HistoryFile:
        """The rows of the finished epochs."""
        return HistoryFile(self.path / "history.jsonl")

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun in this folder."""
        return (self.path / _CONFIG).exists()

    def is_taken(self) -> ConfigError:
        """The error of a new run in this folder, which holds one."""
        return ConfigError(
            f"{self.path} already holds a run; type resume=True to continue it, "
            f"or choose another folder"
        )

    def refuse_links(self) -> None:
        """Refuse symbolic links before files are written or removed."""
        for name in ("checkpoints", "trajectory"):
            if (self.path / name).is_symlink():
                raise StorageError(
                    f"{self.path / name} is a symbolic link, which no run is written through; "
                    f"replace the link with a folder"
                )

    def begin(self, config: dict[str, Any], provenance: dict[str, Any]) -> None:
        """Write config and provenance."""
        path, text = self.path / _CONFIG, to_toml(config)
        parse_toml(text, str(path))  # an unreadable config must stop the run before training
        write_json(self.path / "provenance.json", sealed(provenance))
        write_text(path, text)
        with storage_errors("write", path, len(text)):
            sync_name(path.parent)  # the lock made the folder, maybe with its parents

    def change_length(self, config: dict[str, Any]) -> None:
        """Write a config with another length; the first config stays, and ties the checkpoints."""
        path, first = self.path / _CONFIG, self.path / _FIRST_CONFIG
        text = to_toml(config)
        if not first.exists():
            write_bytes(first, path.read_bytes())
        write_text(path, text)

    def leave(self, made: bool) -> None:
        """Remove the folder if it was created for a run that never began."""
        if made:
            with suppress(OSError):
                self.path.rmdir()

    def checkpoint(
        self,
        expected: Mapping[str, Layout] | None = None,
        limit: int | None = None,
        rows: Rows | None = None,
        exchange: Exchange | None = None,
    ) -> Checkpoint:
        """The last valid checkpoint of this run, with its history; see `load_checkpoint`."""
        given = expected, self.belongings, limit, rows, exchange
        found = load_checkpoint(self.checkpoints, *given)
        state = checked_state(found, self.checkpoints)
        history = state["history"]
        if isinstance(history, dict):
            history = self.history.read(history, found.step)
        elif not all(is_row(row, epoch) for epoch, row in enumerate(history, 1)):
            raise CheckpointCorrupt(
                f"the history in {self.checkpoints} does not have one row per epoch"
            )
        return replace(found, state=state | {"history": history})

    @cached_property
    def belongings(self) -> dict[str, str]:
        """Digests that tie every checkpoint to this run and to no other run.

        Older runs have no `run_id`; their dict is empty.
        """
        provenance = self.provenance()
        if provenance.get("run_id") is None:
            return {}
        lasting = {key: provenance.get(key) for key in ("run_id", "pixel_range")}
        # Not the number of points: a stream is counted while the run goes on.
        lasting["sha256"] = (provenance.get("data") or {}).get("sha256")
        found = {"provenance.json": hashlib.sha256(to_json(lasting).encode()).hexdigest()}
        for name in (_CONFIG, AXES, SHARED):
            first = self.path / _FIRST_CONFIG
            path = first if name == _CONFIG and first.exists() else self.path / name
            if path.exists():
                found[name] = sha256(path)
        return found

    def ensemble_state(self, checkpoint: Checkpoint) -> Tree:
        """All tensors of the members: those of a checkpoint, and the frozen shared ones.

        A run that keeps its best epoch has these members; other runs have the last members.
        """
        path = self.path / SHARED
        frozen = read_tensors(path) if path.exists() else {}
        return {**frozen, **checkpoint.parts.get(_members_of(checkpoint), {})}

    def likelihood_state(self, checkpoint: Checkpoint) -> Tree:
        """What the likelihood had learned, at the epoch of `ensemble_state`."""
        part = "likelihood" if _members_of(checkpoint) == "ensemble" else f"{BEST}_likelihood"
        return checkpoint.parts.get(part, {})

    def provenance(self) -> dict[str, Any]:
        """Versions, device and data of the run."""
        path = self.path / "provenance.json"
        return checked_provenance(read_sealed(path, since="run_id"), path)

    def choice(self) -> Choice | None:
        """What a search chose for the run; None if there was none."""
        return read_choice(self.path)

    def config(self) -> dict[str, Any]:
        """Every setting of the run."""
        path, first = self.path / _CONFIG, self.path / _FIRST_CONFIG
        if not path.exists():
            raise StorageError(f"{self.path} is not a run: {self._lack()}")
        found = _read_config(path)
        if first.exists():  # checkpoints are tied to this file alone
            before = _read_config(first)
            for key in {**found, **before}:
                if key not in CHANGEABLE and found.get(key) != before.get(key):
                    raise StorageError(
                        f"{path} has another {key} than {first.name}; restore the original file"
                    )
        return found

    def _lack(self) -> str:
        if not self.path.exists():
            return "there is no such folder"
        return "it is a file" if self.path.is_file() else "it has no config.toml"


def _members_of(checkpoint: Checkpoint) -> str:
    """The tensors of the members that a run stands for: those of the best epoch, if it has any."""
    kept = BEST in checkpoint.parts and checkpoint.state.get(BEST) is not None
    return BEST if kept else "ensemble"


def _read_config(path: Path) -> dict[str, Any]:
    if size_of(path) > MAX_BYTES:
        raise StorageError(f"{path} is larger than the limit of {MAX_BYTES:,} bytes")
    with storage_errors("read", path), path.open("rb") as file:
        data = file.read(MAX_BYTES)
    try:
        return checked_config(parse_toml(data.decode(), str(path)), path)
    except UnicodeDecodeError:
        raise StorageError(f"{path} is not text in UTF-8") from None
    except ConfigError as error:
        raise StorageError(str(error)) from None
