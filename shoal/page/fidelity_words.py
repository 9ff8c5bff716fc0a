"""Output of `shoal fidelity`: the rows file, a table and the figures."""

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
from shoal.analysis.fidelity.contestants import Budget, train
from shoal.analysis.fidelity.score_shrinkage import measure
from shoal.analysis.fidelity.study import ALWAYS, Row, discrepancy, summarise
from shoal.core.display.text import table
from shoal.core.errors import ConfigError
from shoal.core.storage.files import read_json, write_bytes, write_json

__all__ = [
    "FILE",
    "closest",
    "heat_map",
    "read_rows",
    "results_csv",
    "results_text",
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
        found = summary.get((problem, method), {}).get(distance)
        if found is None:
            return "–"
        mean, error = found
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
    found = {}
    for problem in dict.fromkeys(problem for problem, _ in summary):
        means = {m: d[distance][0] for (p, m), d in summary.items() if p == problem and m != ALWAYS}
        ours = {m: v for m, v in means.items() if "calibrated" in m}
        others = {m: v for m, v in means.items() if m not in ours}
        if ours and others:
            best, rival = min(ours, key=ours.__getitem__), min(others, key=others.__getitem__)
            found[problem] = {
                "calibrated": best, "distance": ours[best],
                "other": rival, "other_distance": others[rival],
            }  # fmt: skip
    return found


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
    for (problem, method), found in summarise(rows).items():
        table.setdefault(method, {})[problem] = found[distance][0]
    return plots.distances(table, _NAMES[distance])


def _bands(budget: Budget) -> Any:
    problem = problems.make("regression")
    reference = references.load(problem)
    inputs = torch.cat([problem.on, problem.off])
    found = {}
    for label in _SHOWN:
        outputs = problem.apply(train(problem, label, budget, 0), inputs)
        found[label] = (outputs.mean(0), outputs.std(0))
    truth = (reference.mean, reference.std)
    return plots.posterior_bands(inputs, truth, found, (problem.x, problem.y))


def _growth(budget: Budget) -> Any:
    """Stein discrepancy against M on the linear problem, which has few dimensions."""
    problem = problems.make("linear")
    draws = references.load(problem).draws
    curves = {ALWAYS: [(size, discrepancy(problem, draws[:size])) for size in _SIZES]}
    for label in _GROWING:
        curves[label] = []
        for size in _SIZES:
            flat = train(problem, label, replace(budget, members=size), 0)
            curves[label].append((size, discrepancy(problem, flat)))
    return plots.stein_growth(curves)


def _write(figure: Any, path: Path) -> Path:
    write_bytes(path, plots.png(figure, 130))
    return path
