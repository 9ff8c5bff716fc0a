"""Run a grid: train, evaluate, write the tables and compare."""

import html
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.display.notebook import facts_html
from shoal.core.display.progress import Ticker, printable
from shoal.core.display.text import counted
from shoal.core.errors import ConfigError, ShoalError
from shoal.core.optional import require
from shoal.core.storage.files import write_text
from shoal.data.dataset import Dataset
from shoal.experiment.build import check_device, make_data
from shoal.experiment.grid import Grid, GridPoint, check_grid, resident, run_grid
from shoal.experiment.jobs import run_jobs
from shoal.inference.ensemble import Ensemble
from shoal.page.comparison import (
    comparison_text,
    comparison_value,
    groups_of,
    results_csv,
    summary_csv,
)
from shoal.page.measures import Measure
from shoal.page.report import report
from shoal.page.report_data import SeedGroup, load_report_data
from shoal.page.sweep import growth_sentence, strength_sentence, sweeps

__all__ = ["Comparison", "Runner", "compare_grid"]

Runner = Callable[[Grid, Callable[[GridPoint], None]], dict[GridPoint, ShoalError]]
"""Runs the unfinished points of a checked grid, calls a function after each, returns failures."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The result of a grid; printed, a table with error bars.

    Attributes:
        folder: holds the folder of each run, which `shoal.load` opens.
        groups: completed runs, grouped by method and ensemble size.
        failed: failed runs, with their errors; the table lacks them.
        written: written files: "results", "summary" and, if requested, "page".
    """

    folder: Path
    groups: list[SeedGroup]
    failed: dict[GridPoint, ShoalError] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Means, standard errors and differences to the plain ensemble, per method and size."""
        return comparison_value(self.groups)

    @property
    def answers(self) -> list[str]:
        """Sentences about strengths and ensemble sizes, where there are several."""
        every, measure = sweeps(self.groups), Measure("nll")
        size = max((sweep.members for sweep in every), default=0)
        largest = [sweep for sweep in every if sweep.members == size]
        found = [strength_sentence(largest, self.groups, measure)] if largest else []
        growth = growth_sentence(self.groups, measure)
        return found + ([growth] if growth else [])

    @property
    def missing(self) -> str:
        """Which runs the table lacks, and why; empty if it has all."""
        if not self.failed:
            return ""
        lines = [f"{point.name} failed: {why}" for point, why in self.failed.items()]
        return "\n".join([f"Missing from the table: {counted(len(lines), 'run')}", *lines])

    def __str__(self) -> str:
        blocks = [comparison_text(self.groups), self.missing, *self.answers]
        return "\n\n".join(filter(None, blocks))

    def __repr__(self) -> str:
        runs = sum(len(group.entries) for group in self.groups)
        count = f"{counted(len(self.groups), 'group')}, {counted(runs, 'run')}"
        return f"Comparison({count} in {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        rows = {"folder": self.folder, **self.written}
        return f"<pre>{html.escape(str(self))}</pre>{facts_html('Comparison', rows)}"


def compare_grid(
    grid: Grid,
    data: Dataset | None = None,
    *,
    page: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    threads: int | None = None,
    progress: bool = True,
    debug: bool = False,
    prepare: Callable[[Ensemble], None] = lambda ensemble: None,
    retries: int = 1,
    runner: Runner | None = None,
) -> Comparison:
    """Run the missing points of a grid, write the tables and, if requested, a page.

    Args:
        grid: the grid to run.
        data: training and test data; by default the config's.
        page: path of the page.
        jobs: processes that share the runs.
        threads: CPU threads of each process.
        progress: report progress on standard error.
        debug: show tracebacks of workers.
        prepare: called with each ensemble before it is trained in this process.
        retries: further attempts at a failed run, unless an error of data or settings stopped it.
        runner: carries out the runs instead of `jobs` processes of this machine.
    """
    if grid.seeds < 1:
        raise ConfigError(f"a grid needs at least one seed, not {grid.seeds}")
    for library in ("jinja2", "matplotlib") if page is not None else ():
        require(library, extra="report")  # before anything is trained
    data = make_data(grid.config) if data is None else data
    check_grid(grid, data)
    done = len(grid.points) - len(grid.queue)
    if progress:
        print(printable(_announcement(grid, done)), file=sys.stderr)
    with Ticker(len(grid.points), done, progress) as ticker:

        def after(point: GridPoint) -> None:
            ticker.tick(_line(grid, point))

        if runner is not None:
            failed = runner(grid, after)
        elif jobs > 1:
            how = {"threads": threads or 1, "debug": debug, "retries": retries}
            failed = run_jobs(grid, jobs, after, **how)
        else:
            check_device(grid.config.device)
            placed = resident(data, grid.config.device)
            failed = run_grid(grid, placed, after, prepare, retries=retries)
    groups = groups_of(grid)
    if not groups:
        first = next(iter(failed.values()))
        raise type(first)(f"every run failed: {first}") from first
    return Comparison(grid.folder, groups, failed, _written(grid, groups, page, progress))


def _written(
    grid: Grid, groups: list[SeedGroup], page: str | os.PathLike[str] | None, progress: bool
) -> dict[str, str]:
    written = {}
    for name, text in (("results", results_csv(groups)), ("summary", summary_csv(groups))):
        path = grid.folder / f"{name}.csv"
        write_text(path, text)
        written[name] = str(path)
    if page is not None:
        places = [grid.place(cell) for cell in grid.points if grid.is_done(cell)]
        written["page"] = str(report(places, Path(page), progress=progress))
    return written


def _announcement(grid: Grid, done: int) -> str:
    parts = {"method": len(grid.variants), "size": len(grid.sizes), "seed": grid.seeds}
    product = ", ".join(counted(count, word) for word, count in parts.items())
    text = f"{counted(len(grid.points), 'run')} in {grid.folder}: {product}"
    return f"{text}; {done} done already" if done else text


def _line(grid: Grid, point: GridPoint) -> str:
    name = f"{point.variant.label}, {counted(point.members, 'member')}, seed {point.seed}"
    if not grid.is_done(point):
        return f"{name}: failed"
    record = load_report_data([grid.place(point)]).entries[0]
    shown = [
        (measure.title, measure(record)) for measure in map(Measure, ("accuracy", "rmse", "nll"))
    ]
    figures = ", ".join(f"{title} {value:.4f}" for title, value in shown if value == value)
    return f"{name}: {figures}, {record.provenance.get('seconds', 0.0):.1f} s"
