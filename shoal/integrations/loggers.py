"""Loggers: the history of a run in TensorBoard, Weights & Biases, MLflow or a CSV file.

    shoal.fit(ensemble, data, loggers=["tensorboard", "csv"], out="runs/first")
    shoal.fit(ensemble, data, loggers=[mine])            # any object with log(dict, step)

A logger gets one row of numbers per epoch, the settings at the beginning and figures at the end.
The history of the run is the truth: a logger is brought up to date from the history and takes only
steps that it does not have. So a resumed run goes on in the same log and doubles nothing.
"""

import csv
import hashlib
import io
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal import plots
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.optional import require
from shoal.core.registry import nearest
from shoal.core.storage.disk import open_plain, read_plain, storage_errors
from shoal.core.storage.files import read_json, write_json, write_text
from shoal.prediction.metrics.calibration import reliability
from shoal.prediction.metrics.regression import pit
from shoal.prediction.predictive import Predictive
from shoal.training.folder.run import Run
from shoal.training.loop.callbacks import Callback, EpochEnd, RunBegin, RunEnd
from shoal.training.loop.validation import Validation, evaluating

__all__ = [
    "NAMES",
    "CsvLogger",
    "Figures",
    "Logger",
    "LoggerCallback",
    "MlflowLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "figures",
    "log_id",
    "logs_folder",
    "make_loggers",
    "numbers",
    "safe_name",
    "settings",
]


class Logger(Protocol):
    """What `fit(loggers=...)` takes.

    A logger may also have `log_config(dict)`, called once with the settings, and
    `log_image(name, png, step)`, called with each figure after the last step.
    """

    def log(self, values: Mapping[str, float], step: int) -> Any:
        """Take the numbers of one epoch, which ended with this step."""
        ...


