"""The data on which a run is looked at: those that were asked for, or its own."""

from shoal.app.overrides import parse_value
from shoal.data import Dataset
from shoal.data import load as load_data
from shoal.training.own_data import own_data
from shoal.training.run import Run

__all__ = ["judged_data"]


def judged_data(run: Run, folder: str, asked: str | None) -> Dataset:
    """What `--data` names; without it the data that the run was trained on, loaded again."""
    if asked is not None:
        return load_data(parse_value(asked, "--data"))
    return own_data(run, folder, "say which with --data")
