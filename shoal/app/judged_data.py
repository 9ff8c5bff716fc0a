"""The data on which a run is looked at: those that were asked for, or its own."""

from shoal.app.overrides import parse_value
from shoal.core.errors import ConfigError
from shoal.data import Dataset
from shoal.data import load as load_data
from shoal.training.run import Run

__all__ = ["judged_data"]


def judged_data(run: Run, folder: str, asked: str | None) -> Dataset:
    """What `--data` names; without it the data that the run was trained on, loaded again."""
    if asked is not None:
        return load_data(parse_value(asked, "--data"))
    try:
        return load_data(run.config.get("data", ""))
    except ConfigError as error:
        raise ConfigError(
            f"the data of {folder} cannot be loaded again: {error}; say which with --data"
        ) from error
