"""The folder of a run: its files, what ties them together, and checks before they are used.

A folder may come from anyone. A table is valid only if its keys are known and its values have the
types that training writes.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalError, StorageError
from shoal.core.exchange import Exchange
from shoal.core.registry import nearest
from shoal.core.storage.checkpoints import Checkpoint, load_checkpoint
from shoal.core.storage.disk import read_plain, storage_errors, sync_name
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
from shoal.core.values import describe_value
from shoal.engine.members.member_runner import MemberRunner
from shoal.training.folder.choice import Choice, read_choice
from shoal.training.folder.history import HistoryFile, is_row
from shoal.training.folder.provenance import is_input_table
from shoal.training.mover.prepare import AXES, SHARED
from shoal.training.options.annealing import stored_annealing
from shoal.training.options.options import stored_method
from shoal.training.options.settings import Settings

__all__ = ["BEST", "CHANGEABLE", "DRAWS", "FolderLost", "RunFolder", "checked_config", "continuing"]

BEST = "best"
"""The tensors of a checkpoint with the members of the best epoch, beside those of the last."""

DRAWS = "draws"
"""Key of a config and a provenance: how the members were drawn; see `shoal.draw`."""

CHANGEABLE = ("epochs", "steps", "patience")
"""Settings that may change when a run is resumed."""

_CONFIG, _FIRST_CONFIG = "config.toml", "first_config.toml"
"""The settings; and, after a change of the length, the settings with which the run began."""


class FolderLost(StorageError):
    """The folder of a run was removed or replaced while the run trained."""


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
        for name in ("checkpoints", "trajectory", "logs"):
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

    def check_present(self, run_id: str | None) -> None:
        """Refuse to save into a folder that was removed, or holds another run by now."""
        known = run_id
        with suppress(CheckpointCorrupt):  # the save that follows replaces a damaged file
            known = self.provenance().get("run_id") if self.holds_run else None
        if not self.holds_run or known != run_id:
            raise FolderLost(
                f"cannot write {self.path}: it was removed or replaced during training, so the run "
                f"is not kept; train again, with another folder"
            )

    def change_length(self, config: dict[str, Any]) -> None:
        """Write a config with another length; the first config stays, and ties the checkpoints."""
        path, first = self.path / _CONFIG, self.path / _FIRST_CONFIG
        text = to_toml(config)
        if not first.exists():
            write_bytes(first, read_plain(path))
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
        checkpoint = load_checkpoint(
            self.checkpoints, expected, self.belongings, limit, rows, exchange
        )
        state = checked_state(checkpoint, self.checkpoints)
        history = state["history"]
        if isinstance(history, dict):
            history = self.history.read(history, checkpoint.step)
        elif not all(is_row(row, epoch) for epoch, row in enumerate(history, 1)):
            raise CheckpointCorrupt(
                f"the history in {self.checkpoints} does not have one row per epoch"
            )
        return replace(checkpoint, state=state | {"history": history})

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
        digests = {"provenance.json": hashlib.sha256(to_json(lasting).encode()).hexdigest()}
        for name in (_CONFIG, AXES, SHARED):
            first = self.path / _FIRST_CONFIG
            path = first if name == _CONFIG and first.exists() else self.path / name
            if path.exists():
                digests[name] = sha256(path)
        return digests

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

    def told(self) -> list[str]:
        """The warnings of the run in this folder; none without a run, or for an older one."""
        return self.provenance().get("warnings", []) if self.holds_run else []

    def choice(self) -> Choice | None:
        """What a search chose for the run; None if there was none."""
        return read_choice(self.path)

    def config(self) -> dict[str, Any]:
        """Every setting of the run."""
        path, first = self.path / _CONFIG, self.path / _FIRST_CONFIG
        if not path.exists():
            raise StorageError(f"{self.path} is not a run: {self._lack()}")
        config = _read_config(path)
        if first.exists():  # checkpoints are tied to this file alone
            before = _read_config(first)
            for key in {**config, **before}:
                if key not in CHANGEABLE and config.get(key) != before.get(key):
                    raise StorageError(
                        f"{path} has another {key} than {first.name}; restore the original file"
                    )
        return config

    def _lack(self) -> str:
        if not self.path.exists():
            return "there is no such folder"
        return "it is a file" if self.path.is_file() else "it has no config.toml"


def _members_of(checkpoint: Checkpoint) -> str:
    """The tensors of the members that a run stands for: those of the best epoch, if it has any."""
    kept = BEST in checkpoint.parts and checkpoint.state.get(BEST) is not None
    return BEST if kept else "ensemble"


def _read_config(path: Path) -> dict[str, Any]:
    data = read_plain(path, MAX_BYTES)
    try:
        return checked_config(parse_toml(data.decode(), str(path)), path)
    except UnicodeDecodeError:
        raise StorageError(f"{path} is not text in UTF-8") from None
    except ConfigError as error:
        raise StorageError(str(error)) from None


Check = tuple[str, Callable[[Any], bool]]


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) <= 2**63


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _is_spec(value: Any) -> bool:
    return isinstance(value, str | dict)


_WHOLE: Check = "a whole number", _is_whole
_NUMBER: Check = "a number", _is_number
_FLAG: Check = "true or false", lambda value: isinstance(value, bool)
_TEXT: Check = "text", lambda value: isinstance(value, str)
_TABLE: Check = "a table", lambda value: isinstance(value, dict)
_SPEC: Check = "a name or a table", _is_spec
_TABLES: Check = (
    "a list of tables",
    lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value),
)
_TEXTS: Check = (
    "a list of sentences",
    lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
)
_RANGE: Check = (
    "two numbers",
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)),
)

_CONFIG_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("data", "method", "likelihood", "prior", "schedule", "annealing"), _SPEC),
    **dict.fromkeys(("optimizer", "augment"), _SPEC),
    **dict.fromkeys(("members", "init_seed", "epochs", "steps", "batch_size", "seed"), _WHOLE),
    **dict.fromkeys(("keep_every", "frozen", "patience", "folds"), _WHOLE),
    **dict.fromkeys(("strength", "lr", "temperature", "noise", "clip"), _NUMBER),
    **dict.fromkeys(("legacy", "calibrated"), _FLAG),
    **dict.fromkeys(("precision", "engine", "keep", "batches"), _TEXT),
    "validation": ("a share or a table", lambda v: _is_number(v) or isinstance(v, dict)),
    "adversarial": _TABLE,
    DRAWS: _TABLE,
    "asked": ("a table with a method", lambda v: isinstance(v, dict) and _is_spec(v.get("method"))),
    "outputs": ("a name or a position", lambda value: isinstance(value, str) or _is_whole(value)),
    "model": _TABLES,
}
_CONFIG_KEYS = {*_CONFIG_CHECKS, *(field.name for field in fields(Settings))}

_PROVENANCE_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("versions", "data"), _TABLE),
    "seconds": _NUMBER,
    "notes": _TEXTS,
    "warnings": _TEXTS,
    "classes": _TEXTS,
    "made_by": _TABLE,
    "pixel_range": _RANGE,
    "target_shape": ("a list of sizes", lambda v: isinstance(v, list) and all(map(_is_whole, v))),
    "inputs": ("a description of one input", is_input_table),
    "run_id": ("text", lambda value: value is None or isinstance(value, str)),
}

_STATE_CHECKS: dict[str, Check] = {
    "step": _WHOLE,
    "history": ("rows, or a reference to rows", lambda value: isinstance(value, list | dict)),
    "optimizer": _TABLE,
    "mapping": _TABLE,
}
_LATER_STATE_CHECKS: dict[str, Check] = {
    "ended": _TEXT,
    "best": ("a table with an epoch", lambda v: isinstance(v, dict) and _is_whole(v.get("epoch"))),
}
"""Values that checkpoints may lack: older ones do."""

_RUNNER_CHECKS: dict[str, Check] = {
    "kind": ("'vmap' or 'loop'", lambda value: value in ("vmap", "loop")),
    "chunk": ("a size", lambda value: value is None or (_is_whole(value) and value > 0)),
    "streams": ("a count", lambda value: _is_whole(value) and value > 0),
    "compiled": _FLAG,
    "recompute": _FLAG,
}


def checked_config(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config of a run, if all keys are known and all values have the right types."""
    for key in table:
        if key not in _CONFIG_KEYS:
            raise StorageError(
                f"{path} has a key {key!r} that Shoal does not know; {nearest(key, _CONFIG_KEYS)}"
            )
    _check(table, _CONFIG_CHECKS, path, StorageError)
    if "method" in table:
        table["method"] = stored_method(table["method"])
    if "annealing" in table:
        table["annealing"] = stored_annealing(table["annealing"])
    return table


