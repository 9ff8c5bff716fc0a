"""A grid as one long table: every metric on every part of the data, over the seeds."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.app.measures import Measure, against_baseline
from shoal.app.story import Group
from shoal.app.verdicts import verdict

__all__ = ["COLUMNS", "every_measure", "summary_csv"]

COLUMNS: tuple[str, ...] = (
    "method", "size", "metric", "part", "mean", "stderr", "n", "difference", "low", "high",
    "verdict",
)  # fmt: skip
"""`difference` is the mean over the seeds of this run minus the plain ensemble of the same size and
seed, which began from the same weights; `low` and `high` are the ends of its 95 % interval by
Student's t, and `verdict` says equal where that interval holds zero, else better or worse."""


_PARTS = {"shifts": "shift", "corrupted": "corrupted", "ood": "ood"}


def summary_csv(groups: Sequence[Group]) -> str:
    """A row for each method, size, metric and part; numbers in full, empty where there is none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for measure in every_measure(groups):
        writer.writerows(_row(measure, group, groups) for group in groups if group.values(measure))
    return text.getvalue()


def every_measure(groups: Sequence[Group]) -> list[Measure]:
    """Every metric that some run has, part by part: test, shifts, means over them, foreign data."""
    found: dict[Measure, None] = {}
    for group in groups:
        for entry in group.entries:
            scores = entry.assessment.scores if entry.assessment else {}
            found |= dict.fromkeys(_measures(scores))
    order = {part: place for place, part in enumerate(dict.fromkeys(m.part for m in found))}
    return sorted(found, key=lambda measure: order[measure.part])


def _measures(scores: dict[str, Any]) -> Iterator[Measure]:
    yield from (Measure(key) for key in scores.get("test", {}))
    for part, start in _PARTS.items():
        for name, found in scores.get(part, {}).items():
            yield from (Measure(key, f"{start}:{name}") for key in found)


def _row(measure: Measure, group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    mean, error = measure.summary(group)
    row: dict[str, Any] = {
        "method": group.label,
        "size": group.members,
        "metric": measure.key,
        "part": measure.part,
        "mean": _number(mean),
        "stderr": _number(error),
        "n": len(group.values(measure)),
    }
    found = against_baseline(measure, group, groups)
    if found is None:
        return row
    difference, pairs = found
    row |= {name: _number(value) for name, value in difference._asdict().items()}
    return row | {"verdict": verdict(difference, measure.better) if pairs > 1 else ""}


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else ""
