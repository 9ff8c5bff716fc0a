"""Which method, how many members? A table with error bars, paired differences, sizes."""

import math
from collections.abc import Iterator

from shoal import plots
from shoal.app import sentences
from shoal.app.blocks import Block, Cell, Fold, Heading, Picture, Remark, Section, Table, section
from shoal.app.measures import Measure, against_baseline, baseline, measures
from shoal.app.story import Group, Story
from shoal.app.strength_blocks import strength_blocks
from shoal.app.verdicts import Verdict, verdict
from shoal.app.words import number, plus_minus
from shoal.plots.comparison import outliers
from shoal.prediction.statistics import Difference
from shoal.training.own_data import has_own_data, has_own_network

__all__ = ["which"]

_DRAWN = {"accuracy", "rmse", "nll", "crps", "ece", "auroc_entropy", "auroc_variance"}


@section("methods", order=20)
def which(story: Story) -> Section:
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


def _pictures(story: Story, judged: list[Measure]) -> list[Block]:
    blocks: list[Block] = []
    if len(story.peers()) > 1:
        blocks += [_compared(story, measure) for measure in judged]
    if len(story.sizes) > 1:
        blocks.append(Heading("Against the number of members"))
        blocks += [_sized(story, measure) for measure in judged]
    if len(story.sizes) > 1 and len(story.peers()) > 1:
        blocks.append(Fold("Method by size", [_mapped(story, measure) for measure in judged]))
    return blocks


def answer(story: Story) -> str:
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


def _named(group: Group, story: Story) -> list[Cell]:
    """Method and size; one size for all is no news, and a phone has little room."""
    size = [Cell(str(group.members), group.members)] if len(story.sizes) > 1 else []
    return [Cell(group.label, group.label), *size]


def _naming(story: Story) -> list[str]:
    return ["method", "members"] if len(story.sizes) > 1 else ["method"]


def _upright(group: Group, columns: list[Measure]) -> Table:
    """One group alone: a line for each number."""
    rows = []
    for measure in columns:
        mean, error = measure.summary(group)
        shown = plus_minus(mean, error, measure.scale)
        rows.append([Cell(_heading(measure), measure.title), Cell(shown, mean)])
    return Table(
        "All numbers",
        ["number", f"{group.label}, {group.members} members"],
        rows,
        "↑ higher is better, ↓ lower is better; "
        + ("mean ± standard error over the seeds." if len(group.entries) > 1 else "one seed."),
    )


def _table(story: Story, columns: list[Measure]) -> Table:
    rows = []
    for group in story.groups:
        cells = _named(group, story)
        for measure in columns:
            mean, error = measure.summary(group)
            cells.append(Cell(plus_minus(mean, error, measure.scale), mean))
        rows.append([*cells, Cell(str(len(group.entries)), len(group.entries))])
    headings = [*_naming(story), *map(_heading, columns), "seeds"]
    return Table(
        "All numbers",
        headings,
        rows,
        "Mean ± standard error over the seeds; ↑ higher is better, ↓ lower is better; "
        "click a heading to sort." + _forms(story),
    )


def _forms(story: Story) -> str:
    """What the words in brackets mean that follow the name of a method."""
    words = {
        "legacy": "as the published code does it",
        "calibrated": "with a push of the size that the posterior asks for",
    }
    found = dict.fromkeys(group.first.form for group in story.groups)
    all_of_them = "all methods " if story.lead.first.shared else ""
    told = [f"{all_of_them}({form}): {words[form]}" for form in found if form in words]
    return f" {'; '.join(told).capitalize()}." if told else ""


def _differences(story: Story, columns: list[Measure]) -> Iterator[Block]:
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


def _compare(story: Story, in_python: str, typed: str) -> str:
    """What compares methods: a command, or Python for a network or data of the user's own."""
    config = story.entries[0].config
    if has_own_network(config) or has_own_data(config):
        return f"shoal.compare(build, (x, y), test=(x_test, y_test){in_python})"
    return f"shoal compare CONFIG{typed}"


def _difference(measure: Measure, group: Group, story: Story) -> Cell:
    found = against_baseline(measure, group, story.groups)
    if found is None or not all(map(math.isfinite, found[0])):
        return Cell("–")
    scaled = Difference(*(measure.scale * end for end in found[0]))
    width = (scaled.high - scaled.low) / 4
    word = verdict(scaled, measure.better)
    middle, low, high = (number(value, width) for value in scaled)
    sign = "= " if word is Verdict.EQUAL else ""
    tone = {Verdict.BETTER: "good", Verdict.WORSE: "mind"}.get(word, "")
    return Cell(f"{sign}{middle} [{low}, {high}]", scaled.difference, tone)


def _compared(story: Story, measure: Measure) -> Picture:
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


def _mapped(story: Story, measure: Measure) -> Picture:
    rows: dict[str, dict[int, float]] = {label: {} for label in story.peers()}
    for group in story.groups:
        rows[group.label][group.members] = measure.summary(group)[0]
    return Picture(
        plots.heatmap(rows, measure.title, measure.better, share=measure.share),
        f"{measure.title[0].upper()}{measure.title[1:]} by method and size",
        "Means over the seeds; bright is better.",
    )


def _sized(story: Story, measure: Measure) -> Picture:
    curves: dict[str, plots.Curve] = {}
    for label in story.peers():
        same = sorted((g for g in story.groups if g.label == label), key=lambda g: g.members)
        found = [(group.members, *measure.summary(group)) for group in same]
        curves[label] = plots.Curve(*map(list, zip(*found, strict=True)))
    figure = plots.sizes(curves, measure.title, share=measure.share)
    return Picture(
        figure,
        f"{measure.title[0].upper()}{measure.title[1:]}",
        "Where a curve is flat, more members cost time and bring nothing.",
    )