class CsvLogger:
    """One line per epoch in `logs/history.csv`, with a column for every number."""

    def __init__(self, run: Run) -> None:
        self.path = logs_folder(run) / "history.csv"
        self.columns: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def open(self) -> int:
        """Read the lines of an earlier call; returns the last step."""
        if not os.path.lexists(self.path):
            return -1
        with storage_errors("read", self.path):
            os.close(open_plain(self.path, os.O_RDWR))  # lines are appended to it: no link, no pipe
        text = read_plain(self.path).decode()
        # A killed process may leave half a line.
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        self.rows = list(reader)
        self.columns = list(reader.fieldnames or [])
        if not text.endswith("\n"):
            self._rewrite()
        return int(self.rows[-1]["step"]) if self.rows else -1

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a line; a new column rewrites the file."""
        row = {"step": step, **values}
        self.rows.append(row)
        new = [name for name in row if name not in self.columns]
        if new:
            self.columns += new
            self._rewrite()
            return
        line = self._lines([row]).encode()
        with storage_errors("write", self.path, len(line)):
            descriptor = open_plain(self.path, os.O_WRONLY | os.O_APPEND)
            with open(descriptor, "ab") as file:
                file.write(line)

    def close(self, finished: bool) -> None:
        """Every line is on the disk already."""

    def _rewrite(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = io.StringIO(newline="")
        csv.writer(head, lineterminator="\n").writerow(self.columns)
        write_text(self.path, head.getvalue() + self._lines(self.rows))

    def _lines(self, rows: Sequence[Mapping[str, Any]]) -> str:
        lines = io.StringIO(newline="")
        csv.DictWriter(lines, self.columns, lineterminator="\n").writerows(rows)
        return lines.getvalue()


PROJECT = "shoal"
"""Project of Weights & Biases and experiment of MLflow, unless the user names another."""


class TensorBoardLogger:
    """Event files in `logs/tensorboard`: type `tensorboard --logdir runs`."""

    def __init__(self, run: Run) -> None:
        self.folder = logs_folder(run) / "tensorboard"
        self._config: dict[str, Any] = {}
        self._made: Any = None

    def open(self) -> int:
        """The last step in the event files of earlier calls."""
        if not self.folder.is_dir():
            return -1
        module = "tensorboard.backend.event_processing.event_accumulator"
        events = require(module, extra="loggers").EventAccumulator(str(self.folder), {"scalars": 1})
        events.Reload()
        known = "epoch" in events.Tags()["scalars"]
        return events.Scalars("epoch")[-1].step if known else -1

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Settings, for the first event file."""
        self._config = {} if self.folder.is_dir() else dict(config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Scalars, written at once."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_image(self, name: str, png: bytes, step: int) -> None:
        """A figure."""
        pixels = require("numpy", extra="loggers").asarray(_picture(png))
        self._writer.add_image(f"figures/{name}", pixels, step, dataformats="HWC")

    def close(self, finished: bool) -> None:
        """Write what is left."""
        if self._made is not None:
            self._made.close()

    @property
    def _writer(self) -> Any:
        """Made by the first row, so that a run that never begins leaves no file."""
        if self._made is None:
            # TensorBoard reads files in the order of their names, which have whole seconds.
            while any(self.folder.glob(f"events.out.tfevents.{int(time.time())}.*")):
                time.sleep(0.05)
            self._made = require("torch.utils.tensorboard", extra="loggers").SummaryWriter(
                str(self.folder)
            )
            if self._config:
                self._add_settings()
        return self._made

    def _add_settings(self) -> None:
        """Settings as hyper-parameters of this very log; `add_hparams` would make another."""
        module = require("torch.utils.tensorboard.summary", extra="loggers")
        for summary in module.hparams(self._config, {"loss": 0.0}):
            self._made.file_writer.add_summary(summary)
        lines = [f"| {name} | {value} |" for name, value in self._config.items()]
        self._made.add_text("config", "\n".join(["| setting | value |", "| --- | --- |", *lines]))


class WandbLogger:
    """A run of Weights & Biases, with the id of the Shoal run.

    `WANDB_MODE`, `WANDB_PROJECT`, `WANDB_DIR` and the library's other variables are heard. An
    active `wandb.run` is used and stays open.
    """

    def __init__(self, run: Run) -> None:
        self.wandb: Any = require("wandb", extra="loggers")
        self.run: Any = None
        self._was_active = False
        self._id = log_id(run)
        self._folder = None if run.folder is None else logs_folder(run)
        self._name = None if run.folder is None else run.folder.name

    def open(self) -> int:
        """Begin or continue the run; offline runs have their last step in a file."""
        self.run, self._was_active = self.wandb.run, self.wandb.run is not None
        if not self._was_active:
            place = None if "WANDB_DIR" in os.environ else self._folder
            if place is not None:
                place.mkdir(parents=True, exist_ok=True)
            self.run = self.wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                id=self._id,
                name=self._name,
                dir=None if place is None else str(place),
                resume="allow",
            )
        return max(self._stored_step(), self.run.step - 1)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Settings."""
        self.run.config.update(dict(config), allow_val_change=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A row of history."""
        self.run.log(dict(values), step)
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(self._folder / "wandb.json", {"id": self._id, "step": step})

    def log_image(self, name: str, png: bytes, step: int) -> None:
        """A figure."""
        self.run.log({f"figures/{name}": self.wandb.Image(_picture(png))}, step)

    def close(self, finished: bool) -> None:
        """End the run, if this logger began it."""
        if not self._was_active:
            self.run.finish(exit_code=0 if finished else 1)

    def _stored_step(self) -> int:
        path = None if self._folder is None else self._folder / "wandb.json"
        return int(read_json(path)["step"]) if path is not None and path.exists() else -1


