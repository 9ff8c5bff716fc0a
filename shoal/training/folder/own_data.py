"""Which networks and data a run can load from its config, and what to type otherwise.

A folder stores the names of registered networks and data sets. It cannot store a network from the
user's own function, or data from the user's own arrays. For these, messages name the Python call.
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, StorageError
from shoal.data.batches.sources import gathered
from shoal.data.dataset import Dataset, registry, training_part
from shoal.data.load import load as load_data
from shoal.training.folder.run import Run, RunFolder, is_adopted

__all__ = [
    "OWN_DATA",
    "PREPARED_BY",
    "again",
    "data_name",
    "has_own_data",
    "has_own_network",
    "own_data",
    "what_to_type",
]

OWN_DATA = "own data"
"""Name of data without a name: arrays and loaders."""

PREPARED_BY = "prepared_by"
"""Key of the config's data: the estimator whose preprocessing made the inputs of the networks."""

_TYPES = {"tuple", "list", "DataLoader", "TensorDataset"}
"""Names of own data in older runs."""

_TAKES = {
    "evaluate": ("(x_test, y_test)", ""),
    "landscape": ("(x, y)", "test=(x_test, y_test)"),
    "evidence": ("(x, y)", "test=(x_test, y_test)"),
    "fidelity": ("(x, y)", "test=(x_test, y_test)"),
    "grow": ("", "data=(x, y)"),
    "draw": ("", "data=(x, y)"),
    "worth": ("(x_test, y_test)", ""),
    "chains": ("(x_test, y_test)", ""),
    "predict": ("x", ""),
    "export": ("'model.onnx'", "x=x"),
    "compress": ("to", "test=(x_test, y_test)"),
}
"""Arguments of each function after the run: positional, and keyword."""


def has_own_network(config: Mapping[str, Any]) -> bool:
    """Whether the networks come from the user's own function."""
    models = config.get("model")
    tables = models if isinstance(models, list) else [models]
    return any(isinstance(table, Mapping) and "custom" in table for table in tables)


def has_own_data(config: Mapping[str, Any]) -> bool:
    """Whether the data have no registered name."""
    data = config.get("data")
    name = data.get("name") if isinstance(data, Mapping) else data
    return name not in registry


def data_name(config: Mapping[str, Any]) -> str:
    """Name of the data.

    >>> data_name({"data": {"name": "digits"}}), data_name({"data": {"custom": "wine"}})
    ('digits', 'wine')
    """
    data = config.get("data", OWN_DATA)
    if isinstance(data, Mapping):
        data = data.get("name") or data.get("custom") or OWN_DATA
    return OWN_DATA if data in _TYPES else str(data)


def what_to_type(verb: str, config: Mapping[str, Any], folder: Path | str | None = None) -> str:
    """The command to type, or the Python call for a run with own networks or data.

    >>> what_to_type("evaluate", {"data": "digits"}, "runs/first")
    'shoal evaluate runs/first'
    >>> what_to_type("evaluate", {"data": "tuple", "model": [{"custom": "<lambda>"}]}, "runs/first")
    "shoal.evaluate(shoal.load('runs/first', build), (x_test, y_test))"
    >>> what_to_type("worth", {"data": "tuple"}, "runs/first")
    "shoal.load('runs/first').worth((x_test, y_test))"

    Args:
        verb: a command that is also a function.
        config: the run's config.
        folder: the run's folder; None for a run in memory.
    """
    own_network, data_is_own = has_own_network(config), has_own_data(config)
    if folder is not None and is_adopted(config):
        return _typed_for_adopted(verb, data_is_own, folder)
    if folder is not None and not own_network and not data_is_own:
        return f"shoal {verb} {shlex.quote(str(folder))}"
    if folder is None:
        source = "run"
    else:
        source = f"shoal.load({str(folder)!r}, build)" if own_network else repr(str(folder))
    place, name = _TAKES[verb]
    if verb in ("worth", "chains"):  # methods of the run
        source = f"shoal.load({source})" if source.startswith("'") else source
        return f"{source}.{verb}({place if data_is_own else ''})"
    arguments = [place, name] if data_is_own or verb in ("predict", "export", "compress") else []
    return f"shoal.{verb}({', '.join(filter(None, [source, *arguments]))})"


def _typed_for_adopted(verb: str, data_is_own: bool, folder: Path | str) -> str:
    """The command for networks that came from files; their function is typed again."""
    file = " FILE" if verb == "predict" else ""
    data = " --data DATA" if data_is_own and verb != "predict" else ""
    method = " method=f-kde" if verb == "grow" else ""
    where = shlex.quote(str(folder))
    return f"shoal {verb} {where}{file} --model MODULE:FUNCTION{data}{method}"


def again(verb: str, folder: Path | str) -> str:
    """What to type to recompute a file of a run folder."""
    try:
        return what_to_type(verb, RunFolder(Path(folder)).config(), folder)
    except StorageError:
        return f"shoal {verb} {shlex.quote(str(folder))}"


def own_data(run: Run, name: str, advice: str, whole: bool = False) -> Dataset:
    """The data of a run in memory, or those named in its config.

    Training data that the run held out are its validation data.

    Args:
        run: the run.
        name: name of the run in the error message.
        advice: what the error message suggests.
        whole: with all training data, also those that were held out.
    """
    if (known := _in_memory(run)) is not None:
        return known if whole else _divided(run, known)
    if is_adopted(run.config) and "data" not in run.config:
        raise ConfigError(f"{name} was adopted without data, so its data are not known; {advice}")
    if has_own_data(run.config):
        raise ConfigError(f"{name} was trained on your own data, which cannot be loaded; {advice}")
    try:
        data = load_data(run.config.get("data", ""))
    except ConfigError as error:
        raise ConfigError(f"the data of {name} cannot be loaded: {error}; {advice}") from error
    return data if whole else _divided(run, data)


def _divided(run: Run, data: Dataset) -> Dataset:
    """The data set as the run has trained on it."""
    share = run.config.get("validation")
    return training_part(data, share, run.config["seed"]) if isinstance(share, float) else data


def _in_memory(run: Run) -> Dataset | None:
    """The data that `fit` got, with validation data of the user's own; None if there are none."""
    given = getattr(run, "given", None)
    if given is None or not isinstance(given.data, Dataset) and not hasattr(given.data, "__len__"):
        return None  # a stream may have no end
    data, dtype = given.data, run.ensemble.dtype
    if not isinstance(data, Dataset):
        split = gathered(data, dtype, given.weight)
        data = Dataset(data_name(run.config), split)
    validation = given.validation
    if isinstance(validation, Dataset):
        validation = validation.validation
    return data if validation is None else replace(data, validation=gathered(validation, dtype))
