"""Which method, how many members? Scores, paired differences, ensemble sizes, strengths."""

import math
from collections.abc import Iterator, Sequence

from shoal import plots
from shoal.core.display.text import number, plus_minus
from shoal.page.blocks import (
    Block,
    Figure,
    Fold,
    Heading,
    Remark,
    Section,
    Table,
    TableCell,
    section,
)
from shoal.page.measures import Measure, baseline, measures
from shoal.page.report_data import ReportData, SeedGroup
from shoal.page.rerun_commands import is_from_estimator
from shoal.page.sweep import Sweep, growth_sentence, strength_sentence, sweeps
from shoal.page.verdicts import (
    Family,
    comparison_sentence,
    decide_groups,
    family_sentences,
    method_sentences,
)
from shoal.plots.comparison import outliers
from shoal.prediction.statistics import Verdict
from shoal.training.folder.own_data import has_own_data, has_own_network

__all__ = ["methods_section", "strength_blocks"]


def strength_blocks(report_data: ReportData, ranked: Sequence[Measure]) -> list[Block]:
    """Sentences, and a figure per measure; empty where every method has one strength."""
    swept = _one_size(sweeps(report_data.groups), report_data.lead.members)
    if not swept:
        return []
    family = decide_groups(report_data.groups, report_data.margins)
    blocks: list[Block] = [
        Heading(f"Strength of repulsion ({swept[0].members} members)"),
        Remark(strength_sentence(swept, family, Measure("nll"))),
    ]
    growth = growth_sentence(family, Measure("nll"))
    blocks += [Remark(growth)] if growth else []
    return blocks + [_figure(swept, family, measure) for measure in ranked]


def _one_size(swept: list[Sweep], wanted: int) -> list[Sweep]:
    """The sweeps of the wanted ensemble size, or of the nearest one."""
    sizes = {sweep.members for sweep in swept}
    size = min(sizes, key=lambda members: (abs(members - wanted), -members), default=0)
    return [sweep for sweep in swept if sweep.members == size]


def _figure(swept: list[Sweep], family: Family, measure: Measure) -> Figure:
    curves = {}
    for sweep in swept:
        means, errors = zip(*map(measure.summary, sweep.groups.values()), strict=True)
        curves[sweep.method] = plots.MetricCurve(list(sweep.groups), list(means), list(errors))
    falls = {s.method: limit for s in swept if (limit := s.falls(family)) is not None}
    plain = baseline(next(iter(swept[0].groups.values())), family.groups)
    figure = plots.strength(
        curves,
        measure.title,
        falls,
        None if plain is None else measure.summary(plain),
        share=measure.share,
    )
    return Figure(
        figure,
        f"{measure.capital_title} against strength",
        "Dotted: the plain ensemble with its standard error. A cross marks the first strength with "
        "significantly lower accuracy.",
    )


_FEW = 8

_DRAWN = {"accuracy", "rmse", "nll", "crps", "ece", "auroc_entropy", "auroc_variance"}


@section("methods", order=20)
def methods_section(report_data: ReportData) -> Section:
    """All groups of runs, compared."""
    columns = measures(report_data)
    if len(report_data.groups) == 1:
        typed = _compare(report_data, "", "")
        line = f"This page has one method and ensemble size. Type `{typed}` to compare several."
        if report_data.lead.first.adopted:
            line = f"This page has one adopted ensemble. Type `{typed}` to compare methods."
        table = _upright(report_data.lead, columns)
        return Section("Which method, how many members?", line, [table])
    family = decide_groups(report_data.groups, report_data.margins)
    blocks: list[Block] = [*_verdicts(family), _table(report_data, columns)]
    blocks += _differences(report_data, columns, family)
    ranked = [m for m in columns if m.better in ("lower", "higher")]
    drawn = [m for m in ranked if m.key in _DRAWN]
    blocks += [*_figures(report_data, drawn), *strength_blocks(report_data, drawn)]
    rest = _figures(report_data, [m for m in ranked if m.key not in _DRAWN])
    if rest:
        blocks.append(Fold("Figures of the other metrics", rest))
    return Section("Which method, how many members?", answer(report_data, family), blocks)