class MlflowLogger:
    """A run of MLflow, with the id of the Shoal run as its tag `shoal.run_id`.

    An active run of MLflow is used and stays open. Else `MLFLOW_TRACKING_URI` or
    `mlflow.set_tracking_uri` say where to log; by default a database in `logs/mlflow`. The
    experiment is `MLFLOW_EXPERIMENT_NAME`, or "shoal".
    """

    BATCH = 500
    """MLflow takes at most 1000 metrics, and 100 settings, at once."""

    def __init__(self, run: Run) -> None:
        self.mlflow: Any = require("mlflow", extra="loggers")
        self._run, self._folder = run, logs_folder(run) / "mlflow"
        self._id, self._was_active = "", False

    def open(self) -> int:
        """Begin or continue the run."""
        active = self.mlflow.active_run()
        self._was_active = active is not None
        uri = (
            None
            if self._was_active or self.mlflow.is_tracking_uri_set()
            else self._store_in_folder()
        )
        self.client = self.mlflow.MlflowClient(tracking_uri=uri)
        self._id = active.info.run_id if active is not None else self._continued(uri is not None)
        known = self.client.get_metric_history(self._id, "epoch")
        return max((metric.step for metric in known), default=-1)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Settings; those of a continued run stay."""
        entities: Any = self.mlflow.entities
        known = self.client.get_run(self._id).data.params
        new = [
            entities.Param(safe_name(name), str(value)[:5000])
            for name, value in config.items()
            if safe_name(name) not in known
        ]
        for some in _batches(new, 100):
            self.client.log_batch(self._id, params=some)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """A row of history."""
        entities, now = self.mlflow.entities, int(1000 * time.time())
        rows = [entities.Metric(safe_name(k), float(v), now, step) for k, v in values.items()]
        for some in _batches(rows, self.BATCH):
            self.client.log_batch(self._id, metrics=some)

    def log_image(self, name: str, png: bytes, step: int) -> None:
        """A figure, as an artifact."""
        self.client.log_image(self._id, _picture(png), artifact_file=f"figures/{name}.png")

    def close(self, finished: bool) -> None:
        """End the run, if this logger began it."""
        if not self._was_active:
            self.client.set_terminated(self._id, "FINISHED" if finished else "KILLED")

    def _store_in_folder(self) -> str:
        """A database inside the run's folder; MLflow keeps no more plain files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{self._folder.absolute() / 'mlflow.db'}"

    def _continued(self, in_folder: bool) -> str:
        """The run with this run's tag, or a new one."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self.client.get_experiment_by_name(name)
        place = (self._folder.absolute() / "artifacts").as_uri() if in_folder else None
        experiment = known.experiment_id if known else self.client.create_experiment(name, place)
        tag = log_id(self._run)
        earlier = self.client.search_runs([experiment], f"tags.`shoal.run_id` = '{tag}'")
        if earlier:
            self.client.update_run(earlier[0].info.run_id, status="RUNNING")
            return earlier[0].info.run_id
        folder = self._run.folder
        name = None if folder is None else folder.name
        new = self.client.create_run(experiment, tags={"shoal.run_id": tag}, run_name=name)
        return new.info.run_id


def _picture(png: bytes) -> Any:
    return require("PIL.Image", extra="report").open(io.BytesIO(png)).convert("RGB")


def _batches(values: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(values)
    while some := list(islice(rest, size)):
        yield some


POINTS = 10_000
"""Most validation points in a figure."""

DPI = 110


class Figures:
    """The figures of a run, drawn once for all its loggers.

    Args:
        held: batches of the run's validation data; None for none.
    """

    def __init__(self, held: Any = None) -> None:
        self._held = held
        self._drawn: list[tuple[str, bytes]] | None = None

    def of(self, run: Run) -> list[tuple[str, bytes]]:
        """Losses, forces, bandwidth and calibration by name; none without matplotlib."""
        if self._drawn is None:
            self._drawn = []
            try:
                self._drawn += figures(run, self._held)
            except Exception as error:  # a figure is not worth a run
                note = f"The loggers get no figures: {type(error).__name__}: {error}"
                warnings.warn(note, ShoalWarning, stacklevel=2)
        return self._drawn


def figures(run: Run, held: Any = None) -> Iterator[tuple[str, bytes]]:
    """The figures of a finished run, as PNG files, by name."""
    try:
        require("matplotlib", extra="report")
    except ConfigError:
        return
    method = run.config.get("method")
    method = method.get("name", "custom") if isinstance(method, Mapping) else str(method)
    for name, figure in _drawn(run, method, held):
        if figure is not None:
            yield name, plots.png(figure, DPI)


def _drawn(run: Run, method: str, held: Any) -> Iterator[tuple[str, Any]]:
    if run.history:
        yield "loss", plots.loss(run.history, method)
    if any(row.get("push") for row in run.history):
        yield "forces", plots.forces(run.history, method)
        yield "bandwidth", plots.bandwidth(run.history, method)
    if held is not None:
        yield "calibration", _calibration(run, method, held)


def _calibration(run: Run, method: str, held: Any) -> Any:
    """Reliability of classes or coverage of intervals; None if the targets have neither."""
    kinds = run.likelihood.about.kinds
    if "classes" not in kinds and "intervals" not in kinds:
        return None
    predicted = _predicted(run, held)
    if predicted is None:
        return None
    pred, y = predicted
    if "classes" in kinds:
        return plots.reliability({method: reliability(pred, y)})
    return plots.coverage({method: pit(pred, y)[:, 0]})


def _predicted(run: Run, held: Any) -> tuple[Predictive, Any] | None:
    """The prediction of the first validation points, each site a data point; None for none."""
    parts, targets, size, count = [], [], 0, 0
    with torch.no_grad(), evaluating(run.ensemble):
        for pred, y, _ in Validation(held).predictions(run.ensemble, run.likelihood):
            pred, y = pred.points(y)
            size = size or pred.size
            if pred.size == size:  # a member that is not finite on some batch is missing there
                parts.append(pred)
                targets.append(y)
                count += len(pred)
            if count >= POINTS:
                break
    return (Predictive.concat(parts), torch.cat(targets)) if parts else None


_LIBRARIES = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoardLogger),
    "wandb": ("wandb", WandbLogger),
    "mlflow": ("mlflow", MlflowLogger),
}
NAMES = (*_LIBRARIES, "csv")
"""The loggers that have a name."""


def make_loggers(loggers: Sequence[str | Logger], run: Run, held: Any = None) -> list[Callback]:
    """Callbacks that log a run: one per name or object.

    Args:
        loggers: names from `NAMES`, and objects with `log(dict, step)`.
        run: the run at its beginning.
        held: batches of validation data, for the figure of calibration.
    """
    names = dict.fromkeys(each for each in loggers if isinstance(each, str))
    others = [each for each in loggers if not isinstance(each, str)]
    figures = Figures(held)
    return [
        *(LoggerCallback(_named(name, run), name, figures, True) for name in names),
        *(LoggerCallback(each, type(each).__name__, figures) for each in others),
    ]


def _named(name: str, run: Run) -> Any:
    """A logger by its name; its library is imported here."""
    if name == "csv":
        return CsvLogger(run)
    if name not in _LIBRARIES:
        raise ConfigError(f"there is no logger '{name}'; {nearest(name, NAMES)}")
    library, kind = _LIBRARIES[name]
    require(library, extra="loggers")
    return kind(run)


class LoggerCallback(Callback):
    """Brings one logger up to date with the history of its run.

    A logger that fails is left out with one warning: training goes on.

    Attributes:
        logger: the logger; None after it has failed.
        name: its name in the warning.
        figures: the figures of the run.
        has_name: one of `NAMES`, which can be opened again and closed; a user's object cannot.
        last: the last step that the logger has.
    """

    def __init__(self, logger: Any, name: str, figures: Figures, has_name: bool = False) -> None:
        self.logger: Any = logger
        self.name, self.figures, self.has_name = name, figures, has_name
        self.last = -1
        self._begun_at = -1

    def run_begin(self, event: RunBegin) -> None:
        """Open the log and hand over the settings."""
        self._guarded(self._begin, event.run)

    def epoch_end(self, event: EpochEnd) -> None:
        """Log the rows that the logger does not have."""
        self._guarded(self._catch_up, event.run)

    def run_end(self, event: RunEnd) -> None:
        """Log the last row and the figures, and close the log."""
        run, figures = event.run, []
        self._guarded(self._catch_up, run)
        # A finished run that is resumed without new steps has its figures in the log.
        new = event.finished and self.last > self._begun_at
        if new and hasattr(self.logger, "log_image"):
            figures = self.figures.of(run)  # outside of the guard: they warn for themselves
        self._guarded(self._end, figures, event.finished)

    def _guarded(self, act: Callable[..., None], *arguments: Any) -> None:
        if self.logger is None:
            return
        try:
            with warnings.catch_warnings():
                if self.has_name:  # deprecations inside of a library are not the user's
                    warnings.simplefilter("ignore")
                act(*arguments)
        except Exception as error:
            if self.has_name:
                with suppress(Exception):  # nothing may be open
                    self.logger.close(False)
            self.logger = None
            reason = " ".join(str(error).split())[:300]
            note = f"The logger '{self.name}' failed and is left out: {type(error).__name__}"
            warnings.warn(f"{note}: {reason}" if reason else note, ShoalWarning, stacklevel=2)

    def _begin(self, run: Run) -> None:
        if self.has_name:
            self.last = self.logger.open()
        else:
            self.last = run.history[-1]["step"] if run.history else -1
        self._begun_at = self.last
        if hasattr(self.logger, "log_config"):
            self.logger.log_config(settings(run.config))
        self._catch_up(run)

    def _catch_up(self, run: Run) -> None:
        for row in run.history:
            if row["step"] > self.last:
                self.logger.log(numbers(row), row["step"])
                self.last = row["step"]

    def _end(self, figures: Sequence[tuple[str, bytes]], finished: bool) -> None:
        for name, png in figures:
            self.logger.log_image(name, png, self.last)
        if self.has_name:
            self.logger.close(finished)


def logs_folder(run: Run) -> Path:
    """The folder of a run's logs: inside the run's folder, or `logs/ID` for a run in memory."""
    if run.folder is not None:
        return run.folder / "logs"
    return Path("logs") / log_id(run)


def log_id(run: Run) -> str:
    """The name of a run in its logs, the same after a resume; old runs take their folder's."""
    return run.provenance.get("run_id") or hashlib.sha256(str(run.folder).encode()).hexdigest()[:16]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a history row, with names such as member_loss/3.

    >>> numbers({"step": 4, "loss": 0.5, "h2": None, "member_loss": [0.4, 0.6]})
    {'loss': 0.5, 'member_loss/0': 0.4, 'member_loss/1': 0.6}
    """
    return {
        name: value
        for name, value in _leaves(row)
        if name not in ("step", "initial_loss")
        and isinstance(value, float | int)
        and math.isfinite(value)
    }


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        width = len(str(len(value) - 1))
        value = {f"{index:0{width}}": each for index, each in enumerate(value)}
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{name}/{key}" if name else str(key))
    else:
        yield name, value


def settings(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Every setting under one name, as a number or as text.

    >>> settings({"lr": 0.1, "model": [{"name": "mlp", "hidden": [8, 8]}], "clip": None})
    {'lr': 0.1, 'model.0.name': 'mlp', 'model.0.hidden': '8, 8'}
    """
    flat: dict[str, bool | int | float | str] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            value = {str(index): each for index, each in enumerate(value)}
        if isinstance(value, Mapping):
            for key, each in value.items():
                add(each, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list | tuple):
            flat[name] = ", ".join(map(str, value))
        elif value is not None:
            flat[name] = value if isinstance(value, bool | int | float) else str(value)

    add(config, "")
    return flat


def safe_name(name: str) -> str:
    """A name that every library accepts.

    >>> safe_name("prior.std (own)")
    'prior.std _own_'
    """
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)
