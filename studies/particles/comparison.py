"""Means and paired differences over seeds, as Markdown tables.

Intervals are 95 % by Student's t. Bold differences are significant after Holm's correction over all
differences of a table.
"""

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import (
    holm,
    mean_and_error,
    paired_difference,
    paired_p_value,
    t_quantile,
)
from studies.common import Column, read_csv

Case = tuple[str, str, str, int]
"""Part, problem, method and members."""

Rows = dict[tuple[Case, str], dict[int, float]]
"""Values by case and metric; then by seed."""


class Pair(NamedTuple):
    """A difference of two cases, and the words of its row."""

    words: tuple[str, ...]
    case: Case
    other: Case


def read(folder: Path) -> Rows:
    """All values of raw*.csv."""
    found: Rows = {}
    for file in sorted(folder.glob("raw*.csv")):
        for r in read_csv(file):
            case = r["part"], r["problem"], r["method"], int(r["members"])
            found.setdefault((case, r["metric"]), {})[int(r["seed"])] = float(r["value"])
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half width of the 95 % interval; NaN for one value."""
    mean, error = mean_and_error(values)
    return mean, t_quantile(0.975, len(values) - 1) * error if len(values) > 1 else math.nan


def values(rows: Rows, cases: Sequence[tuple[tuple[str, ...], Case]], columns, titles) -> str:
    """A table of means."""
    lines = []
    for words, case in cases:
        found = [rows.get((case, column.metric), {}) for column in columns]
        if any(found):
            cells = [mean_text(row, column) for row, column in zip(found, columns, strict=True)]
            lines.append([*words, max(map(len, found)), *cells])
    return markdown_table([*titles, "seeds", *(c.title for c in columns)], lines) if lines else ""


def mean_text(row: dict[int, float], column: Column) -> str:
    if not row:
        return ""
    mean, half = interval([*row.values()])
    beside = f" ± {column.scale * half:.{column.digits}f}" if math.isfinite(half) else ""
    return f"{column.scale * mean:.{column.digits}f}{beside}"


def differences(rows: Rows, pairs: Sequence[Pair], columns, titles) -> str:
    """A table of paired differences, corrected over the whole table."""
    found = {}
    for (i, pair), (j, column) in product(enumerate(pairs), enumerate(columns)):
        a, b = (rows.get((case, column.metric), {}) for case in (pair.case, pair.other))
        if common := sorted(a.keys() & b.keys()):
            found[i, j] = [a[s] for s in common], [b[s] for s in common]
    tested = {at: paired_p_value(*both) for at, both in found.items() if len(both[0]) > 2}
    sure = dict(zip(tested, holm([*tested.values()]), strict=True))
    lines = []
    for i, pair in enumerate(pairs):
        here = [found.get((i, j)) for j in range(len(columns))]
        if any(here):
            cells = [
                _difference(both, column, sure.get((i, j), 1.0) < 0.05) if both else ""
                for j, (both, column) in enumerate(zip(here, columns, strict=True))
            ]
            lines.append([*pair.words, max(len(both[0]) for both in here if both), *cells])
    return markdown_table([*titles, "seeds", *(c.title for c in columns)], lines) if lines else ""


def _difference(both: tuple[list[float], list[float]], column: Column, sure: bool) -> str:
    mean, low, high = (column.scale * x for x in paired_difference(*both))
    beside = f" ({low:+.{column.digits}f} to {high:+.{column.digits}f})" if len(both[0]) > 1 else ""
    text = f"{mean:+.{column.digits}f}{beside}"
    return f"**{text}**" if sure else text
