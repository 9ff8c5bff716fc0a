"""Progress: a bar on a terminal or in a notebook, one line per epoch or run elsewhere."""

import html
import re
import sys
import time
import uuid
from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Protocol, Self

from shoal.core.display.text import seconds

__all__ = [
    "Bar",
    "NotebookBar",
    "Progress",
    "TerminalBar",
    "Ticker",
    "make_bar",
    "make_progress",
    "notice",
    "printable",
    "quiet",
]

quiet: ContextVar[bool] = ContextVar("quiet", default=False)
"""Set by `--quiet` and `--json`."""

# C0 and C1 controls except tab and newline, marks of writing direction, line separators, and
# surrogates, which cannot be sent to a terminal.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with escaped control characters; tabs and newlines stay.

    All text for people passes this function, so that a name from a file cannot control a terminal.

    >>> print(printable("run \\x1b[2J of \\u202eyesterday"))
    run \\x1b[2J of \\u202eyesterday
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def notice(sentence: str) -> None:
    """Print a sentence on standard error, unless quiet."""
    if not quiet.get():
        print(f"shoal: {printable(sentence)}", file=sys.stderr, flush=True)


class Bar(Protocol):
    """A bar with words beside it, and sentences that stay."""

    def start(self) -> None:
        """Draw the bar."""
        ...

    def advance(self, count: int = 1) -> None:
        """Count finished steps."""
        ...

    def show(self, words: str) -> None:
        """Replace the words beside the bar."""
        ...

    def say(self, sentence: str) -> None:
        """Add a sentence above or below the bar."""
        ...

    def stop(self) -> None:
        """Draw the bar for the last time."""
        ...


class Progress(Protocol):
    """Progress of a run."""

    def step(self) -> None:
        """After each step."""
        ...

    def epoch(self, row: dict[str, Any]) -> None:
        """After each epoch."""
        ...

    def say(self, sentence: str) -> None:
        """Show a sentence."""
        ...

    def note(self, words: str) -> None:
        """Show what the run waits for before its steps; "" when it waits no longer."""
        ...

    def close(self) -> None:
        """After the run."""
        ...


def make_progress(show: bool, label: str, steps: int, done: int) -> Progress:
    """A bar in a notebook or on a terminal, lines elsewhere, nothing without `show`."""
    if not show:
        return _Silent()
    bar = make_bar(label, steps, done, stays=True)
    with suppress(Exception):  # such as a second bar of an older rich
        if bar is not None:
            return _Bar(bar)
    return _Lines(label)


class _Silent:
    def step(self) -> None:
        pass

    def epoch(self, row: dict[str, Any]) -> None:
        pass

    def say(self, sentence: str) -> None:
        pass

    def note(self, words: str) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines(_Silent):
    def __init__(self, label: str) -> None:
        self.label = label

    def epoch(self, row: dict[str, Any]) -> None:
        seconds = f"{row['seconds']:.1f} s"
        print(f"{self.label}: epoch {row['epoch']}: {_figures(row)}, {seconds}", file=sys.stderr)

    def say(self, sentence: str) -> None:
        print(f"{self.label}: {printable(sentence)}", file=sys.stderr)

    def note(self, words: str) -> None:
        if words:
            print(f"{self.label}: {words}", file=sys.stderr, flush=True)


class _Bar(_Silent):
    def __init__(self, bar: Bar) -> None:
        self.bar = bar
        self.bar.start()

    def step(self) -> None:
        self.bar.advance()

    def epoch(self, row: dict[str, Any]) -> None:
        self.bar.show(_figures(row))

    def say(self, sentence: str) -> None:
        self.bar.say(printable(sentence))

    def note(self, words: str) -> None:
        self.bar.show(words)
        self.bar.advance(0)

    def close(self) -> None:
        self.bar.stop()


def _figures(row: dict[str, Any]) -> str:
    loss = row["loss"]
    form = ".4f" if loss is None or abs(loss) < 1e6 else ".3g"
    text = "loss not finite" if loss is None else f"loss {loss:{form}}"
    for name, value in (row.get("validation") or {}).items():
        text += f", validation {name} {'not finite' if value is None else f'{value:.4f}'}"
    if not row["push"] or not row["ratio"]:
        return text
    return f"{text}, repulsion / driving force {row['ratio']:.1e}"


class Ticker:
    """Counts finished tasks, such as runs, on standard error.

    Args:
        total: number of tasks.
        done: number of tasks that are already done.
        show: print progress.
    """

    def __init__(self, total: int, done: int = 0, show: bool = True) -> None:
        self.total, self.done, self.show = total, done, show
        self._started, self._before = time.monotonic(), done
        self._bar = make_bar("", total, done, stays=False) if show else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, words: str) -> None:
        """Show the current task next to the bar, if there is a bar."""
        if self._bar is not None:
            self._bar.show(printable(words))

    def tick(self, line: str, count: int = 1) -> None:
        """Count one or several finished tasks."""
        self.done += count
        width = len(str(self.total))
        text = printable(f"{self.done:{width}}/{self.total}  {line}")
        if self._bar is not None:
            self._bar.advance(count)
            self._bar.say(text)
        elif self.show:
            print(f"{text}{self._left()}", file=sys.stderr, flush=True)

    def _left(self) -> str:
        """Estimated remaining time; the bar shows its own estimate."""
        waiting = self.total - self.done
        if waiting == 0:
            return ""
        each = (time.monotonic() - self._started) / (self.done - self._before)
        return f"; {seconds(waiting * each)} left"


