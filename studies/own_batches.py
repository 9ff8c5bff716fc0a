"""Members with batches of their own beside members that share them: python -m studies.own_batches

The runs come from the command line, for each experiment and for `own` and `common`:

    shoal compare digits batches=own --methods ensemble --seeds 10 --device cuda -o runs/digits-own

This script reads their `results.csv`, kept as docs/results/own-batches/EXPERIMENT-BATCHES.csv, and
writes the table of the page.
"""

import re
from pathlib import Path

from shoal.prediction.statistics import paired_difference
from studies.common import Column, read_csv

FOLDER = Path(__file__).parents[1] / "docs" / "results" / "own-batches"
EXPERIMENTS = ("digits", "digits-cnn", "mnist", "fashion-mnist")
COLUMNS = (
    Column("test.nll", "NLL", 1.0, 4),
    Column("test.accuracy", "accuracy, %", 100.0, 2),
    Column("test.ece", "ECE, %", 100.0, 2),
    Column("test.disagreement", "disagreement, %", 100.0, 3),
)


def cell(column: Column, common: list[dict[str, str]], own: list[dict[str, str]]) -> str:
    """The mean with common batches, and what own batches change, with its 95 % interval."""
    first, second = (
        [column.scale * float(row[column.metric]) for row in rows] for rows in (common, own)
    )
    change, low, high = paired_difference(second, first)
    digits = column.digits
    text = f"{change:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    mean = sum(first) / len(first)
    return f"{mean:.{digits}f}, {f'**{text}**' if low * high > 0 else text}"


def table() -> str:
    """One row per experiment."""
    lines = [f"| experiment | seeds | {' | '.join(column.title for column in COLUMNS)} |"]
    lines.append("| --- " * (2 + len(COLUMNS)) + "|")
    for name in EXPERIMENTS:
        common, own = (read_csv(FOLDER / f"{name}-{kind}.csv") for kind in ("common", "own"))
        assert [row["seed"] for row in common] == [row["seed"] for row in own]
        cells = " | ".join(cell(column, common, own) for column in COLUMNS)
        lines.append(f"| `{name}` | {len(own)} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Write the table into the page."""
    page = FOLDER / "README.md"
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"\| experiment .*?\n\n", lambda _: table() + "\n\n", text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
