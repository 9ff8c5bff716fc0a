"""Progress over many runs or parts of data: a bar on a terminal, one line each elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from shoal.app.words import seconds
from shoal.core.notices import printable
from shoal.data.dataset import Dataset

__all__ = ["Ticker", "parts_ticker"]

_FEW = 10


class Ticker:
    """Counts runs, or whatever else is many, on standard error.

    Args:
        total: how many there are.
        done: how many of them need no work.
        show: say nothing at all when false.
    """

    def __init__(self, total: int, done: int = 0, show: bool = True) -> None:
        self.total, self.done, self.show = total, done, show
        self._started, self._before = time.monotonic(), done
        self._bar: Any = _bar(total, done) if show and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, words: str) -> None:
        """What is being done, beside the bar; nothing where there is none."""
        if self._bar is not None:
            self._bar.update(0, description=printable(words))

    def tick(self, line: str, count: int = 1) -> None:
        """One more is done, or several at once."""
        self.done += count
        width = len(str(self.total))
        text = printable(f"{self.done:{width}}/{self.total}  {line}")
        if self._bar is not None:
            self._bar.advance(0, count)
            self._bar.console.print(text, highlight=False, markup=False)
        elif self.show:
            print(f"{text}{self._left()}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        """How long the others will take, if they are like those so far; the bar says it itself."""
        waiting = self.total - self.done
        if waiting == 0:
            return ""
        each = (time.monotonic() - self._started) / (self.done - self._before)
        return f"; {seconds(waiting * each)} left"


def parts_ticker(data: Dataset, quiet: bool) -> Ticker:
    """A ticker over the parts that `assess` judges; it says nothing where they are few."""
    total = len(data.shifts) + len(data.ood)
    return Ticker(total, show=not quiet and total > _FEW)


def _bar(total: int, done: int) -> Any:
    """None where rich is not at hand, or does not work."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        words = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), words)
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task("", total=total, completed=done)
        return bar
    except Exception:
        return None