def _figures(report_data: ReportData, ranked: list[Measure]) -> list[Block]:
    blocks: list[Block] = []
    if len(report_data.peers()) > 1:
        blocks += [_compared(report_data, measure) for measure in ranked]
    if len(report_data.sizes) > 1:
        blocks.append(Heading("Ensemble size"))
        blocks += [_sized(report_data, measure) for measure in ranked]
    if len(report_data.sizes) > 1 and len(report_data.peers()) > 1:
        blocks.append(
            Fold("Method and ensemble size", [_mapped(report_data, measure) for measure in ranked])
        )
    return blocks


def answer(report_data: ReportData, family: Family) -> str:
    """Whether the methods differ from the plain ensemble in NLL, or are equal to it."""
    measure = family.primary
    decisions = {
        label: family.decisions[group, measure]
        for label, group in report_data.peers().items()
        if measure is not None and (group, measure) in family.decisions
    }
    if measure is None or not decisions:
        return "This page has no plain ensemble of the same ensemble size to compare with."
    return comparison_sentence(measure, decisions, "the plain ensemble")


def _verdicts(family: Family) -> Iterator[Block]:
    """A sentence per method and ensemble size, then what the words mean."""
    remarks = [Remark(sentence) for sentence in method_sentences(family)]
    if len(remarks) > _FEW:
        yield Fold(f"Verdicts on {len(remarks)} methods and sizes", remarks)
    else:
        yield from remarks
    if remarks:
        yield Remark(family_sentences(family))


def _heading(measure: Measure) -> str:
    arrow = {"lower": " ↓", "higher": " ↑"}.get(measure.better, "")
    return measure.title + (f" ({measure.unit})" if measure.unit else "") + arrow


def _named(group: SeedGroup, report_data: ReportData) -> list[TableCell]:
    """Method, and the ensemble size where sizes differ; a phone has little room."""
    size = [TableCell(str(group.members), group.members)] if len(report_data.sizes) > 1 else []
    return [TableCell(group.label, group.label), *size]


def _naming(report_data: ReportData) -> list[str]:
    return ["method", "members"] if len(report_data.sizes) > 1 else ["method"]


def _upright(group: SeedGroup, columns: list[Measure]) -> Table:
    """A single group: one row per metric."""
    rows = []
    for measure in columns:
        mean, error = measure.summary(group)
        shown = plus_minus(mean, error, measure.scale)
        rows.append([TableCell(_heading(measure), measure.title), TableCell(shown, mean)])
    members = group.first.many
    reading = "Mean ± standard error over the seeds." if len(group.entries) > 1 else "One seed."
    return Table(
        "All numbers",
        ["metric", members if group.first.adopted else f"{group.label}, {members}"],
        rows,
        "↑ higher is better, ↓ lower is better." + ("" if group.first.adopted else f" {reading}"),
    )


def _table(report_data: ReportData, columns: list[Measure]) -> Table:
    rows = []
    for group in report_data.groups:
        cells = _named(group, report_data)
        for measure in columns:
            mean, error = measure.summary(group)
            cells.append(TableCell(plus_minus(mean, error, measure.scale), mean))
        rows.append([*cells, TableCell(str(len(group.entries)), len(group.entries))])
    headings = [*_naming(report_data), *map(_heading, columns), "seeds"]
    return Table(
        "All numbers",
        headings,
        rows,
        "Mean ± standard error over the seeds. ↑ higher is better, ↓ lower is better. "
        "Click a heading to sort." + _forms(report_data),
    )


def _forms(report_data: ReportData) -> str:
    """The meaning of the forms in brackets after a method."""
    words = {
        "legacy": "as in the published code",
        "calibrated": "calibrated repulsion, with the push rescaled to the posterior",
    }
    forms = dict.fromkeys(group.first.form for group in report_data.groups)
    all_of_them = "all methods " if report_data.lead.first.shared else ""
    parts = [f"{all_of_them}({form}): {words[form]}." for form in forms if form in words]
    return "".join(f" {part[:1].upper()}{part[1:]}" for part in parts)


