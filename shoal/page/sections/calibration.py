"""Is it calibrated, also under shift? Reliability, coverage, severity curves."""

import math
import re
from collections.abc import Iterator

import numpy as np

from shoal import plots
from shoal.core.text import number
from shoal.data.corruptions import parse_shift
from shoal.page import sentences
from shoal.page.blocks import Block, Fold, Picture, Section, Table, TableCell, section
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData, SeedGroup
from shoal.page.sections.trust import calibration_noise

__all__ = ["calibrated", "corruption_blocks", "families", "grid_of"]

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


def corruption_blocks(story: ReportData) -> Iterator[Block]:
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


def _spread(group: SeedGroup, key: str, grid: Grid) -> plots.Spread:
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


def _value(group: SeedGroup, key: str, name: str, severity: int) -> float:
    return Measure(key, f"shift:{name}-{severity}").summary(group)[0]


def _table(group: SeedGroup, key: str, grid: Grid) -> Table:
    measure, severities = Measure(key), _severities(grid)
    rows = []
    for name, held in grid.items():
        values = {severity: _value(group, key, name, severity) for severity in severities}
        mean = float(np.mean([values[severity] for severity in held]))
        rows.append([TableCell(name, name), *(_cell(measure, v) for v in [*values.values(), mean])])
    unit = f", {measure.unit}" if measure.unit else ""
    return Table(
        f"{measure.title[0].upper()}{measure.title[1:]} of {group.label} by corruption{unit}",
        ["corruption", *map(str, severities), "mean"],
        rows,
        "Columns are severities; click on a heading to see which corruption hurts most.",
    )


def _cell(measure: Measure, value: float) -> TableCell:
    return TableCell(number(measure.scale * value, 0.2 if measure.share else 0.005), value)


_SEVERITY = re.compile(r"(.+?)[-_ ]?(\d+(?:\.\d+)?)$")


@section("calibration", order=40)
def calibrated(story: ReportData) -> Section | None:
    """Confidence against what happens, here and after a shift."""
    blocks = [*_reliability(story), *_coverage(story), *_severity(story)]
    blocks += corruption_blocks(story)
    if not blocks and not {"confidence", "coverage_90"} & story.assessment.test.keys():
        return None
    return Section("Is it calibrated, also under shift?", answer(story), blocks)


def answer(story: ReportData) -> str:
    """About the worst shift, or about the test where there is none."""
    lead, worst = story.lead, _worst(story)
    if not story.assessment.about.has_classes:
        if "coverage_90" not in story.assessment.test:
            return "Intervals are not computed for targets of this kind."
        found, _ = Measure("coverage_90", worst or "test").summary(lead)
        count = story.assessment.scores["data"]["counts"].get(worst or "test", 1)
        return sentences.coverage_sentence(0.9, found, count)
    right, says = (Measure(key, worst or "test").summary(lead)[0] for key in _PAIR)
    noise = calibration_noise(lead.first)
    if worst is None:
        return sentences.calibration_sentence(says, right, noise)
    count = story.assessment.scores["data"]["counts"].get(worst, 1)
    noise = math.sqrt(max(right * (1 - right), 1e-12) / count)
    return sentences.shift_sentence(worst.partition(":")[2], right, says, noise)


_PAIR = ("accuracy", "confidence")


def _worst(story: ReportData) -> str | None:
    """The shift under which the lead does worst."""
    key = story.assessment.about.under_shift[0]
    sign = 1 if Measure(key).better == "higher" else -1
    found = {
        f"shift:{name}": sign * Measure(key, f"shift:{name}").summary(story.lead)[0]
        for name in story.assessment.shifts
    }
    found = {part: value for part, value in found.items() if not math.isnan(value)}
    return min(found, key=lambda part: found[part]) if found else None


def _reliability(story: ReportData) -> Iterator[Block]:
    worst = _worst(story)
    for part in ["test", *([worst] if worst else [])]:
        curves = {}
        for label, group in story.peers().items():
            found = group.first.assessment and group.first.assessment.reliability(part)
            if found:
                curves[label] = found
        if curves:
            name = part.partition(":")[2] or "test data"
            alone = len(curves) == 1
            bars = "bars are 95 % intervals" if alone else "bins of fewer than 5 are left out"
            yield Picture(
                plots.reliability(curves),
                f"Reliability on {name}",
                f"On the dotted line it is right as often as it says; below it is overconfident; "
                f"{bars}. The lower panel shows how many answers are that sure.",
            )


def _coverage(story: ReportData) -> Iterator[Block]:
    curves = {}
    for label, group in story.peers().items():
        pit = group.first.assessment and group.first.assessment.samples.get("test/pit")
        if pit is not None:
            curves[label] = pit
    if curves:
        yield Picture(
            plots.coverage(curves),
            "Coverage on test data",
            "On the dotted line intervals hold what they promise; below it they are too narrow.",
        )


def families(names: list[str]) -> dict[str, dict[float, str]]:
    """Shifts of one kind together, by their severity; those without a number stand alone.

    >>> families(["rotated-15", "rotated-30", "noise"])
    {'rotated': {15.0: 'rotated-15', 30.0: 'rotated-30'}, 'shift': {1.0: 'noise'}}
    """
    found: dict[str, dict[float, str]] = {}
    for name in names:
        match = _SEVERITY.fullmatch(name)
        if match is None:
            others = found.setdefault("shift", {})
            others[len(others) + 1.0] = name
        else:
            found.setdefault(match[1], {})[float(match[2])] = name
    return found


def _severity(story: ReportData) -> Iterator[Block]:
    keys = story.assessment.about.under_shift
    others = [name for name in story.assessment.shifts if not parse_shift(name)]
    for kind, places in families(others).items():
        names = {0.0: "test", **places} if kind == "shift" else None
        for key in keys:
            curves = _curves(story, key, places)
            title = Measure(key).title
            figure = plots.severity(
                curves, title, f"severity ({kind})", names, share=Measure(key).share
            )
            yield Picture(
                figure,
                f"{title[0].upper()}{title[1:]} under shift",
                f"0 is the test itself; to the right the data move away. {_HOPES.get(key, '')}",
            )


_HOPES = {
    "accuracy": "Some loss is unavoidable; what matters is that it is noticed.",
    "ece": "A low curve means that confidence falls along with accuracy.",
    "nll": "Low is good: wrong answers that are sure cost most.",
    "rmse": "Some loss is unavoidable; what matters is that it is noticed.",
}


def _curves(story: ReportData, key: str, places: dict[float, str]) -> dict[str, plots.MetricCurve]:
    parts = {0.0: "test"} | {x: f"shift:{name}" for x, name in sorted(places.items())}
    curves = {}
    for label, group in story.peers().items():
        found = [Measure(key, part).summary(group) for part in parts.values()]
        means, errors = zip(*found, strict=True)
        curves[label] = plots.MetricCurve(list(parts), list(means), list(errors))
    return curves
