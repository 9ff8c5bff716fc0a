"""Which method, how many members? A table with error bars, paired differences, sizes."""

import math
from collections.abc import Iterator, Sequence

from shoal import plots
from shoal.core.text import number, plus_minus
from shoal.page import sentences
from shoal.page.blocks import (
    Block,
    Fold,
    Heading,
    Picture,
    Remark,
    Section,
    Table,
    TableCell,
    section,
)
from shoal.page.measures import Measure, against_baseline, baseline, measures
from shoal.page.report_data import ReportData, SeedGroup
from shoal.page.sweep import Sweep, growth_sentence, strength_sentence, sweeps
from shoal.page.verdicts import Verdict, verdict
from shoal.plots.comparison import outliers
from shoal.prediction.statistics import Difference
from shoal.training.own_data import has_own_data, has_own_network

__all__ = ["strength_blocks", "which"]


def strength_blocks(story: ReportData, judged: Sequence[Measure]) -> list[Block]:
    """Sentences and a picture for each measure; nothing where every method has one strength."""
    found = _one_size(sweeps(story.groups), story.lead.members)
    if not found:
        return []
    blocks: list[Block] = [
        Heading(f"Against the strength of the repulsion, {found[0].members} members"),
        Remark(strength_sentence(found, story.groups, Measure("nll"))),
    ]
    growth = growth_sentence(story.groups, Measure("nll"))
    blocks += [Remark(growth)] if growth else []
    return blocks + [_picture(found, story.groups, measure) for measure in judged]


def _one_size(found: list[Sweep], wanted: int) -> list[Sweep]:
    """The sweeps of the size that is wanted, or of the nearest one."""
    sizes = {sweep.members for sweep in found}
    size = min(sizes, key=lambda members: (abs(members - wanted), -members), default=0)
    return [sweep for sweep in found if sweep.members == size]


def _picture(found: list[Sweep], groups: Sequence[SeedGroup], measure: Measure) -> Picture:
    curves = {}
    for sweep in found:
        means, errors = zip(*map(measure.summary, sweep.groups.values()), strict=True)
        curves[sweep.method] = plots.MetricCurve(list(sweep.groups), list(means), list(errors))
    falls = {s.method: limit for s in found if (limit := s.falls(groups)) is not None}
    plain = baseline(next(iter(found[0].groups.values())), groups)
    figure = plots.strength(
        curves,
        measure.title,
        falls,
        None if plain is None else measure.summary(plain),
        share=measure.share,
    )
    return Picture(
        figure,
        f"{measure.title[0].upper()}{measure.title[1:]} against strength",
        "The dotted line is the plain ensemble with its standard error; a cross stands where a "
        "method becomes less accurate than it, and gains beyond are bought with errors.",
    )


_DRAWN = {"accuracy", "rmse", "nll", "crps", "ece", "auroc_entropy", "auroc_variance"}


@section("methods", order=20)
def which(story: ReportData) -> Section:
    """Every group of runs beside every other."""
    columns = measures(story)
    if len(story.groups) == 1:
        typed = _compare(story, "", "")
        line = f"Only one kind of run is here; `{typed}` puts methods and sizes side by side."
        table = _upright(story.lead, columns)
        return Section("Which method, how many members?", line, [table])
    blocks: list[Block] = [_table(story, columns), *_differences(story, columns)]
    judged = [m for m in columns if m.better in ("lower", "higher")]
    drawn = [m for m in judged if m.key in _DRAWN]
    blocks += [*_pictures(story, drawn), *strength_blocks(story, drawn)]
    rest = _pictures(story, [m for m in judged if m.key not in _DRAWN])
    if rest:
        blocks.append(Fold("The other numbers, drawn", rest))
    return Section("Which method, how many members?", answer(story), blocks)


def _pictures(story: ReportData, judged: list[Measure]) -> list[Block]:
    blocks: list[Block] = []
    if len(story.peers()) > 1:
        blocks += [_compared(story, measure) for measure in judged]
    if len(story.sizes) > 1:
        blocks.append(Heading("Against the number of members"))
        blocks += [_sized(story, measure) for measure in judged]
    if len(story.sizes) > 1 and len(story.peers()) > 1:
        blocks.append(Fold("Method by size", [_mapped(story, measure) for measure in judged]))
    return blocks


def answer(story: ReportData) -> str:
    """Whether the methods differ from the plain ensemble in log-likelihood."""
    measure = Measure("nll")
    found: dict[str, Difference] = {}
    seeds = 0
    for label, group in story.peers().items():
        result = against_baseline(measure, group, story.groups)
        if result is not None:
            found[label], count = result
            seeds = max(seeds, count)
    if not found:
        return "There is no plain ensemble of the same size here to compare with."
    return sentences.comparison_sentence("NLL", measure.better, found, "the plain ensemble", seeds)


def _heading(measure: Measure) -> str:
    arrow = {"lower": " ↓", "higher": " ↑"}.get(measure.better, "")
    return measure.title + (f" ({measure.unit})" if measure.unit else "") + arrow


def _named(group: SeedGroup, story: ReportData) -> list[TableCell]:
    """Method and size; one size for all is no news, and a phone has little room."""
    size = [TableCell(str(group.members), group.members)] if len(story.sizes) > 1 else []
    return [TableCell(group.label, group.label), *size]


def _naming(story: ReportData) -> list[str]:
    return ["method", "members"] if len(story.sizes) > 1 else ["method"]


