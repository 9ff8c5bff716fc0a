"""Is it calibrated, also under shift? Reliability, coverage, severity curves."""

import math
import re
from collections.abc import Iterator
from operator import methodcaller

import numpy as np

from shoal import plots
from shoal.core.display.text import number, percent
from shoal.data.corruptions import parse_shift
from shoal.page import sentences
from shoal.page.advice import report_again
from shoal.page.blocks import Block, Figure, Fold, Remark, Section, Table, TableCell, section
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData, SeedGroup
from shoal.page.sections.trust import calibration_noise

__all__ = ["calibration_section", "corruption_blocks", "families", "grid_of"]

Grid = dict[str, list[int]]
"""Severities of each corruption."""

_READINGS = {
    "accuracy": "A robust method has a line that falls slowly.",
    "ece": "A low line means that confidence falls with accuracy.",
}


def grid_of(names: list[str]) -> Grid:
    """The corruptions among the shifts, each with its severities.

    >>> grid_of(["rotated-15", "fog-1", "fog-3", "snow-3"])
    {'fog': [1, 3], 'snow': [3]}
    """
    grid: Grid = {}
    for name, severity in filter(None, map(parse_shift, names)):
        grid.setdefault(name, []).append(severity)
    return grid


def corruption_blocks(report_data: ReportData) -> Iterator[Block]:
    """Accuracy and ECE of every method against severity, and tables of the lead."""
    grid = grid_of(list(report_data.assessment.shifts))
    if not grid or not report_data.assessment.about.has_classes:
        return
    count = "one corruption" if len(grid) == 1 else f"{len(grid)} corruptions"
    for key, reading in _READINGS.items():
        measure = Measure(key)
        curves = {
            label: _quartiles(group, key, grid) for label, group in report_data.peers().items()
        }
        yield Figure(
            plots.corrupted(curves, measure.title, share=measure.share),
            f"{measure.capital_title} under corruption",
            f"A point is the mean over {count}; a bar spans the middle half. "
            f"Severity 0 is the test set. {reading}",
        )
    tables = [_table(report_data.lead, key, grid) for key in (*_READINGS, "nll")]
    yield tables[0]
    yield Fold("ECE and NLL by corruption", tables[1:])


def _quartiles(group: SeedGroup, key: str, grid: Grid) -> plots.Spread:
    """Mean and quartiles over the corruptions, of the means over the seeds."""
    clean = Measure(key).summary(group)[0]
    rows = [(0.0, clean, clean, clean)]
    for severity in _severities(grid):
        values = [_value(group, key, name, severity) for name in grid]
        known = [value for value in values if not math.isnan(value)]
        if known:
            low, high = np.quantile(known, (0.25, 0.75))
            rows.append((float(severity), float(np.mean(known)), float(low), float(high)))
    return plots.Spread(*map(list, zip(*rows, strict=True)))


def _severities(grid: Grid) -> list[int]:
    return sorted({severity for listed in grid.values() for severity in listed})


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
        f"{measure.capital_title} of {group.label} by corruption{unit}",
        ["corruption", *map(str, severities), "mean"],
        rows,
        "Columns are corruption severities. Click a heading to sort.",
    )


def _cell(measure: Measure, value: float) -> TableCell:
    return TableCell(number(measure.scale * value, 0.2 if measure.share else 0.005), value)


_SEVERITY = re.compile(r"(.+?)[-_ ]?(\d+(?:\.\d+)?)$")


@section("calibration", order=40)
def calibration_section(report_data: ReportData) -> Section | None:
    """Confidence against accuracy, on the test set and under shift."""
    blocks = [*_reliability(report_data), *_coverage(report_data), *_severity(report_data)]
    blocks += [*corruption_blocks(report_data), *_no_shifts(report_data)]
    if not blocks and not {"confidence", "coverage_90"} & report_data.assessment.test.keys():
        return None
    return Section("Is it calibrated, also under shift?", answer(report_data), blocks)


def _no_shifts(report_data: ReportData) -> Iterator[Block]:
    """In place of figures under shift: that no shifted data were given."""
    about = report_data.assessment.about
    if not report_data.assessment.shifts and about.under_shift and "loss" not in about.kinds:
        yield Remark(
            "No shifted data were given, so calibration under shift is not known. "
            "Give changed test inputs, such as noisy ones.",
            code=report_again(report_data.lead.first, "shifts"),
        )


