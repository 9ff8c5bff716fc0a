"""Callbacks: what `fit` calls while it trains, and the events that it hands over.

A callback is a function of an `EpochEnd`, or an object of a class that derives from `Callback`:

    class Patient(shoal.Callback):
        def step_end(self, event):
            if event.step % 100 == 0 and event.measures()["loss"] < 0.01:
                event.stop("the loss is below 0.01")

    shoal.fit(ensemble, data, callbacks=[Patient(), lambda event: print(event.row["loss"])])

A callback that stops a run ends it as a finished run: the run is stored and returned. An exception
of a callback leaves `fit`, as any other error does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core import factories
from shoal.core.errors import ConfigError
from shoal.training.folder.run import Run

__all__ = [
    "Callback",
    "EpochEnd",
    "Listeners",
    "RunBegin",
    "RunEnd",
    "StepEnd",
    "StopRequest",
    "checked_callbacks",
    "checked_loggers",
]


class StopRequest:
    """Whether a callback wants the run to end, and why.

    Attributes:
        asked: a callback has called `stop`.
        why: the reason, for the notes of the run.
    """

    def __init__(self) -> None:
        self.asked, self.why = False, ""

    def stop(self, why: str = "") -> None:
        """End the run; the first reason stays."""
        if not self.asked:
            self.asked, self.why = True, str(why)


@dataclass(frozen=True)
class RunBegin:
    """Before the first step, or the first step after a resume.

    Attributes:
        run: the run so far; its history is empty unless the run is resumed.
    """

    run: Run


@dataclass(frozen=True)
class StepEnd:
    """After a step.

    Attributes:
        step: number of finished steps.
        steps: number of steps of the run.
        epoch: the epoch of this step, from 1.
    """

    step: int
    steps: int
    epoch: int
    _measure: Callable[[], Mapping[str, Any]] = field(repr=False, compare=False)
    _request: StopRequest = field(repr=False, compare=False)

    def measures(self) -> dict[str, Any]:
        """Measures of this step; waits for the device.

        The keys are those of a history row: loss, drive, push, ratio, h2, effective, member_loss
        and lr. With several processes the losses are those of this process's members.
        """
        return dict(self._measure())

    def stop(self, why: str = "") -> None:
        """End the run after this step, as a finished run; its notes give the reason."""
        self._request.stop(why)


@dataclass(frozen=True)
class EpochEnd:
    """After an epoch.

    Attributes:
        run: the run so far, with the ensemble as it is now.
        epoch: number of finished epochs.
        row: the history row of this epoch.
    """

    run: Run
    epoch: int
    row: dict[str, Any]
    _request: StopRequest = field(repr=False, compare=False)

    def stop(self, why: str = "") -> None:
        """End the run after this epoch, as a finished run; its notes give the reason."""
        self._request.stop(why)


@dataclass(frozen=True)
class RunEnd:
    """After the last step, or after an error or a signal.

    Attributes:
        run: the run that `fit` returns; after an error, the run so far.
        finished: the run took all its steps, or was stopped by a callback or by `patience`.
    """

    run: Run
    finished: bool


class Callback:
    """Base class of callbacks; a subclass overrides the methods that it needs.

    With several processes, each process calls its own callbacks.
    """

    def run_begin(self, event: RunBegin) -> None:
        """Before the first step."""

    def step_end(self, event: StepEnd) -> None:
        """After each step; a method of a subclass costs time at each step."""

    def epoch_end(self, event: EpochEnd) -> None:
        """After each epoch."""

    def run_end(self, event: RunEnd) -> None:
        """After the run; also after an error, with `finished=False`."""


class _AtEpochs(Callback):
    """A plain function, called with each `EpochEnd`."""

    def __init__(self, function: Callable[[EpochEnd], Any]) -> None:
        self.function = function

    def epoch_end(self, event: EpochEnd) -> None:
        self.function(event)


def checked_callbacks(callbacks: Any) -> list[Callback]:
    """All callbacks as objects; raises `ConfigError` for what cannot be called."""
    listed: Any = (
        callbacks if isinstance(callbacks, Sequence) and not isinstance(callbacks, str) else None
    )
    if listed is None or not all(isinstance(each, Callback) or callable(each) for each in listed):
        raise ConfigError(
            "callbacks must be a list of functions or Callback objects; type callbacks=[mine]"
        )
    if any(isinstance(each, type) and issubclass(each, Callback) for each in listed):
        raise ConfigError("callbacks has a class of callbacks; give an object, such as [Mine()]")
    return [each if isinstance(each, Callback) else _AtEpochs(each) for each in listed]


def checked_loggers(loggers: Any) -> list[Any]:
    """The loggers as a list; raises `ConfigError` for what cannot log."""
    fits = isinstance(loggers, Sequence) and not isinstance(loggers, str)
    if not fits or not all(isinstance(each, str) or hasattr(each, "log") for each in loggers):
        raise ConfigError(
            'loggers must be a list of names or of objects with log(); type loggers=["csv"]'
        )
    return list(loggers)


class Listeners:
    """The callbacks of one call of `fit`, and whether one of them has asked to stop.

    Attributes:
        callbacks: the callbacks, in the order of their calls.
        request: the wish to end the run.
        held: batches of validation data, for the loggers' figures; None for none.
    """

    def __init__(self, callbacks: Sequence[Callback], loggers: Sequence[Any] = ()) -> None:
        self.callbacks, self.request = list(callbacks), StopRequest()
        self._loggers = loggers
        self.held: Any = None

    def __bool__(self) -> bool:
        return bool(self.callbacks) or bool(self._loggers)

    @property
    def watch_steps(self) -> bool:
        """Whether any callback looks at single steps."""
        return any(type(each).step_end is not Callback.step_end for each in self.callbacks)

    def begin(self, run: Run, first: bool = True) -> None:
        """Before the first step; of several processes, the first has the loggers."""
        if self._loggers and first:
            self.callbacks += factories["loggers"](self._loggers, run, self.held)
        for callback in self.callbacks:
            callback.run_begin(RunBegin(run))

    def step(
        self, step: int, steps: int, epoch: int, measure: Callable[[], Mapping[str, Any]]
    ) -> None:
        """After a step."""
        for callback in self.callbacks:
            callback.step_end(StepEnd(step, steps, epoch, measure, self.request))

    def epoch(self, run: Run, row: dict[str, Any]) -> None:
        """After an epoch."""
        for callback in self.callbacks:
            callback.epoch_end(EpochEnd(run, row["epoch"], row, self.request))

    def end(self, run: Run, finished: bool) -> None:
        """After the run."""
        for callback in self.callbacks:
            callback.run_end(RunEnd(run, finished))
