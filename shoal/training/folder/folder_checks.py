"""Checks of the files in a run folder, before they are used.

A folder may come from anyone. A table is valid only if its keys are known and its values have the
types that training writes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointCorrupt, ShoalError, StorageError
from shoal.core.registry import nearest
from shoal.core.storage.checkpoints import Checkpoint
from shoal.core.values import describe_value
from shoal.engine.members.member_runner import MemberRunner
from shoal.training.options.options import stored_method
from shoal.training.options.settings import Settings

__all__ = ["checked_config", "checked_provenance", "checked_state", "continuing"]

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

_CONFIG: dict[str, Check] = {
    **dict.fromkeys(("data", "method", "likelihood", "prior", "schedule", "annealing"), _SPEC),
    **dict.fromkeys(("optimizer", "augment"), _SPEC),
    **dict.fromkeys(("members", "init_seed", "epochs", "steps", "batch_size", "seed"), _WHOLE),
    **dict.fromkeys(("keep_every", "frozen", "patience"), _WHOLE),
    **dict.fromkeys(("strength", "lr", "temperature", "noise", "clip"), _NUMBER),
    **dict.fromkeys(("legacy", "calibrated"), _FLAG),
    **dict.fromkeys(("precision", "engine", "keep"), _TEXT),
    "validation": ("a share or a table", lambda v: _is_number(v) or isinstance(v, dict)),
    "adversarial": _TABLE,
    "asked": ("a table with a method", lambda v: isinstance(v, dict) and _is_spec(v.get("method"))),
    "outputs": ("a name or a position", lambda value: isinstance(value, str) or _is_whole(value)),
    "model": _TABLES,
}
_KEYS = {*_CONFIG, *(field.name for field in fields(Settings))}

_PROVENANCE: dict[str, Check] = {
    **dict.fromkeys(("versions", "data"), _TABLE),
    "seconds": _NUMBER,
    "notes": _TEXTS,
    "pixel_range": _RANGE,
    "run_id": ("text", lambda value: value is None or isinstance(value, str)),
}

_STATE: dict[str, Check] = {
    "step": _WHOLE,
    "history": ("rows, or a reference to rows", lambda value: isinstance(value, list | dict)),
    "optimizer": _TABLE,
    "mapping": _TABLE,
}
_LATER_STATE: dict[str, Check] = {
    "ended": _TEXT,
    "best": ("a table with an epoch", lambda v: isinstance(v, dict) and _is_whole(v.get("epoch"))),
}
"""Values that checkpoints may lack: older ones do."""

_MAPPING: dict[str, Check] = {
    "kind": ("'vmap' or 'loop'", lambda value: value in ("vmap", "loop")),
    "chunk": ("a size", lambda value: value is None or (_is_whole(value) and value > 0)),
    "streams": ("a count", lambda value: _is_whole(value) and value > 0),
    "compiled": _FLAG,
    "recompute": _FLAG,
}


def checked_config(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config of a run, if all keys are known and all values have the right types."""
    for key in table:
        if key not in _KEYS:
            raise StorageError(
                f"{path} has a key {key!r} that Shoal does not know; {nearest(key, _KEYS)}"
            )
    _check(table, _CONFIG, path, StorageError)
    if "method" in table:
        table["method"] = stored_method(table["method"])
    return table


def checked_provenance(table: dict[str, Any], path: Path) -> dict[str, Any]:
    """The provenance of a run, if all values have the right types."""
    _check(table, _PROVENANCE, path, CheckpointCorrupt)
    return table


def checked_state(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint, if all have the right types."""
    state = checkpoint.state
    for key in _STATE:
        if key not in state:
            raise CheckpointCorrupt(f"a checkpoint in {path} has no {key!r}")
    _check(state, _STATE | _LATER_STATE, path, CheckpointCorrupt)
    _check(state["mapping"], _MAPPING, path, CheckpointCorrupt)
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
