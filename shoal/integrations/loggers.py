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
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.optional import require
from shoal.core.registry import nearest
from shoal.core.storage.files import write_text
from shoal.integrations.log_figures import Figures
from shoal.training.folder.run import Run
from shoal.training.loop.callbacks import Callback, EpochEnd, RunBegin, RunEnd

__all__ = [
    "NAMES",
    "CsvLogger",
    "Logger",
    "LoggerCallback",
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
        if not self.path.exists():
            return -1
        text = self.path.read_text(encoding="utf-8")
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
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(self._lines([row]))

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


_LIBRARIES = {
    "tensorboard": ("torch.utils.tensorboard", "TensorBoardLogger"),
    "wandb": ("wandb", "WandbLogger"),
    "mlflow": ("mlflow", "MlflowLogger"),
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
    named = dict.fromkeys(each for each in loggers if isinstance(each, str))
    theirs = [each for each in loggers if not isinstance(each, str)]
    drawn = Figures(held)
    own = [LoggerCallback(_named(name, run), name, drawn, True) for name in named]
    return [*own, *(LoggerCallback(each, type(each).__name__, drawn) for each in theirs)]


def _named(name: str, run: Run) -> Any:
    """A logger by its name; its library is imported here."""
    if name == "csv":
        return CsvLogger(run)
    if name not in _LIBRARIES:
        raise ConfigError(f"there is no logger '{name}'; {nearest(name, NAMES)}")
    library, kind = _LIBRARIES[name]
    require(library, extra="loggers")
    from shoal.integrations import log_services

    return getattr(log_services, kind)(run)


class LoggerCallback(Callback):
    """Brings one logger up to date with the history of its run.

    A logger that fails is left out with one warning: training goes on.

    Attributes:
        logger: the logger; None after it has failed.
        name: its name in the warning.
        figures: the figures of the run.
        own: one of our loggers, which can be opened again and closed; a user's is left as it is.
        last: the last step that the logger has.
    """

    def __init__(self, logger: Any, name: str, figures: Figures, own: bool = False) -> None:
        self.logger: Any = logger
        self.name, self.figures, self.own = name, figures, own
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
        run, drawn = event.run, []
        self._guarded(self._catch_up, run)
        # A finished run that is resumed without new steps has its figures in the log.
        new = event.finished and self.last > self._begun_at
        if new and hasattr(self.logger, "log_image"):
            drawn = self.figures.of(run)  # outside of the guard: they warn for themselves
        self._guarded(self._end, drawn, event.finished)

    def _guarded(self, act: Callable[..., None], *given: Any) -> None:
        if self.logger is None:
            return
        try:
            with warnings.catch_warnings():
                if self.own:  # deprecations inside of a library are not the user's
                    warnings.simplefilter("ignore")
                act(*given)
        except Exception as error:
            if self.own:
                with suppress(Exception):  # nothing may be open
                    self.logger.close(False)
            self.logger = None
            told = " ".join(str(error).split())[:300]
            note = f"The logger '{self.name}' failed and is left out: {type(error).__name__}"
            warnings.warn(f"{note}: {told}" if told else note, ShoalWarning, stacklevel=2)

    def _begin(self, run: Run) -> None:
        if self.own:
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

    def _end(self, drawn: Sequence[tuple[str, bytes]], finished: bool) -> None:
        for name, png in drawn:
            self.logger.log_image(name, png, self.last)
        if self.own:
            self.logger.close(finished)


def logs_folder(run: Run) -> Path:
    """The folder of a run's logs: inside the run's folder, or `logs/ID` for a run in memory."""
    if run.folder is not None:
        return run.folder / "logs"
    return Path("logs") / log_id(run)


def log_id(run: Run) -> str:
    """The name of a run in its logs, the same after a resume; older runs have none of their own."""
    own = run.provenance.get("run_id")
    return own or hashlib.sha256(str(run.folder).encode()).hexdigest()[:16]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a history row, with names such as member_loss/3.

    >>> numbers({"step": 4, "loss": 0.5, "h2": None, "member_loss": [0.4, 0.6]})
    {'loss': 0.5, 'member_loss/0': 0.4, 'member_loss/1': 0.6}
    """
    found = {}
    for name, value in _leaves(row):
        if name not in ("step", "initial_loss") and isinstance(value, float | int):
            if math.isfinite(value):
                found[name] = value
    return found


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
    found: dict[str, bool | int | float | str] = {}

    def add(value: Any, name: str) -> None:
        if isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            value = {str(index): each for index, each in enumerate(value)}
        if isinstance(value, Mapping):
            for key, each in value.items():
                add(each, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list | tuple):
            found[name] = ", ".join(map(str, value))
        elif value is not None:
            found[name] = value if isinstance(value, bool | int | float) else str(value)

    add(config, "")
    return found


def safe_name(name: str) -> str:
    """A name that every library accepts.

    >>> safe_name("prior.std (own)")
    'prior.std _own_'
    """
    return re.sub(r"[^\w\-./ ]", "_", name, flags=re.ASCII)
