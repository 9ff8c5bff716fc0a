"""Words, tables, files and figures of `shoal fidelity`: its study, and the certificate of a run."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from shoal import plots
from shoal.analysis.fidelity import problems
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.certificate import ITSELF, RUN, Certificate
from shoal.analysis.fidelity.reference import LIMIT
from shoal.analysis.fidelity.score_shrinkage import measure
from shoal.analysis.fidelity.study import ALWAYS, Budget, Row, discrepancy, summarise, train
from shoal.core.display.text import counted, number, table
from shoal.core.errors import ConfigError
from shoal.core.storage.files import read_json, write_bytes, write_json

__all__ = [
    "COLUMNS",
    "FILE",
    "certificate_figure",
    "certificate_sentences",
    "certificate_text",
    "closest",
    "heat_map",
    "read_rows",
    "results_csv",
    "results_text",
    "shown",
    "write_figures",
    "write_rows",
]


FILE = "fidelity.json"
"""File name of the rows in a folder."""


def write_rows(folder: Path, budget: Budget, rows: Sequence[Row]) -> None:
    """Write all rows with their training budget."""
    value = {"budget": asdict(budget), "rows": [asdict(row) for row in rows]}
    write_json(folder / FILE, value)


def read_rows(folder: Path, budget: Budget | None = None) -> list[Row]:
    """The rows of a folder: empty without a file, an error for another budget."""
    path = folder / FILE
    if not path.is_file():
        return []
    value = read_json(path)
    if budget is not None and value["budget"] != asdict(budget):
        raise ConfigError(
            f"{path} was made with {value['budget']}, not {asdict(budget)}; give another folder"
        )
    return [Row(**row) for row in value["rows"]]


def results_csv(rows: Sequence[Row]) -> str:
    """CSV with one number per line."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["problem", "method", "seed", "distance", "value"])
    for row in rows:
        for name, value in row.distances.items():
            writer.writerow([row.problem, row.method, row.seed, name, f"{value:.6g}"])
    return stream.getvalue()


def results_text(rows: Sequence[Row], distance: str = "frechet") -> str:
    """Table of methods and problems: mean ± standard error of a distance, closest method first."""
    summary = summarise(rows)
    problems = list(dict.fromkeys(problem for problem, _ in summary))
    methods = list(dict.fromkeys(method for _, method in summary))

    def cell(problem: str, method: str) -> str:
        numbers = summary.get((problem, method), {}).get(distance)
        if numbers is None:
            return "–"
        mean, error = numbers
        return f"{mean:.3f}" if error != error else f"{mean:.3f} ± {error:.3f}"

    order = sorted(methods, key=lambda method: _overall(summary, problems, method, distance))
    lines = [[method, *(cell(problem, method) for problem in problems)] for method in order]
    return table(lines, ["method", *problems])


def _overall(summary: Mapping, problems: Sequence[str], method: str, distance: str) -> float:
    """Mean over problems of the distance, divided by the plain ensemble's where it is known."""
    shares = []
    for problem in problems:
        mine = summary.get((problem, method), {}).get(distance, (float("inf"),))[0]
        plain = summary.get((problem, "ensemble"), {}).get(distance, (1.0,))[0]
        shares.append(mine / plain)
    return sum(shares) / len(shares)


def closest(rows: Sequence[Row], distance: str = "frechet") -> dict[str, dict[str, Any]]:
    """For each problem, the closest calibrated method and the closest other method."""
    summary = summarise(rows)
    closest_methods = {}
    for problem in dict.fromkeys(problem for problem, _ in summary):
        means = {m: d[distance][0] for (p, m), d in summary.items() if p == problem and m != ALWAYS}
        ours = {m: v for m, v in means.items() if "calibrated" in m}
        others = {m: v for m, v in means.items() if m not in ours}
        if ours and others:
            best, rival = min(ours, key=ours.__getitem__), min(others, key=others.__getitem__)
            closest_methods[problem] = {
                "calibrated": best, "distance": ours[best],
                "other": rival, "other_distance": others[rival],
            }  # fmt: skip
    return closest_methods


_SHOWN = ("ensemble", "f-kde:legacy", "f-kde:calibrated")

_GROWING = ("ensemble", "kde:legacy", "kde:calibrated", "svgd:legacy")

_SIZES = (2, 4, 8, 16, 32)

_NAMES = {"frechet": "Fréchet distance", "tv": "total variation"}


def write_figures(rows: Sequence[Row], folder: Path, budget: Budget) -> list[Path]:
    """Write the figures: distances, score shrinkage, posterior bands, growth with M."""
    figures = {name: heat_map(rows, name) for name in _NAMES}
    figures["law"] = plots.score_law(measure())
    names = {row.problem for row in rows}
    if "regression" in names:
        figures["bands"] = _bands(budget)
    if "linear" in names:
        figures["growth"] = _growth(budget)
    return [_write(figure, folder / f"{name}.png") for name, figure in figures.items()]


def heat_map(rows: Sequence[Row], distance: str = "frechet") -> Any:
    """One distance of every method on every problem, in the order of the rows."""
    table: dict[str, dict[str, float]] = {}
    for (problem, method), distances in summarise(rows).items():
        table.setdefault(method, {})[problem] = distances[distance][0]
    return plots.distances(table, _NAMES[distance])


def _bands(budget: Budget) -> Any:
    problem = problems.make("regression")
    reference = references.load(problem)
    inputs = torch.cat([problem.on, problem.off])
    moments = {}
    for label in _SHOWN:
        outputs = problem.apply(train(problem, label, budget, 0), inputs)
        moments[label] = (outputs.mean(0), outputs.std(0))
    truth = (reference.mean, reference.std)
    return plots.posterior_bands(inputs, truth, moments, (problem.x, problem.y))


