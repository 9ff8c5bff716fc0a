"""A grid of runs in numbers: means with error bars, and differences to the plain ensemble."""

import csv
import io
import math
from typing import Any

from shoal.app.grid import Cell, Grid
from shoal.app.measures import CORRUPTED, Measure, against_baseline, headline
from shoal.app.outcome import table
from shoal.app.story import Group, flat, tell
from shoal.app.verdicts import Verdict, verdict
from shoal.app.words import number, plus_minus

__all__ = ["comparison_text", "comparison_value", "groups_of", "headlines", "results_csv"]

_SETS = 2


def groups_of(grid: Grid) -> list[Group]:
    """The runs that are done, those that differ by their seed alone together."""
    found: dict[tuple[str, int], list[Cell]] = {}
    for cell in grid.cells:
        if grid.is_done(cell):
            found.setdefault((cell.variant.label, cell.members), []).append(cell)
    return [
        Group(label, tell([grid.place(cell) for cell in cells]).entries)
        for (label, _), cells in found.items()
    ]


def headlines(groups: list[Group]) -> list[Measure]:
    """The few measures that a terminal has room for."""
    assessment = groups[0].first.assessment
    if assessment is None:
        return []
    told = f"auroc_{assessment.about.uncertainty}"
    wanted = [*(Measure(key) for key in headline(assessment.about)), *CORRUPTED]
    wanted += [Measure(told, f"ood:{name}") for name in list(assessment.ood)[:_SETS]]
    return [m for m in wanted if any(group.values(m) for group in groups)]


def comparison_text(groups: list[Group]) -> str:
    """A table of means, and one of differences where there is a plain ensemble to differ from."""
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
        words = "Difference to the plain ensemble of the same size and seeds (95 % intervals)"
        blocks.append(f"{words}\n\n{table(differing, header)}")
    return "\n\n".join(blocks)


def _mean(measure: Measure, group: Group) -> str:
    return plus_minus(*measure.summary(group), scale=measure.scale)


def _difference(measure: Measure, group: Group, groups: list[Group]) -> str:
    found = against_baseline(measure, group, groups)
    if found is None:
        return ""
    difference, low, high = (measure.scale * value for value in found[0])
    word = verdict(found[0], measure.better)
    if word is Verdict.EQUAL:
        return word
    text = number(difference, (high - low) / 4)
    return f"{word} {text if text.startswith('−') else f'+{text}'}"


def comparison_value(groups: list[Group]) -> list[dict[str, Any]]:
    """The same numbers for programs."""
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
    return f"{measure.part}/{measure.key}"


def results_csv(groups: list[Group]) -> str:
    """Every score of every run, one run a row."""
    rows = []
    for group in groups:
        for entry in group.entries:
            scores = entry.assessment.scores if entry.assessment else {}
            parts = {part: scores.get(part, {}) for part in ("test", "shifts", "corrupted", "ood")}
            head = {"method": group.label, "members": group.members, "seed": entry.seed}
            rows.append(head | _flat(parts))
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(table: dict[str, Any]) -> dict[str, str]:
    found = flat(table)
    return {key: "" if value == str(math.nan) else value for key, value in found.items()}
