"""A command's result, as text and as JSON, and functions that several commands share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli.own_network import network_functions
from shoal.core.display.text import counted, number, table
from shoal.core.errors import ConfigError, DataError
from shoal.data import load as load_data
from shoal.data.corruptions import parse_shift
from shoal.data.dataset import Dataset
from shoal.data.load import READERS, load_file
from shoal.data.sets.images import fitted, in_range
from shoal.evaluation.data_arguments import evaluation_data
from shoal.evaluation.evaluate import Evaluation
from shoal.experiment.config import parse_value
from shoal.page.measures import headline
from shoal.training.folder.own_data import has_own_network, own_data, what_to_type
from shoal.training.folder.run import Run, RunFolder, is_adopted, load

__all__ = ["Outcome", "evaluation_dataset", "file_inputs", "opened_for", "scores_text"]


@dataclass(frozen=True)
class Outcome:
    """The result of one command.

    Attributes:
        text: for people.
        value: for programs, with --json.
        status: exit status of the process.
    """

    text: str
    value: Any
    status: int = 0


_OOD_METRICS = ("recognised", "auroc_entropy", "auroc_variance", "fpr95_entropy", "disagreement")
_HEADERS = {"recognised": "detected"}


def scores_text(scores: Mapping[str, Any]) -> str:
    """Metrics on the test set and every shift, then OOD detection metrics.

    Corruptions are shown by their means, since there can be 95 of them.
    """
    shifts = {name: metrics for name, metrics in scores["shifts"].items() if not parse_shift(name)}
    means = {
        f"corrupted, {name.replace('-', ' ')}": metrics
        for name, metrics in scores.get("corrupted", {}).items()
    }
    labelled = {"test": scores["test"], **shifts, **means}
    few = [*headline(Evaluation(dict(scores)).about), "brier"]
    blocks = [_block(labelled, few), _block(scores["ood"], _OOD_METRICS)]
    width = max(map(len, [*labelled, *scores["ood"]]))
    return "\n\n".join(table(rows, header) for header, rows in _padded(blocks, width) if rows)


def _block(splits: Mapping[str, Mapping[str, float]], keys: Sequence[str]) -> tuple:
    shown = [key for key in keys if any(key in scores for scores in splits.values())]
    rows = [[split, *(_cell(scores, key) for key in shown)] for split, scores in splits.items()]
    return ["", *(_HEADERS.get(key, key.replace("_", " ")) for key in shown)], rows


def _cell(scores: Mapping[str, float], key: str) -> str:
    value = scores.get(key)
    return "–" if value is None else number(value, 0.0005)


def _padded(blocks: list[tuple], width: int) -> list[tuple]:
    """Blocks whose first columns are equally wide, so that the tables align."""
    return [(header, [[row[0].ljust(width), *row[1:]] for row in rows]) for header, rows in blocks]


def opened_for(command: str, folder: str, model: Sequence[str] | None = None) -> Run:
    """The run in a folder; a run of the user's own networks needs their functions.

    Args:
        command: the command that opens the run.
        folder: folder of the run.
        model: the functions as they were typed, one per architecture.
    """
    config: dict[str, Any] = RunFolder(Path(folder)).config()
    if not has_own_network(config):
        if model:
            raise ConfigError(f"the network of {folder} is known by name; leave --model out")
        return load(folder)
    if not model:
        call = (
            "" if is_adopted(config) else f", or in Python type: {_call(command, config, folder)}"
        )
        raise ConfigError(
            f"the network of {folder} comes from your own function; "
            f"add --model MODULE:FUNCTION{call}"
        )
    tables: list[dict[str, Any]] = config["model"]
    if len(model) != len(tables):
        raise ConfigError(
            f"{folder} has {counted(len(tables), 'architecture')}, so type --model "
            f"{counted(len(tables), 'time')}, not {len(model)}"
        )
    if not all(isinstance(table.get("members"), int) for table in tables):
        raise ConfigError(f"the config.toml of {folder} does not tell the members of a network")
    builds = network_functions(model)
    pairs = [(build, table["members"]) for build, table in zip(builds, tables, strict=True)]
    return load(folder, pairs)


def evaluation_dataset(run: Run, folder: str, asked: str | None, command: str) -> Dataset:
    """The data set of `--data`; without `--data`, the data set of the run."""
    if asked is not None and Path(asked).suffix.lower() in READERS:
        return _file_dataset(run, asked, command)
    if asked is not None:
        return load_data(parse_value(asked, "--data"))
    call = f", or type in Python: {what_to_type(command, run.config, folder)}"
    call = "" if is_adopted(run.config) else call
    advice = f"name the data with --data{call}"
    return own_data(run, folder, advice, whole=command in WHOLE)


WHOLE = ("grow", "draw")
"""Commands that take all training data: one divides them itself, the other needs no validation."""

TESTS = ("decide", "evaluate", "worth")
"""Commands that need test data alone."""


def _file_dataset(run: Run, file: str, command: str) -> Dataset:
    """A data set whose test set is one file of inputs and targets, as `shoal predict` reads it."""
    if command not in TESTS:
        raise ConfigError(
            f"{command} needs training data; type --data "
            f'\'{{name = "file", train = "{file}", test = "{file}"}}\' with your two files'
        )
    target = None if Path(file).suffix.lower() == ".npz" else _target(run)
    split = load_file(file, target)
    if split.y is None:
        raise DataError(f"{file} has no targets; give a .npz file with the arrays x and y")
    return replace(
        evaluation_data(run, replace(split, x=file_inputs(split.x, run, file))),
        name=Path(file).name,
    )


def _target(run: Run) -> str:
    return "class" if run.likelihood.about.has_classes else "value"


def file_inputs(x: Any, run: Run, file: str) -> Any:
    """Inputs of a file in the shape and in the range of the training inputs.

    Images may come with channels last, and with pixels in [0, 1], the range of files.
    """
    models = run.config.get("model") or [{}]
    x = fitted(x, tuple(models[0].get("input_shape", x.shape[1:])), file)
    low, high = run.provenance.get("pixel_range", (0.0, 1.0))
    if (low, high) == (0.0, 1.0):
        return x
    least, most = (float(end) for end in x.aminmax())
    if least < 0 or most > 1:
        raise DataError(
            f"{file} has pixels from {least:.3g} to {most:.3g}; give them from 0 to 1 or as bytes; "
            f"Shoal rescales them to the training range, {low:.3g} to {high:.3g}"
        )
    return in_range(x, (low, high))


def _call(command: str, config: Mapping[str, Any], folder: str) -> str:
    """The Python call instead of a command; a page needs no network if the run is evaluated."""
    if command == "report":
        return f'shoal.report(shoal.load({folder!r}, build), "page.html", data=(x_test, y_test))'
    if command == "decide":
        return f"{what_to_type('predict', config, folder)}, and a rule of shoal.decisions"
    return what_to_type(command, config, folder)
