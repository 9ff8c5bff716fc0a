"""Progress: a bar on a terminal, one line an epoch elsewhere."""

import sys
from typing import Any, Protocol

from shoal.core.notices import printable

__all__ = ["Progress", "make_progress"]


class Progress(Protocol):
    """What a run tells while it runs."""

    def step(self) -> None:
        """One more step is done."""
        ...

    def epoch(self, row: dict[str, Any]) -> None:
        """One more epoch is done."""
        ...

    def say(self, sentence: str) -> None:
        """Something worth knowing."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


def make_progress(show: bool, label: str, steps: int, done: int) -> Progress:
    """A bar where standard error is a terminal and rich is at hand, else lines, else silence."""
    if not show:
        return _Silent()
    if sys.stderr.isatty():
        try:
            return _Bar(label, steps, done)
        except Exception:
            pass
    return _Lines(label)


class _Silent:
    def step(self) -> None:
        pass

    def epoch(self, row: dict[str, Any]) -> None:
        pass

    def say(self, sentence: str) -> None:
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


class _Bar(_Silent):
    def __init__(self, label: str, steps: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
        )
        self.task = self.bar.add_task(label, total=steps, completed=done, figures="")
        self.bar.start()

    def step(self) -> None:
        self.bar.advance(self.task)

    def epoch(self, row: dict[str, Any]) -> None:
        self.bar.update(self.task, figures=_figures(row))

    def say(self, sentence: str) -> None:
        self.bar.console.print(printable(sentence), highlight=False, markup=False)

    def close(self) -> None:
        self.bar.stop()


def _figures(row: dict[str, Any]) -> str:
    loss = row["loss"]
    form = ".4f" if loss is None or abs(loss) < 1e6 else ".3g"
    text = "loss not finite" if loss is None else f"loss {loss:{form}}"
    return f"{text}, push/drive {row['ratio']:.1e}" if row["push"] and row["ratio"] else text
