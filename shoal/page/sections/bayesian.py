"""In what sense is it Bayesian? Log evidence, and the distance to true posteriors."""

import math
from collections.abc import Iterator

from shoal import plots
from shoal.analysis.evidence.compute_evidence import Evidence
from shoal.analysis.fidelity.certificate import load_certificate
from shoal.analysis.fidelity.study import Row, summarise
from shoal.core.display.text import number
from shoal.page.blocks import Block, Figure, Remark, Section, Table, TableCell, section
from shoal.page.fidelity import (
    COLUMNS,
    FILE,
    certificate_figure,
    certificate_sentences,
    closest,
    heat_map,
    read_rows,
    shown,
)
from shoal.page.findings import answers, tied
from shoal.page.report_data import ReportData

__all__ = ["certificate_section", "evidence_section", "fidelity_section"]


@section("evidence", order=60, evaluated=False)
def evidence_section(report_data: ReportData) -> Section | None:
    """The evidence of the first run that has it."""
    record = next((record for record in report_data.entries if record.evidence is not None), None)
    if record is None or record.evidence is None:
        return None
    evidence = record.evidence
    blocks: list[Block] = []
    if len(report_data.entries) > 1:
        blocks.append(Remark(f"About the run {record.name}."))
    rest = [sentence for sentence in answers(evidence) if sentence != tied(evidence)]
    blocks += [*map(Remark, rest), *_figures(evidence), _weightings(evidence)]
    blocks += [_priors(evidence)] if evidence.learned_priors else []
    return Section("In what sense is it Bayesian?", tied(evidence), blocks)


def _figures(evidence: Evidence) -> Iterator[Block]:
    if len(evidence.finite_members) > 1:
        yield Figure(
            plots.weights({name: w.weights for name, w in evidence.weightings.items()}),
            "Weights of the members",
            "Dashed: uniform weights, which are exact only where the posterior bars reach them. "
            "Stacking weights are fitted on held-out data.",
        )
        yield Figure(
            plots.likelihoods(evidence.log_likelihoods, evidence.log_evidence),
            "Log-likelihood of each member",
            "A member one nat below the best has about a third of its posterior weight. The log "
            "evidence always lies in the grey band, at most log M below the best.",
        )
    if evidence.learned_priors:
        yield Figure(
            plots.prior_comparison(
                [(p.name, p.log_evidence, p.nll) for p in evidence.learned_priors]
            ),
            "From point masses to a Bayesian network",
            "A prior that can follow the data more has a larger evidence, so point masses are near "
            "the top. Right: NLL on held-out data in nats; lower is better.",
        )


def _weightings(evidence: Evidence) -> Table:
    rows = [
        [
            TableCell(name, name),
            TableCell(number(w.effective, 0.005), w.effective),
            TableCell(number(w.nll), w.nll),
            TableCell(number(w.total_variation), w.total_variation),
        ]
        for name, w in evidence.weightings.items()
    ]
    columns = ["weights", "effective members", "NLL (nats)", "total variation to uniform"]
    reading = "Implied: the prior under which uniform averaging is exact."
    if "penalised" in evidence.weightings:
        reading = f"Penalised: the posterior includes the weight prior. {reading}"
    return Table("Weights of the members, compared", columns, rows, reading)


def _priors(evidence: Evidence) -> Table:
    rows = [
        [
            TableCell(prior.name, prior.name),
            TableCell(number(prior.log_evidence, 0.05), prior.log_evidence),
            TableCell(number(prior.nll), prior.nll),
            TableCell(number(prior.nll_posterior), prior.nll_posterior),
        ]
        for prior in evidence.learned_priors
    ]
    columns = ["learned prior", "log evidence (nats)", "NLL (nats)", "NLL by evidence (nats)"]
    reading = (
        "The log evidence of a flow is a lower bound. NLL is that of the uniform average; NLL by "
        "evidence weighs the members by their evidence under the prior."
    )
    return Table("Learned priors", columns, rows, reading)


@section("certificate", order=61, evaluated=False)
def certificate_section(report_data: ReportData) -> Section | None:
    """The certificate of the first run that has one."""
    folders = [record.folder for record in report_data.entries if record.folder is not None]
    certificate = next(filter(None, map(load_certificate, folders)), None)
    if certificate is None:
        return None
    sampled, quality, closeness, *caveats = certificate_sentences(certificate)
    names = shown(certificate)
    rows = [
        [TableCell(label, label), *(_distance(row.get(name)) for name in names)]
        for label, row in certificate.distances.items()
    ]
    blocks: list[Block] = [
        *map(Remark, [sampled, quality, *caveats]),
        Figure(
            certificate_figure(certificate),
            "Distance to the posterior of the last layer",
            "0 is the posterior itself. Dark is close; shades compare the rows of a column. "
            "Posterior draws: M exact draws, the best that M members do on average.",
        ),
        Table(
            "Distances to the posterior of the last layer",
            ["method", *(COLUMNS[name] for name in names)],
            rows,
            "Fréchet distances are in posterior standard deviations of the predictions. Inside "
            "90 %: the share of predictions in its 90 % intervals, 0.9 for exact draws.",
        ),
    ]
    return Section("How close is this run to its own posterior?", closeness, blocks)


def _distance(value: float | None) -> TableCell:
    value = math.nan if value is None else value
    return TableCell(number(value, 0.0005), value)


_COLUMNS = (
    "frechet/on",
    "frechet/off",
    "tv/on",
    "tv/off",
    "mean/on",
    "std/on",
    "mean/off",
    "std/off",
    "stein",
)


@section("fidelity", order=62)
def fidelity_section(report_data: ReportData) -> Section | None:
    """The fidelity study in a run's folder, or beside the runs."""
    rows = _kept(report_data)
    if not rows:
        return None
    blocks = [
        Figure(
            heat_map(rows),
            "Distance to the posterior",
            "Distance between a method's predictive mean and standard deviation and the "
            "posterior's, in posterior standard deviations. Dark is close. Top row: M exact draws.",
        ),
        *_tables(rows),
    ]
    return Section("How close is each method to the true posterior?", answer(rows), blocks)


def answer(rows: list[Row]) -> str:
    """On how many problems a method with calibrated repulsion is the closest."""
    best = closest(rows)
    won = [name for name, facts in best.items() if facts["distance"] < facts["other_distance"]]
    if not best:
        return "The distances are measured on small problems with a known posterior."
    return (
        f"On {len(won)} of {len(best)} problems with a known posterior, a method with calibrated "
        f"repulsion is the closest."
    )


def _kept(report_data: ReportData) -> list[Row]:
    for record in report_data.entries:
        folder = record.folder
        for place in () if folder is None else (folder, folder.parent):
            if (place / FILE).is_file():
                return read_rows(place)
    return []


def _tables(rows: list[Row]) -> Iterator[Block]:
    summary = summarise(rows)
    for problem in dict.fromkeys(problem for problem, _ in summary):
        lines = []
        for (name, method), distances in summary.items():
            if name == problem:
                cells = [_cell(*distances[column]) for column in _COLUMNS]
                lines.append([TableCell(method, method), *cells])
        yield Table(
            f"All distances: {problem}",
            ["method", *_COLUMNS],
            lines,
            "0 is the posterior itself. On: at inputs like the data. Off: away from the data. "
            "Errors of mean and std are in posterior standard deviations.",
        )


def _cell(mean: float, error: float) -> TableCell:
    return TableCell(f"{mean:.3f}" if error != error else f"{mean:.3f} ± {error:.3f}", mean)