def _differences(
    report_data: ReportData, columns: list[Measure], family: Family
) -> Iterator[Block]:
    ranked = [m for m in columns if m.better in ("lower", "higher")]
    cells_by_group = {
        group: [_difference(measure, group, family) for measure in ranked]
        for group in report_data.groups
        if baseline(group, report_data.groups) is not None
    }
    if not cells_by_group:
        return
    if all(cell.value == "" for cells in cells_by_group.values() for cell in cells):
        yield Remark(
            "One seed per method gives no interval. "
            f"Type `{_compare(report_data, ', seeds=5', ' --seeds 5')}` to get intervals."
        )
        return
    yield Table(
        "Difference to the plain ensemble of the same ensemble size and seed",
        [*_naming(report_data), *map(_heading, ranked)],
        [[*_named(group, report_data), *cells] for group, cells in cells_by_group.items()],
        "Mean difference over the seeds, with its 95 % interval. Coloured: better or worse. "
        "= marks equality within the margin, ? what is not decided.",
    )


def _compare(report_data: ReportData, in_python: str, typed: str) -> str:
    """What to type to compare methods: a command, or Python for the user's network or data."""
    config = report_data.entries[0].config
    if is_from_estimator(report_data.entries[0]):
        return "shoal.report([model.run_, other.run_], 'report.html')"
    if has_own_network(config) or has_own_data(config):
        return f"shoal.compare(build, (x, y), test=(x_test, y_test){in_python})"
    return f"shoal compare CONFIG{typed}"


def _difference(measure: Measure, group: SeedGroup, family: Family) -> TableCell:
    decision = family(group, measure)
    if decision is None or not all(map(math.isfinite, decision.difference)):
        return TableCell("–")
    scaled = [measure.scale * end for end in decision.difference]
    middle, low, high = (number(value, (scaled[2] - scaled[1]) / 4) for value in scaled)
    text = f"{middle} [{low}, {high}]"
    if measure not in family.measures:
        return TableCell(text, scaled[0])
    sign = {Verdict.EQUAL: "= ", Verdict.UNDECIDED: "? "}.get(decision.verdict, "")
    tone = {Verdict.BETTER: "good", Verdict.WORSE: "mind"}.get(decision.verdict, "")
    return TableCell(f"{sign}{text}", scaled[0], tone)


def _compared(report_data: ReportData, measure: Measure) -> Figure:
    rows = {label: measure.summary(group) for label, group in report_data.peers().items()}
    figure = plots.comparison(rows, measure.title, measure.better, share=measure.share)
    noisy = any(math.isfinite(error) for _, error in rows.values())
    far = " An arrow points to a number beyond the axis." if outliers(rows) else ""
    return Figure(
        figure,
        measure.capital_title,
        (
            "Dots are means, bars one standard error over the seeds. Bars may overlap where paired "
            "differences are decided."
            if noisy
            else "One seed per method cannot show whether methods differ."
        )
        + far,
    )


def _mapped(report_data: ReportData, measure: Measure) -> Figure:
    rows: dict[str, dict[int, float]] = {label: {} for label in report_data.peers()}
    for group in report_data.groups:
        rows[group.label][group.members] = measure.summary(group)[0]
    return Figure(
        plots.heatmap(rows, measure.title, measure.better, share=measure.share),
        f"{measure.capital_title} by method and ensemble size",
        "Mean over the seeds. Bright is better.",
    )


def _sized(report_data: ReportData, measure: Measure) -> Figure:
    curves: dict[str, plots.MetricCurve] = {}
    for label in report_data.peers():
        same = sorted((g for g in report_data.groups if g.label == label), key=lambda g: g.members)
        points = [(group.members, *measure.summary(group)) for group in same]
        curves[label] = plots.MetricCurve(*map(list, zip(*points, strict=True)))
    figure = plots.sizes(curves, measure.title, share=measure.share)
    return Figure(
        figure,
        measure.capital_title,
        "Where a curve is flat, more members cost time without a gain.",
    )
