"""In what sense is it Bayesian? Evidence of the members, and distance to true posteriors."""

from collections.abc import Iterator

from shoal import plots
from shoal.analysis.evidence.compute_evidence import Evidence
from shoal.analysis.fidelity.study import Row, summarise
from shoal.core.text import number
from shoal.page.blocks import Block, Picture, Remark, Section, Table, TableCell, section
from shoal.page.fidelity_words import FILE, closest, heat_map, read_rows
from shoal.page.findings import answers, tied
from shoal.page.report_data import ReportData

__all__ = ["bayesian", "faithful"]


@section("evidence", order=60, judged=False)
def bayesian(story: ReportData) -> Section | None:
    """The first run whose evidence has been computed."""
    found = next((entry for entry in story.entries if entry.evidence is not None), None)
    if found is None or found.evidence is None:
        return None
    told = found.evidence
    blocks: list[Block] = []
    if len(story.entries) > 1:
        blocks.append(Remark(f"About the run {found.name}."))
    rest = [sentence for sentence in answers(told) if sentence != tied(told)]
    blocks += [*map(Remark, rest), *_pictures(told), _weightings(told)]
    blocks += [_rungs(told)] if told.rungs else []
    return Section("In what sense is it Bayesian?", tied(told), blocks)


def _pictures(told: Evidence) -> Iterator[Block]:
    if len(told.living) > 1:
        yield Picture(
            plots.weights({name: w.weights for name, w in told.weightings.items()}),
            "Weights of the members",
            "Uniform averaging, the dashed line, is exact Bayes only where the posterior bars "
            "reach it; stacking bars are what held-out data would choose.",
        )
        yield Picture(
            plots.likelihoods(told.log_likelihoods, told.log_evidence),
            "How far members are from a tie",
            "A member one nat below the best has a third of its weight. The evidence lies in the "
            "grey band, at most log M below the best, whatever the members are.",
        )
    if told.rungs:
        yield Picture(
            plots.ladder([(rung.name, rung.log_evidence, rung.nll) for rung in told.rungs]),
            "From point masses to a Bayesian network",
            "The more a prior may follow the data, the larger its evidence, so points stand near "
            "the top. On the right, the loss on new data in nats: lower is better.",
        )


def _weightings(told: Evidence) -> Table:
    rows = [
        [
            TableCell(name, name),
            TableCell(number(w.effective, 0.005), w.effective),
            TableCell(number(w.nll), w.nll),
            TableCell(number(w.total_variation), w.total_variation),
        ]
        for name, w in told.weightings.items()
    ]
    columns = ["weights", "members that count", "loss (nats)", "distance from uniform"]
    reading = (
        "Penalised weights include the prior on the weights; implied is the prior under which "
        "uniform averaging would be exact."
    )
    return Table("Ways to weigh the members", columns, rows, reading)


def _rungs(told: Evidence) -> Table:
    rows = [
        [
            TableCell(rung.name, rung.name),
            TableCell(number(rung.log_evidence, 0.05), rung.log_evidence),
            TableCell(number(rung.nll), rung.nll),
            TableCell(number(rung.nll_posterior), rung.nll_posterior),
        ]
        for rung in told.rungs
    ]
    columns = ["learned prior", "log evidence (nats)", "loss (nats)", "loss by evidence"]
    reading = (
        "A flow's evidence is a lower bound. The last column weighs the members by their evidence "
        "under the prior, the one before weighs all alike."
    )
    return Table("Learned priors", columns, rows, reading)


_COLUMNS = (
    "frechet/on",
    "frechet/off",
    "tv/on",
    "tv/off",
    "mean/on",
    "std/on",
    "mean/off",
    "std/off",
    "ksd2",
)


@section("fidelity", order=62)
def faithful(story: ReportData) -> Section | None:
    """The study that was kept in a run's folder, or beside the runs."""
    rows = _kept(story)
    if not rows:
        return None
    blocks = [
        Picture(
            heat_map(rows),
            "Distance to the posterior",
            "How far mean and spread of each method's predictions are from the posterior's, in the "
            "posterior's standard deviations. Dark is close; as many exact draws are at the top.",
        ),
        *_tables(rows),
    ]
    return Section("How close is each method to the true posterior?", answer(rows), blocks)


def answer(rows: list[Row]) -> str:
    """On how many problems a calibrated method is the closest."""
    best = closest(rows)
    won = [name for name, facts in best.items() if facts["distance"] < facts["other_distance"]]
    if not best:
        return "Measured on small problems whose posterior is known."
    return (
        f"On {len(won)} of {len(best)} problems with a known posterior, a calibrated method "
        f"predicts more like it than every other."
    )


def _kept(story: ReportData) -> list[Row]:
    for entry in story.entries:
        folder = entry.folder
        for place in () if folder is None else (folder, folder.parent):
            if (place / FILE).is_file():
                return read_rows(place)
    return []


def _tables(rows: list[Row]) -> Iterator[Block]:
    summary = summarise(rows)
    for problem in dict.fromkeys(problem for problem, _ in summary):
        lines = []
        for (name, method), found in summary.items():
            if name == problem:
                cells = [_cell(*found[column]) for column in _COLUMNS]
                lines.append([TableCell(method, method), *cells])
        yield Table(
            f"Every distance: {problem}",
            ["method", *_COLUMNS],
            lines,
            "Zero is the posterior itself. On: at inputs like the data; off: where there is none. "
            "Errors of mean and std are shares of the posterior's standard deviation.",
        )


def _cell(mean: float, error: float) -> TableCell:
    return TableCell(f"{mean:.3f}" if error != error else f"{mean:.3f} ± {error:.3f}", mean)
