"""One bar that counts steps: drawn by rich on a terminal, by HTML in a notebook.

The notebook's bar is one output that is updated in place. It needs IPython alone, which every
notebook has: no widgets, and no scripts that a stored notebook would have to trust.
"""

import html
import sys
import time
import uuid
from collections import deque
from typing import Any, Protocol

from shoal.core.display.text import seconds

__all__ = ["Bar", "NotebookBar", "TerminalBar", "make_bar"]


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
        told = "".join(f"<div>{line}</div>" for line in lines)
        plain = "\n".join([f"{self._label} {beside}".strip(), *self._sentences])
        bundle = {"text/html": f"<div>{told}</div>", "text/plain": plain}
        self._display(bundle, raw=True, display_id=self._name, update=update)

    def _left(self) -> str:
        """Remaining time at the speed so far, or the time that everything took."""
        spent, counted = self._drawn - self._began, self._done - self._before
        if self._done >= self._total:
            return seconds(spent)
        if counted == 0:
            return ""
        return f"{seconds((self._total - self._done) * spent / counted)} left"
