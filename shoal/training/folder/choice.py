"""What a search chose: all candidates with their scores, and the reason, in memory and as JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.core.display.text import plus_minus
from shoal.core.errors import StorageError
from shoal.core.storage.files import read_sealed, sealed, write_json
from shoal.training.options.options import Options

__all__ = ["CHOICE", "CandidateResult", "Choice", "Trial", "read_choice", "reason", "write_choice"]

CHOICE = "choice.json"
"""File of the choice, in the folder of a run."""


@dataclass(frozen=True)
class Trial:
    """One short training of a candidate, and its scores on data that it did not train on.

    Attributes:
        steps: length of the training.
        seconds: its time, with the scoring.
        nll: NLL on the held-out points.
        shifted_nll: mean NLL on their shifted copies; that of the points if there are no copies.
        nll_change: NLL minus that of the plain ensemble after as many steps, and the standard
            error over data points.
        shifted_change: the same on the shifted copies.
    """

    steps: int
    seconds: float
    nll: float
    shifted_nll: float
    nll_change: tuple[float, float] = (0.0, 0.0)
    shifted_change: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class CandidateResult:
    """One candidate of a search.

    Attributes:
        label: the method with its strength, as "kde:1000"; "ensemble" for the plain ensemble.
        method: name of the method; None for the method that was given.
        strength: factor of the repulsive force; None for the plain ensemble.
        trials: its short trainings, from short to long.
        failed: why the candidate lost without a score; None if it did not.
    """

    label: str
    method: str | None
    strength: float | None
    trials: tuple[Trial, ...] = ()
    failed: str | None = None

    @property
    def last(self) -> Trial | None:
        """The longest training; None if the candidate failed at once."""
        return self.trials[-1] if self.trials else None


@dataclass(frozen=True)
class Choice:
    """The method and strength that a search chose, and what the search saw.

    Attributes:
        asked: the options that were left to the search, such as {"method": "auto"}.
        chosen: label of the chosen candidate.
        why: the reason, in words.
        candidates: all candidates.
        judge: the held-out data, in words.
        points: number of held-out data points.
        shifts: names of the shifts.
        cost: price of the search, in trainings.
        steps: steps of all short trainings together.
        seconds: time of the search.
    """

    asked: dict[str, Any]
    chosen: str
    why: str
    candidates: tuple[CandidateResult, ...]
    judge: str = ""
    points: int = 0
    shifts: tuple[str, ...] = ()
    cost: float = 0.0
    steps: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        labels = ", ".join(candidate.label for candidate in self.candidates)
        return f"Choice({self.chosen!r} of {labels}; search: {self.cost:.3g} trainings)"

    @property
    def arms(self) -> tuple[CandidateResult, ...]:
        """All candidates, by their earlier name."""
        return self.candidates

    @property
    def arm(self) -> CandidateResult:
        """The chosen candidate."""
        return next(each for each in self.candidates if each.label == self.chosen)

    def table(self) -> dict[str, Any]:
        """Plain values for JSON; the key of the candidates is "arms"."""
        table = asdict(self)
        return table | {"arms": table.pop("candidates")}

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Choice":
        """The choice with these plain values; raises errors of many types if they have none."""
        values = {name: value for name, value in table.items() if name != "arms"}
        candidates = tuple(_candidate(each) for each in table["arms"])
        choice = cls(**values | {"candidates": candidates, "shifts": tuple(table["shifts"])})
        _check(choice)
        return choice

    def applied(self, options: Options) -> Options:
        """The options with the chosen method and strength."""
        method = options.method if self.arm.method is None else self.arm.method
        return replace(options, method=method, strength=self.arm.strength)


def reason(winner: CandidateResult | None, where: str, shifted: bool) -> str:
    """Why a candidate was chosen, or the plain ensemble (None), in two sentences.

    Args:
        winner: the chosen candidate.
        where: the held-out data, in words.
        shifted: candidates were also compared on shifted copies of the data.
    """
    if winner is None:
        under = " and under mild shifts" if shifted else ""
        return (
            f"The plain ensemble was chosen on {where}. "
            f"No other candidate lowers the mean NLL on clean data{under} without raising "
            f"the clean NLL by more than its standard error."
        )
    trial = winner.last
    assert trial is not None
    clean, under = _words(*trial.nll_change), _words(*trial.shifted_change)
    first = f"{winner.label} was chosen on {where}. Compared with the plain ensemble, its NLL is"
    if not shifted:
        return f"{first} {clean}."
    return f"{first} {under} under mild shifts and {clean} on clean data."


def _words(change: float, error: float) -> str:
    side = "lower" if change < 0 else "higher"
    return f"{plus_minus(abs(change), error)} nats {side}"


def write_choice(folder: Path, choice: Choice) -> None:
    """Write the choice of a run, with a digest."""
    write_json(folder / CHOICE, sealed(choice.table()))


def read_choice(folder: Path) -> Choice | None:
    """The choice of a run; None if nothing was chosen by a search."""
    path = folder / CHOICE
    if not path.exists():
        return None
    try:
        return Choice.of(read_sealed(path, since="asked"))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StorageError(f"{path} does not describe a choice: {error}") from None


def _candidate(table: Mapping[str, Any]) -> CandidateResult:
    trials = tuple(Trial(**_with_tuples(each)) for each in table["trials"])
    return CandidateResult(**{**table, "trials": trials})


def _with_tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with tuples for lists."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}


def _check(choice: Choice) -> None:
    """Raise `TypeError` or `ValueError` unless all values have their types."""
    texts: list[Any] = [choice.chosen, choice.why, choice.judge, *choice.shifts]
    numbers: list[Any] = [choice.points, choice.cost, choice.steps, choice.seconds]
    for each in choice.candidates:
        texts += [each.label, *(text for text in (each.method, each.failed) if text is not None)]
        numbers += [] if each.strength is None else [each.strength]
        for t in each.trials:
            (change, error), (shifted, shifted_error) = t.nll_change, t.shifted_change
            numbers += [t.steps, t.seconds, t.nll, t.shifted_nll]
            numbers += [change, error, shifted, shifted_error]
    if not isinstance(choice.asked, dict) or not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is missing")
    if any(isinstance(n, bool) or not math.isfinite(n) for n in numbers):
        raise ValueError("a number is not finite")
    if choice.chosen not in {each.label for each in choice.candidates}:
        raise ValueError(f"there is no candidate called {choice.chosen!r}")
