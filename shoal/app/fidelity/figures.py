"""The figures of a study, as files beside its table."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal import plots
from shoal.analysis.fidelity import problems
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.contestants import Budget, train
from shoal.analysis.fidelity.law import measure
from shoal.analysis.fidelity.study import ALWAYS, Row, discrepancy, summarise
from shoal.core.files import write_bytes

__all__ = ["heat_map", "write_figures"]

_SHOWN = ("ensemble", "f-kde:legacy", "f-kde:calibrated")
_GROWING = ("ensemble", "kde:legacy", "kde:calibrated", "svgd:legacy")
_SIZES = (2, 4, 8, 16, 32)
_NAMES = {"frechet": "Fréchet distance", "tv": "total variation"}


def write_figures(rows: Sequence[Row], folder: Path, budget: Budget) -> list[Path]:
    """Draw what the rows tell, and what the law, the bands and the growth add to it."""
    figures = {name: heat_map(rows, name) for name in _NAMES}
    figures["law"] = plots.score_law(measure())
    names = {row.problem for row in rows}
    if "regression" in names:
        figures["bands"] = _bands(budget)
    if "linear" in names:
        figures["growth"] = _growth(budget)
    return [_write(figure, folder / f"{name}.png") for name, figure in figures.items()]


def heat_map(rows: Sequence[Row], distance: str = "frechet") -> Any:
    """One distance of every method on every problem, in the order they came."""
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
    """Discrepancy against M on the linear problem, whose few dimensions M can fill."""
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
