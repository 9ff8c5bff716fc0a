"""A grid of runs in tables: means with error bars, and differences to the plain ensemble."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.core.display.text import number, plus_minus, table
from shoal.experiment.grid import Grid, GridPoint
from shoal.page.measures import CORRUPTED, Measure, against_baseline, headline
from shoal.page.report_data import SeedGroup, flat, load_report_data
from shoal.page.verdicts import Verdict, verdict

__all__ = [
    "COLUMNS",
    "comparison_text",
    "comparison_value",
    "every_measure",
    "groups_of",
    "headlines",
    "results_csv",
    "summary_csv",
]

_SETS = 2


def groups_of(grid: Grid) -> list[SeedGroup]:
    """The completed runs, grouped by method and ensemble size."""
    found: dict[tuple[str, int], list[GridPoint]] = {}
    for cell in grid.points:
        if grid.is_done(cell):
            found.setdefault((cell.variant.label, cell.members), []).append(cell)
    return [
        SeedGroup(label, load_report_data([grid.place(point) for point in points]).entries)
        for (label, _), points in found.items()
    ]


def headlines(groups: list[SeedGroup]) -> list[Measure]:
    """The few metrics that fit in a terminal."""
    assessment = groups[0].first.assessment
    if assessment is None:
        return []
    detection = f"auroc_{assessment.about.uncertainty}"
    wanted = [*(Measure(key) for key in headline(assessment.about)), *CORRUPTED]
    wanted += [Measure(detection, f"ood:{name}") for name in list(assessment.ood)[:_SETS]]
    return [m for m in wanted if any(group.values(m) for group in groups)]


def comparison_text(groups: list[SeedGroup]) -> str:
    """A table of means, and one of differences to the plain ensemble where there is one."""
    measures = headlines(groups)
    header = ["", "members", *(f"{m.title}, %" if m.share else m.title for m in measures)]
    rows = [
        [group.label, str(group.members), *(_mean(m, group) for m in measures)] for group in groups
    ]
    seeds = max(len(group.entries) for group in groups)
    heading = (
        f"Mean ± standard error over {seeds} seeds" if seeds > 1 else "One seed, no error bars"
    )
    blocks = [f"{heading}\n\n{table(rows, header)}"]
    differing = [
        [group.label, str(group.members), *cells]
        for group in groups
        if any(cells := [_difference(m, group, groups) for m in measures])
    ]
    if differing and seeds > 1:
        words = (
            "Difference to the plain ensemble of the same ensemble size and seeds (95 % intervals)"
        )
        blocks.append(f"{words}\n\n{table(differing, header)}")
    return "\n\n".join(blocks)


def _mean(measure: Measure, group: SeedGroup) -> str:
    return plus_minus(*measure.summary(group), scale=measure.scale)


def _difference(measure: Measure, group: SeedGroup, groups: list[SeedGroup]) -> str:
    found = against_baseline(measure, group, groups)
    if found is None:
        return ""
    difference, low, high = (measure.scale * value for value in found[0])
    word = verdict(found[0], measure.better)
    if word is Verdict.EQUAL:
        return "not significant"
    text = number(difference, (high - low) / 4)
    return f"{word} {text if text.startswith('−') else f'+{text}'}"


def comparison_value(groups: list[SeedGroup]) -> list[dict[str, Any]]:
    """The numbers of `comparison_text`, for programs."""
    found = []
    for group in groups:
        scores: dict[str, Any] = {}
        for measure in headlines(groups):
            mean, error = measure.summary(group)
            scores[_key(measure)] = {"mean": mean, "error": error}
            pair = against_baseline(measure, group, groups)
            if pair is not None:
                scores[_key(measure)]["to_ensemble"] = pair[0]._asdict()
        head = {"method": group.label, "members": group.members, "seeds": len(group.entries)}
        found.append(head | {"scores": scores})
    return found


def _key(measure: Measure) -> str:
    return f"{measure.split}/{measure.key}"


def results_csv(groups: list[SeedGroup]) -> str:
    """Every score of every run, one row per run."""
    rows = []
    for group in groups:
        for record in group.entries:
            scores = record.assessment.scores if record.assessment else {}
            splits = {kind: scores.get(kind, {}) for kind in ("test", *_KINDS)}
            head = {"method": group.label, "members": group.members, "seed": record.seed}
            rows.append(head | _flat(splits))
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(table: dict[str, Any]) -> dict[str, str]:
    found = flat(table)
    return {key: "" if value == str(math.nan) else value for key, value in found.items()}


COLUMNS: tuple[str, ...] = (
    "method", "size", "metric", "part", "mean", "stderr", "n", "difference", "low", "high",
    "verdict",
)  # fmt: skip
"""`difference` is the mean over the seeds of this method minus the plain ensemble. Both have the
same ensemble size, seed and initial weights. `low` and `high` are the ends of the 95 % interval by
Student's t. `verdict` is "equal" where the interval contains 0, else "better" or "worse"."""

_KINDS = {"shifts": "shift", "corrupted": "corrupted", "ood": "ood"}


def summary_csv(groups: Sequence[SeedGroup]) -> str:
    """A row per method, ensemble size, metric and split; all digits, empty where not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for measure in every_measure(groups):
        writer.writerows(_row(measure, group, groups) for group in groups if group.values(measure))
    return text.getvalue()


def every_measure(groups: Sequence[SeedGroup]) -> list[Measure]:
    """Every metric of the runs, split by split: test, shifts, means over corruptions, OOD."""
    found: dict[Measure, None] = {}
    for group in groups:
        for record in group.entries:
            scores = record.assessment.scores if record.assessment else {}
            found |= dict.fromkeys(_measures(scores))
    order = {split: i for i, split in enumerate(dict.fromkeys(m.split for m in found))}
    return sorted(found, key=lambda measure: order[measure.split])


def _measures(scores: dict[str, Any]) -> Iterator[Measure]:
    yield from (Measure(key) for key in scores.get("test", {}))
    for kind, start in _KINDS.items():
        for name, found in scores.get(kind, {}).items():
            yield from (Measure(key, f"{start}:{name}") for key in found)


def _row(measure: Measure, group: SeedGroup, groups: Sequence[SeedGroup]) -> dict[str, Any]:
    mean, error = measure.summary(group)
    row: dict[str, Any] = {
        "method": group.label,
        "size": group.members,
        "metric": measure.key,
        "part": measure.split,
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
