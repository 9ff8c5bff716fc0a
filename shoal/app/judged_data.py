"""The run and the data that a command is about, and the Python call where it has neither."""

from pathlib import Path
from typing import Any

from shoal.app.overrides import parse_value
from shoal.core.errors import ConfigError
from shoal.data import load as load_data
from shoal.data.dataset import Dataset
from shoal.training.own_data import has_own_network, own_data, what_to_type
from shoal.training.run import Run, RunFolder, load

__all__ = ["judged_data", "opened_for"]


def opened_for(verb: str, folder: str) -> Run:
    """The run in a folder; one with a network of the user's own is a matter for Python."""
    config: dict[str, Any] = RunFolder(Path(folder)).config()
    if has_own_network(config):
        raise ConfigError(
            f"the network of {folder} was made by your own function, which only Python has; "
            f"type: {what_to_type(verb, config, folder)}"
        )
    return load(folder)


def judged_data(run: Run, folder: str, asked: str | None, verb: str) -> Dataset:
    """What `--data` names; without it the data that the run was trained on, loaded again."""
    if asked is not None:
        return load_data(parse_value(asked, "--data"))
    call = what_to_type(verb, run.config, folder)
    return own_data(run, folder, f"say which with --data, or in Python type: {call}")