def _growth(budget: Budget) -> Any:
    """Stein discrepancy against M on the linear problem, which has few dimensions."""
    problem = problems.make("linear")
    reference = references.load(problem)
    exact = [discrepancy(problem, reference, reference.draws[:size]) for size in _SIZES]
    curves = {ALWAYS: list(zip(_SIZES, exact, strict=True))}
    for label in _GROWING:
        curves[label] = []
        for size in _SIZES:
            flat = train(problem, label, replace(budget, members=size), 0)
            curves[label].append((size, discrepancy(problem, reference, flat)))
    return plots.stein_growth(curves)


def _write(figure: Any, path: Path) -> Path:
    write_bytes(path, plots.png(figure, 130))
    return path


COLUMNS = {
    "frechet/on": "Fréchet, test",
    "tv/on": "total variation, test",
    "frechet/off": "Fréchet, OOD",
    "tv/off": "total variation, OOD",
    "coverage/on": "inside 90 %, test",
    "coverage/off": "inside 90 %, OOD",
    "weights/sliced": "weights, sliced W2",
}
"""Distances of the table and the figure, with their titles."""


def certificate_sentences(certificate: Certificate) -> list[str]:
    """What was sampled, whether to trust it, and how close the run is."""
    return [
        _sampled(certificate),
        _quality(certificate),
        _closeness(certificate),
        *_caveats(certificate),
    ]


def _sampled(certificate: Certificate) -> str:
    if certificate.subspace:
        return (
            f"The posterior is that of all {certificate.all_weights:,} weights in "
            f"{counted(certificate.subspace, 'direction')} through one member "
            f"({certificate.layer}), on {certificate.points:,} training points."
        )
    weights = certificate.outputs * (certificate.features + 1)
    trunk = "the trunk of all members" if certificate.shared_trunk else "the trunk of member 0"
    return (
        f"The posterior is that of the last layer '{certificate.layer}' ({weights:,} weights) "
        f"given {trunk}, on {certificate.points:,} training points."
    )


def _quality(certificate: Certificate) -> str:
    facts = certificate.reference
    if "rhat" not in facts:
        return "The posterior is known in closed form."
    text = (
        f"{facts['method']}: {facts['chains']} chains of {facts['draws']:,} draws, largest R-hat "
        f"{facts['rhat']:.3f}, at least {facts['effective']:,.0f} effective draws, "
        f"{facts['divergences']} divergences."
    )
    if certificate.converged:
        return text
    return f"{text} The chains disagree (R-hat must be below {LIMIT}); use more draws."


def _closeness(certificate: Certificate) -> str:
    rows = {label: row["frechet/on"] for label, row in certificate.distances.items()}
    apart = (RUN, ALWAYS, certificate.laplace, ITSELF)
    others = {label: v for label, v in rows.items() if label not in apart}
    run, chains = "this run", certificate.chains
    if chains:
        run = f"this run ({chains} chains of {certificate.members // chains:,} draws)"
    error = f", with an error of {number(rows[ITSELF], 0.005)}" if ITSELF in rows else ""
    exact, laplace = (number(rows[label], 0.005) for label in (ALWAYS, certificate.laplace))
    text = (
        f"The Fréchet distance of {run} on test inputs is {number(rows[RUN], 0.005)} posterior "
        f"standard deviations{error}. {certificate.exact or certificate.members:,} exact draws "
        f"have {exact}, and Laplace has {laplace}."
    )
    if not others:
        return text
    best = min(others, key=lambda label: others[label])
    return f"{text} The closest trained method is {best} ({number(others[best], 0.005)})."


def _caveats(certificate: Certificate) -> list[str]:
    notes = []
    if certificate.subspace:
        notes.append(
            "Members of this run differ in all weights, so their row is not comparable; the other "
            "rows move in the same directions as the posterior."
        )
    elif not certificate.shared_trunk:
        notes.append(
            "Members of this run have trunks of their own, so their distance also counts how "
            "trunks differ."
        )
    if certificate.points < certificate.all_points:
        notes.append(
            f"The posterior uses {certificate.points:,} of {certificate.all_points:,} training "
            f"points, and this run used all: its own row is not comparable, the other rows are."
        )
    return notes


def shown(certificate: Certificate) -> list[str]:
    """Columns that at least one method has."""
    return [name for name in COLUMNS if any(name in row for row in certificate.distances.values())]


def certificate_text(certificate: Certificate) -> str:
    """Sentences and the table, closest method first below the run."""
    names = shown(certificate)
    order = sorted(
        certificate.distances, key=lambda m: (m != RUN, certificate.distances[m]["frechet/on"])
    )
    rows = [
        [label, *(_cell(certificate.distances[label].get(name)) for name in names)]
        for label in order
    ]
    lines = table(rows, ["method", *(COLUMNS[name] for name in names)])
    return "\n\n".join(["\n".join(certificate_sentences(certificate)), lines])


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def certificate_figure(certificate: Certificate) -> Any:
    """All methods and distances as shades with numbers."""
    compared = {label: row for label, row in certificate.distances.items() if label != ITSELF}
    names = [
        name
        for name in shown(certificate)
        if not name.startswith("coverage") and all(name in row for row in compared.values())
    ]
    titles = {name: COLUMNS[name].replace(", ", ",\n") for name in names}
    rows = {label: {titles[n]: row[n] for n in names} for label, row in compared.items()}
    return plots.distances(rows, "distance")
