"""The corruptions on the page: curves over the severity, and a table of every one of them."""

import math
from collections.abc import Iterator

import numpy as np

from shoal import plots
from shoal.app.blocks import Block, Cell, Fold, Picture, Table
from shoal.app.measures import Measure
from shoal.app.story import Group, Story
from shoal.app.words import number
from shoal.data.corruptions import parse_shift

__all__ = ["corruption_blocks", "grid_of"]

Grid = dict[str, list[int]]
"""Severities of each corruption."""

_READINGS = {
    "accuracy": "The slower a line falls, the more robust the method.",
    "ece": "A low line means that confidence falls along with accuracy.",
}


def grid_of(names: list[str]) -> Grid:
    """The corruptions among the names of shifts, each with its severities.

    >>> grid_of(["rotated-15", "fog-1", "fog-3", "snow-3"])
    {'fog': [1, 3], 'snow': [3]}
    """
    found: Grid = {}
    for name, severity in filter(None, map(parse_shift, names)):
        found.setdefault(name, []).append(severity)
    return found


def corruption_blocks(story: Story) -> Iterator[Block]:
    """Accuracy and calibration error of every method as corruptions grow, and the lead in full."""
    grid = grid_of(list(story.assessment.shifts))
    if not grid or not story.assessment.about.has_classes:
        return
    count = "one corruption" if len(grid) == 1 else f"{len(grid)} corruptions"
    for key, reading in _READINGS.items():
        measure = Measure(key)
        curves = {label: _spread(group, key, grid) for label, group in story.peers().items()}
        yield Picture(
            plots.corrupted(curves, measure.title, share=measure.share),
            f"{measure.title[0].upper()}{measure.title[1:]} under corruption",
            f"Each point is a mean over {count}, each bar holds the middle half of them; "
            f"0 is the test itself. {reading}",
        )
    tables = [_table(story.lead, key, grid) for key in (*_READINGS, "nll")]
    yield tables[0]
    yield Fold("The same for calibration error and NLL", tables[1:])


def _spread(group: Group, key: str, grid: Grid) -> plots.Spread:
    """Mean and quartiles over the corruptions, of means over the seeds."""
    clean = Measure(key).summary(group)[0]
    rows = [(0.0, clean, clean, clean)]
    for severity in _severities(grid):
        found = [_value(group, key, name, severity) for name in grid]
        known = [value for value in found if not math.isnan(value)]
        if known:
            low, high = np.quantile(known, (0.25, 0.75))
            rows.append((float(severity), float(np.mean(known)), float(low), float(high)))
    return plots.Spread(*map(list, zip(*rows, strict=True)))


def _severities(grid: Grid) -> list[int]:
    return sorted({severity for found in grid.values() for severity in found})


def _value(group: Group, key: str, name: str, severity: int) -> float:
    return Measure(key, f"shift:{name}-{severity}").summary(group)[0]


def _table(group: Group, key: str, grid: Grid) -> Table:
    measure, severities = Measure(key), _severities(grid)
    rows = []
    for name, held in grid.items():
        values = {severity: _value(group, key, name, severity) for severity in severities}
        mean = float(np.mean([values[severity] for severity in held]))
        rows.append([Cell(name, name), *(_cell(measure, v) for v in [*values.values(), mean])])
    unit = f", {measure.unit}" if measure.unit else ""
    return Table(
        f"{measure.title[0].upper()}{measure.title[1:]} of {group.label} by corruption{unit}",
        ["corruption", *map(str, severities), "mean"],
        rows,
        "Columns are severities; click on a heading to see which corruption hurts most.",
    )


def _cell(measure: Measure, value: float) -> Cell:
    return Cell(number(measure.scale * value, 0.2 if measure.share else 0.005), value)