def checked_provenance(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """The provenance of a run, if all values have the right types."""
    _check(table, _PROVENANCE_CHECKS, path, CheckpointCorrupt)
    return table


def checked_state(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint, if all have the right types."""
    state = checkpoint.state
    for key in _STATE_CHECKS:
        if key not in state:
            raise CheckpointCorrupt(f"a checkpoint in {path} has no {key!r}")
    _check(state, _STATE_CHECKS | _LATER_STATE_CHECKS, path, CheckpointCorrupt)
    _check(state["mapping"], _RUNNER_CHECKS, path, CheckpointCorrupt)
    odd = sorted(state["mapping"].keys() - {field.name for field in fields(MemberRunner)})
    if odd or state["step"] != checkpoint.step:
        raise CheckpointCorrupt(f"a checkpoint in {path} has {odd or 'the state of another step'}")
    return state


@contextmanager
def continuing(path: Path) -> Iterator[None]:
    """Turns whatever a crafted state does to an optimiser or a generator into one sentence."""
    try:
        yield
    except ShoalError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointCorrupt(f"a checkpoint in {path} cannot be continued: {reason}") from error


def _check(
    table: Mapping[str, Any], checks: Mapping[str, Check], path: Path, error: type[StorageError]
) -> None:
    for key, (words, fits) in checks.items():
        if key in table and not fits(table[key]):
            raise error(f"in {path}, {key} must be {words}, not {describe_value(table[key])}")
