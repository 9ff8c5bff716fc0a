"""`shoal fidelity`: distance of a run from its posterior, or of each method on small problems."""

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import torch

from shoal.analysis.fidelity import problems as known
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.certificate import FILE, METHODS
from shoal.analysis.fidelity.study import EVERY, QUICK, Budget, Row, Study, check_label
from shoal.cli.outcome import Outcome, evaluation_dataset, opened_for
from shoal.core.display.progress import Ticker, printable
from shoal.core.display.text import counted, table
from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.core.storage.files import write_bytes, write_text
from shoal.evaluation.analyse import fidelity
from shoal.page.fidelity import (
    certificate_figure,
    certificate_text,
    closest,
    read_rows,
    results_csv,
    results_text,
    write_figures,
    write_rows,
)
from shoal.plots import png

__all__ = ["run"]

_QUICK = ("linear", "regression")


def run(options: Namespace) -> Outcome:
    """Certify a run, recompute the references, or run the study and draw its figures."""
    torch.set_num_threads(options.threads or 1)
    if options.run is not None:
        return _of_run(options)
    names = _names(options.problems, tuple(known.registry), _QUICK if options.quick else ())
    if options.reference:
        return _references(names, Path(options.out) if options.out else references.home(), options)
    if options.seeds is not None and options.seeds < 1:
        raise ConfigError(f"--seeds must be 1 or more, not {options.seeds}")
    labels = tuple(options.methods.split(",")) if options.methods else ()
    methods = labels or (QUICK if options.quick else EVERY)
    for label in methods:
        check_label(label)
    if not options.no_figures:
        require("matplotlib", extra="report")  # before hours of training
    seeds = options.seeds or (1 if options.quick else 5)
    budget = Budget(10, 150, 0.1) if options.quick else Budget()
    folder = Path(options.out or "runs/fidelity")
    return _study(Study(names, methods, seeds, budget), folder, options)


def _of_run(options: Namespace) -> Outcome:
    opened = opened_for("fidelity", options.run, options.model)
    data = evaluation_dataset(opened, options.run, options.data, "fidelity")
    if not options.no_figures:
        require("matplotlib", extra="report")
    result = fidelity(
        opened,
        data,
        methods=tuple(options.methods.split(",")) if options.methods else METHODS,
        subspace=options.subspace,
        points=options.points,
        draws=options.draws,
        within=options.within,
        progress=not options.quiet,
    )
    folder = Path(options.out or options.run)
    text = [certificate_text(result), f"Kept in {Path(options.run) / FILE}"]
    if not options.no_figures:
        figure = folder / "certificate.png"
        write_bytes(figure, png(certificate_figure(result), 130))
        text[-1] += f"; figure {figure}"
    return Outcome("\n\n".join(text), asdict(result) | {"converged": result.converged})


def _names(typed: str | None, every: tuple[str, ...], usual: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(typed.split(",")) if typed else usual or every
    for name in names:
        known.registry[name]
    return names


def _references(names: tuple[str, ...], folder: Path, options: Namespace) -> Outcome:
    diagnostics = {}
    with Ticker(len(names), show=not options.quiet) as ticker:
        for name in names:
            problem = known.make(name)
            reference = references.make(problem)
            if problem.network.hidden:
                references.save(reference, folder / f"{name}.safetensors")
            diagnostics[name] = reference.diagnostics
            ticker.tick(f"{name}: {reference.diagnostics['method']}")
    columns = ("method", "chains", "draws", "rhat", "effective", "divergences")
    lines = [[name, *(_figure(d.get(key)) for key in columns)] for name, d in diagnostics.items()]
    return Outcome(table(lines, ["problem", *columns]), diagnostics)


def _figure(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if value < 10 else f"{value:.0f}"
    return "–" if value is None else str(value)


def _study(study: Study, folder: Path, options: Namespace) -> Outcome:
    done = read_rows(folder, study.budget)
    rows = list(done)
    wanted = sum(row.problem in study.problems and row.seed < study.seeds for row in done)
    if not options.quiet:
        print(printable(f"{counted(study.size, 'ensemble')} in {folder}"), file=sys.stderr)
    with Ticker(study.size, min(wanted, study.size), not options.quiet) as ticker:

        def record(row: Row) -> None:
            rows.append(row)
            write_rows(folder, study.budget, rows)
            distance = f"distance {row.distances['frechet']:.3f}"
            ticker.tick(f"{row.problem}, {row.method}, seed {row.seed}: {distance}")

        results = study.run(record, done)
    write_text(folder / "results.csv", results_csv(results))
    figures = [] if options.no_figures else write_figures(results, folder, study.budget)
    best = closest(results)
    text = [
        "Fréchet distance between the predictions of the members and of the posterior, on and off\n"
        "the data, in standard deviations of the posterior",
        results_text(results),
        "Total variation between the predictive distributions",
        results_text(results, "tv"),
        "\n".join(_closest_sentence(problem, facts) for problem, facts in best.items()),
        f"results  {folder / 'results.csv'}",
    ]
    value = {"closest": best, "folder": str(folder), "figures": [str(path) for path in figures]}
    return Outcome("\n\n".join(block for block in text if block), value)


def _closest_sentence(problem: str, facts: dict) -> str:
    nearer = facts["distance"] < facts["other_distance"]
    return (
        f"{problem}: {facts['calibrated']} is {'closer' if nearer else 'no closer'} "
        f"({facts['distance']:.3f}) than the closest other method, {facts['other']} "
        f"({facts['other_distance']:.3f})"
    )
