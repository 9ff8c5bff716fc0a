"""What a run can make again from its config, and what to type where it needs its user for it.

A folder names registered networks and data sets. A network from the user's own function, or data
from the user's own arrays, it cannot make: then the Python call is told that takes them.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, StorageError
from shoal.data.dataset import Dataset, registry
from shoal.data.load import load as load_data
from shoal.training.run import Run, RunFolder

__all__ = [
    "OWN_DATA",
    "again",
    "data_name",
    "has_own_data",
    "has_own_network",
    "own_data",
    "what_to_type",
]

OWN_DATA = "own data"
"""What arrays and loaders are called, which have no name."""

_TYPES = {"tuple", "list", "DataLoader", "TensorDataset"}
"""What older runs say in place of a name."""

_TAKES = {
    "evaluate": ("(x_test, y_test)", ""),
    "landscape": ("(x, y)", "test=(x_test, y_test)"),
    "evidence": ("(x, y)", "test=(x_test, y_test)"),
    "grow": ("", "data=(x, y)"),
    "predict": ("x", ""),
}
"""What each function takes after the run: by place, and by name."""


def has_own_network(config: Mapping[str, Any]) -> bool:
    """Its networks were made by a function of the user's."""
    models = config.get("model")
    tables = models if isinstance(models, list) else [models]
    return any(isinstance(table, Mapping) and "custom" in table for table in tables)


def has_own_data(config: Mapping[str, Any]) -> bool:
    """Its data have no name by which they could be loaded again."""
    data = config.get("data")
    name = data.get("name") if isinstance(data, Mapping) else data
    return name not in registry


def data_name(config: Mapping[str, Any]) -> str:
    """What the data are called.

    >>> data_name({"data": {"name": "digits"}}), data_name({"data": {"custom": "wine"}})
    ('digits', 'wine')
    """
    data = config.get("data", OWN_DATA)
    if isinstance(data, Mapping):
        data = data.get("name") or data.get("custom") or OWN_DATA
    return OWN_DATA if data in _TYPES else str(data)


def what_to_type(verb: str, config: Mapping[str, Any], folder: Path | str | None = None) -> str:
    """The command that does it, or the Python call where the command could not.

    >>> what_to_type("evaluate", {"data": "digits"}, "runs/first")
    'shoal evaluate runs/first'
    >>> what_to_type("evaluate", {"data": "tuple", "model": [{"custom": "<lambda>"}]}, "runs/first")
    "shoal.evaluate(shoal.load('runs/first', build), (x_test, y_test))"

    Args:
        verb: a command that is also a function.
        config: of the run.
        folder: of the run; None for one that is in memory alone.
    """
    own_network, own = has_own_network(config), has_own_data(config)
    if folder is not None and not own_network and not own:
        return f"shoal {verb} {shlex.quote(str(folder))}"
    if folder is None:
        source = "run"
    else:
        source = f"shoal.load({str(folder)!r}, build)" if own_network else repr(str(folder))
    place, name = _TAKES[verb]
    given = [place, name] if own or verb == "predict" else []
    return f"shoal.{verb}({', '.join(filter(None, [source, *given]))})"


def again(verb: str, folder: Path | str) -> str:
    """What to type to have a file in the folder of a run made again."""
    try:
        return what_to_type(verb, RunFolder(Path(folder)).config(), folder)
    except StorageError:
        return f"shoal {verb} {shlex.quote(str(folder))}"


def own_data(run: Run, name: str, advice: str) -> Dataset:
    """The data set named in the config.

    Args:
        run: which run.
        name: what it is called where it cannot be done.
        advice: what to do then.
    """
    if has_own_data(run.config):
        raise ConfigError(
            f"the data of {name} cannot be loaded again: they were your own; {advice}"
        )
    try:
        return load_data(run.config.get("data", ""))
    except ConfigError as error:
        raise ConfigError(
            f"the data of {name} cannot be loaded again: {error}; {advice}"
        ) from error