def make_bar(label: str, total: int, done: int, *, stays: bool) -> Bar | None:
    """A bar in a notebook or on a terminal; None elsewhere, and where no bar can be drawn.

    Args:
        label: words before the bar.
        total: number of steps.
        done: number of finished steps.
        stays: the bar stays on the terminal after its end.
    """
    try:
        if _in_notebook():
            return NotebookBar(label, total, done)
        return TerminalBar(label, total, done, stays) if sys.stderr.isatty() else None
    except Exception:  # a missing or broken library
        return None


def _in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, not IPython on a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class TerminalBar:
    """A bar of rich on standard error."""

    def __init__(self, label: str, total: int, done: int, stays: bool) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}", markup=False),
            console=Console(stderr=True),
            transient=not stays,
        )
        self._task = self._bar.add_task(label, total=total, completed=done, words="")

    def start(self) -> None:
        """Hide the cursor and draw."""
        self._bar.start()

    def advance(self, count: int = 1) -> None:
        """Count; rich redraws ten times a second."""
        self._bar.advance(self._task, count)

    def show(self, words: str) -> None:
        """Words to the right of the bar."""
        self._bar.update(self._task, words=words)

    def say(self, sentence: str) -> None:
        """A sentence above the bar."""
        self._bar.console.print(sentence, highlight=False, markup=False)

    def stop(self) -> None:
        """Show the cursor again."""
        self._bar.stop()


class NotebookBar:
    """A bar in the output of a notebook's cell.

    Jupyter, VS Code and Colab replace the output with the display id of an earlier one.
    """

    PERIOD = 0.25
    """Least number of seconds between two drawings."""

    SENTENCES = 10
    """The last sentences stay, so that a grid of many runs does not fill the notebook."""

    def __init__(self, label: str, total: int, done: int) -> None:
        from IPython.display import display

        self._display: Any = display
        self._label, self._total, self._done, self._before = label, total, done, done
        self._words, self._sentences = "", deque[str](maxlen=self.SENTENCES)
        self._began = self._drawn = time.monotonic()
        self._name = f"shoal-{uuid.uuid4().hex}"

    def start(self) -> None:
        """Make the output that later drawings replace."""
        self._draw(update=False)

    def advance(self, count: int = 1) -> None:
        """Count, and draw if the last drawing is old enough."""
        self._done += count
        if time.monotonic() - self._drawn >= self.PERIOD:
            self._draw()

    def show(self, words: str) -> None:
        """Words to the right of the bar."""
        self._words = words

    def say(self, sentence: str) -> None:
        """A sentence below the bar."""
        self._sentences.append(sentence)
        self._draw()

    def stop(self) -> None:
        """Draw the last state, which a stored notebook keeps."""
        self._draw()

    def _draw(self, update: bool = True) -> None:
        self._drawn = time.monotonic()
        facts = [f"{self._done}/{self._total}", self._left(), self._words]
        beside = " · ".join(filter(None, facts))
        bar = (
            f'<progress value="{self._done}" max="{max(self._total, 1)}" '
            f'style="width: 14em; vertical-align: middle"></progress>'
        )
        lines = [f"{html.escape(self._label)} {bar} {html.escape(beside)}"]
        lines += [html.escape(sentence) for sentence in self._sentences]
        body = "".join(f"<div>{line}</div>" for line in lines)
        plain = "\n".join([f"{self._label} {beside}".strip(), *self._sentences])
        bundle = {"text/html": f"<div>{body}</div>", "text/plain": plain}
        self._display(bundle, raw=True, display_id=self._name, update=update)

    def _left(self) -> str:
        """Remaining time at the speed so far, or the time that everything took."""
        spent, counted = self._drawn - self._began, self._done - self._before
        if self._done >= self._total:
            return seconds(spent)
        if counted == 0:
            return ""
        return f"{seconds((self._total - self._done) * spent / counted)} left"