def _upright(group: SeedGroup, columns: list[Measure]) -> Table:
    """One group alone: a line for each number."""
    rows = []
    for measure in columns:
        mean, error = measure.summary(group)
        shown = plus_minus(mean, error, measure.scale)
        rows.append([TableCell(_heading(measure), measure.title), TableCell(shown, mean)])
    return Table(
        "All numbers",
        ["number", f"{group.label}, {group.members} members"],
        rows,
        "↑ higher is better, ↓ lower is better; "
        + ("mean ± standard error over the seeds." if len(group.entries) > 1 else "one seed."),
    )


def _table(story: ReportData, columns: list[Measure]) -> Table:
    rows = []
    for group in story.groups:
        cells = _named(group, story)
        for measure in columns:
            mean, error = measure.summary(group)
            cells.append(TableCell(plus_minus(mean, error, measure.scale), mean))
        rows.append([*cells, TableCell(str(len(group.entries)), len(group.entries))])
    headings = [*_naming(story), *map(_heading, columns), "seeds"]
    return Table(
        "All numbers",
        headings,
        rows,
        "Mean ± standard error over the seeds; ↑ higher is better, ↓ lower is better; "
        "click a heading to sort." + _forms(story),
    )


def _forms(story: ReportData) -> str:
    """What the words in brackets mean that follow the name of a method."""
    words = {
        "legacy": "as the published code does it",
        "calibrated": "with a push of the size that the posterior asks for",
    }
    found = dict.fromkeys(group.first.form for group in story.groups)
    all_of_them = "all methods " if story.lead.first.shared else ""
    told = [f"{all_of_them}({form}): {words[form]}" for form in found if form in words]
    return f" {'; '.join(told).capitalize()}." if told else ""


def _differences(story: ReportData, columns: list[Measure]) -> Iterator[Block]:
    judged = [m for m in columns if m.better in ("lower", "higher")]
    found = {
        group: [_difference(measure, group, story) for measure in judged]
        for group in story.groups
        if baseline(group, story.groups) is not None
    }
    if not found:
        return
    if all(cell.value == "" for cells in found.values() for cell in cells):
        yield Remark(
            "One seed a method says nothing about the noise; "
            f"`{_compare(story, ', seeds=5', ' --seeds 5')}` gives every difference an interval."
        )
        return
    yield Table(
        "Difference to the plain ensemble of the same size and seed",
        [*_naming(story), *map(_heading, judged)],
        [[*_named(group, story), *cells] for group, cells in found.items()],
        "Mean difference with its 95 % interval over the seeds; = where the interval holds zero. "
        "One interval in twenty misses by chance.",
    )


def _compare(story: ReportData, in_python: str, typed: str) -> str:
    """What compares methods: a command, or Python for a network or data of the user's own."""
    config = story.entries[0].config
    if has_own_network(config) or has_own_data(config):
        return f"shoal.compare(build, (x, y), test=(x_test, y_test){in_python})"
    return f"shoal compare CONFIG{typed}"


def _difference(measure: Measure, group: SeedGroup, story: ReportData) -> TableCell:
    found = against_baseline(measure, group, story.groups)
    if found is None or not all(map(math.isfinite, found[0])):
        return TableCell("–")
    scaled = Difference(*(measure.scale * end for end in found[0]))
    width = (scaled.high - scaled.low) / 4
    word = verdict(scaled, measure.better)
    middle, low, high = (number(value, width) for value in scaled)
    sign = "= " if word is Verdict.EQUAL else ""
    tone = {Verdict.BETTER: "good", Verdict.WORSE: "mind"}.get(word, "")
    return TableCell(f"{sign}{middle} [{low}, {high}]", scaled.difference, tone)


def _compared(story: ReportData, measure: Measure) -> Picture:
    rows = {label: measure.summary(group) for label, group in story.peers().items()}
    figure = plots.comparison(rows, measure.title, measure.better, share=measure.share)
    noisy = any(math.isfinite(error) for _, error in rows.values())
    far = " An arrow points to a number that lies beyond the axis." if outliers(rows) else ""
    return Picture(
        figure,
        f"{measure.title[0].upper()}{measure.title[1:]}",
        (
            "Dots are means, bars one standard error over the seeds; the table of differences says "
            "which of them are more than noise."
            if noisy
            else "One seed each: the dots alone do not tell whether methods differ."
        )
        + far,
    )


def _mapped(story: ReportData, measure: Measure) -> Picture:
    rows: dict[str, dict[int, float]] = {label: {} for label in story.peers()}
    for group in story.groups:
        rows[group.label][group.members] = measure.summary(group)[0]
    return Picture(
        plots.heatmap(rows, measure.title, measure.better, share=measure.share),
        f"{measure.title[0].upper()}{measure.title[1:]} by method and size",
        "Means over the seeds; bright is better.",
    )


def _sized(story: ReportData, measure: Measure) -> Picture:
    curves: dict[str, plots.MetricCurve] = {}
    for label in story.peers():
        same = sorted((g for g in story.groups if g.label == label), key=lambda g: g.members)
        found = [(group.members, *measure.summary(group)) for group in same]
        curves[label] = plots.MetricCurve(*map(list, zip(*found, strict=True)))
    figure = plots.sizes(curves, measure.title, share=measure.share)
    return Picture(
        figure,
        f"{measure.title[0].upper()}{measure.title[1:]}",
        "Where a curve is flat, more members cost time and bring nothing.",
    )
