"""Resuming a run: which settings must be equal, and which may change.

A run may go on longer than was planned: `epochs`, `steps` and `patience` may change. All other
settings and the data must be those of the run.
"""

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ConfigError
from shoal.training.folder.own_data import has_own_data
from shoal.training.folder.run_folder import CHANGEABLE, RunFolder
from shoal.training.loop.trainer import Trainer
from shoal.training.options.options import DEFAULTS

__all__ = ["check_length", "check_same_data", "check_same_settings", "has_new_length"]


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
    given = {key: _plain(value) for key, value in config.items() if value is not None}
    return {**DEFAULTS, **given}


def _plain(value: Any) -> Any:
    """The value after writing it as TOML and reading it back."""
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