def answer(report_data: ReportData) -> str:
    """About the test set, then about the worst shift."""
    lead, worst = report_data.lead, _worst(report_data)
    splits = ["test", *([worst] if worst else [])]
    if not report_data.assessment.about.has_classes:
        if "coverage_90" not in report_data.assessment.test:
            loss = "loss" in report_data.assessment.about.kinds
            return f"{'A custom loss' if loss else 'This kind of target'} has no intervals."
        shares = {split: Measure("coverage_90", split).summary(lead)[0] for split in splits}
        count = report_data.assessment.scores["data"]["counts"].get("test", 1)
        text = sentences.coverage_sentence(0.9, shares["test"], count)
        under = shares.get(worst or "", math.nan)
        return text if math.isnan(under) else f"{text} Under {_named(worst)}: {percent(under)}."
    accuracy, confidence = (Measure(key).summary(lead)[0] for key in _PAIR)
    text = sentences.calibration_sentence(confidence, accuracy, calibration_noise(lead.first))
    if worst is None:
        return text
    accuracy, confidence = (Measure(key, worst).summary(lead)[0] for key in _PAIR)
    count = report_data.assessment.scores["data"]["counts"].get(worst, 1)
    noise = math.sqrt(max(accuracy * (1 - accuracy), 1e-12) / count)
    return f"{text} {sentences.shift_sentence(_named(worst), accuracy, confidence, noise)}"


def _named(split: str | None) -> str:
    return "" if split is None else split.partition(":")[2]


_PAIR = ("accuracy", "confidence")


def _worst(report_data: ReportData) -> str | None:
    """The shift with the worst score of the lead; None if the task has no score under shift."""
    if not report_data.assessment.about.under_shift:
        return None
    key = report_data.assessment.about.under_shift[0]
    sign = 1 if Measure(key).better == "higher" else -1
    scores = {
        f"shift:{name}": sign * Measure(key, f"shift:{name}").summary(report_data.lead)[0]
        for name in report_data.assessment.shifts
    }
    scores = {split: value for split, value in scores.items() if not math.isnan(value)}
    return min(scores, key=lambda split: scores[split]) if scores else None


def _reliability(report_data: ReportData) -> Iterator[Block]:
    worst = _worst(report_data)
    for split in ["test", *([worst] if worst else [])]:
        curves = report_data.of_peers(methodcaller("reliability", split))
        if curves:
            name = split.partition(":")[2] or "the test set"
            alone = len(curves) == 1
            bars = (
                "Bars are 95 % intervals."
                if alone
                else "Bins with fewer than 5 inputs are omitted."
            )
            yield Figure(
                plots.reliability(curves),
                f"Reliability on {name}",
                f"On the dotted line, accuracy equals confidence; below it, the method is "
                f"overconfident. {bars} Lower panel: share of the predictions in each bin.",
            )


def _coverage(report_data: ReportData) -> Iterator[Block]:
    curves = report_data.of_peers(lambda evaluation: evaluation.samples.get("test/pit"))
    if curves:
        yield Figure(
            plots.coverage(curves),
            "Coverage on the test set",
            "On the dotted line, intervals contain the expected share of targets. Below the line, "
            "intervals are too narrow.",
        )


def families(names: list[str]) -> dict[str, dict[float, str]]:
    """Shifts grouped by kind and severity; names without a number form the group "shift".

    >>> families(["rotated-15", "rotated-30", "noise"])
    {'rotated': {15.0: 'rotated-15', 30.0: 'rotated-30'}, 'shift': {1.0: 'noise'}}
    """
    kinds: dict[str, dict[float, str]] = {}
    for name in names:
        match = _SEVERITY.fullmatch(name)
        if match is None:
            others = kinds.setdefault("shift", {})
            others[len(others) + 1.0] = name
        else:
            kinds.setdefault(match[1], {})[float(match[2])] = name
    return kinds


def _severity(report_data: ReportData) -> Iterator[Block]:
    keys = report_data.assessment.about.under_shift
    others = [name for name in report_data.assessment.shifts if not parse_shift(name)]
    for kind, places in families(others).items():
        names = {0.0: "test", **places} if kind == "shift" else None
        for key in keys:
            curves, measure = _curves(report_data, key, places), Measure(key)
            axis = f"severity ({kind})"
            yield Figure(
                plots.severity(curves, measure.title, axis, names, share=measure.share),
                f"{measure.capital_title} under shift",
                f"Severity 0 is the test set. {_READING.get(key, '')}".rstrip(),
            )


_READING = {
    "accuracy": "Some loss of accuracy is unavoidable; confidence should fall with accuracy.",
    "ece": "A low curve means that confidence falls with accuracy.",
    "label_mae": "Lower is better: the distance of the predicted class from the label.",
    "nll": "Lower is better: certain but wrong predictions cost most.",
    "rmse": "Some increase is unavoidable; intervals should widen with the error.",
}


def _curves(
    report_data: ReportData, key: str, places: dict[float, str]
) -> dict[str, plots.MetricCurve]:
    splits = {0.0: "test"} | {x: f"shift:{name}" for x, name in sorted(places.items())}
    curves = {}
    for label, group in report_data.peers().items():
        summaries = [Measure(key, split).summary(group) for split in splits.values()]
        means, errors = zip(*summaries, strict=True)
        curves[label] = plots.MetricCurve(list(splits), list(means), list(errors))
    return curves
