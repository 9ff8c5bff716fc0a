"""What a verb has to say: the same result for people and for programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Outcome", "counted", "table"]


@dataclass(frozen=True)
class Outcome:
    """The result of one command.

    Attributes:
        text: for people.
        value: for programs, with --json.
        status: how the process exits.
    """

    text: str
    value: Any
    status: int = 0


def counted(count: int, word: str) -> str:
    """A number of things.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Aligned columns: the first to the left, the others to the right.

    >>> print(table([["test", "0.98"], ["rotated-15", "0.9"]], ["", "accuracy"]))
                accuracy
    test            0.98
    rotated-15       0.9
    """
    lines = [list(header), *map(list, rows)] if header else [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
