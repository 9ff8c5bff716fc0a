"""The data that a run was trained on, loaded again by what it remembers of them."""

from shoal.core.errors import ConfigError
from shoal.data.dataset import Dataset
from shoal.data.load import load as load_data
from shoal.training.run import Run

__all__ = ["own_data"]


def own_data(run: Run, name: str, advice: str) -> Dataset:
    """The data set named in the config.

    Args:
        run: which run.
        name: what it is called where it cannot be done.
        advice: what to do then.
    """
    try:
        return load_data(run.config.get("data", ""))
    except ConfigError as error:
        raise ConfigError(
            f"the data of {name} cannot be loaded again: {error}; {advice}"
        ) from error
