"""`shoal compare`: a grid of methods, sizes and seeds, and one table."""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from shoal.app.api import report
from shoal.app.build import check_device, make_data
from shoal.app.comparison import comparison_text, comparison_value, groups_of, results_csv
from shoal.app.config import Config
from shoal.app.grid import Cell, Grid, check_grid, run_grid
from shoal.app.jobs import run_jobs
from shoal.app.measures import Measure
from shoal.app.outcome import Outcome, counted
from shoal.app.resident import resident
from shoal.app.story import Group, tell
from shoal.app.summary import summary_csv
from shoal.app.sweep import growth_sentence, strength_sentence, sweeps
from shoal.app.threads import set_threads
from shoal.app.ticker import Ticker
from shoal.app.variants import parse_strengths, parse_variants, swept, variant_of
from shoal.core.errors import ConfigError, DataError, ShoalError
from shoal.core.files import write_text
from shoal.core.notices import printable
from shoal.core.optional import require
from shoal.inference.ensemble import Ensemble

__all__ = ["compare", "run"]


def run(options: Namespace) -> Outcome:
    """Run what is missing of the grid that the options describe, and tell the result."""
    config: Config = options.config
    if options.device is not None:
        config = replace(config, device=options.device)
    variants = parse_variants(options.methods or _usual(config))
    if options.strengths is not None:
        variants = swept(variants, parse_strengths(options.strengths))
    sizes = _sizes(options.sizes) or (config.members,)
    if options.seeds < 1:
        raise ConfigError(f"there must be at least one seed, not {options.seeds}")
    folder = Path(options.out or config.out or Path("runs") / config.name)
    grid = Grid(config, folder, variants, sizes, options.seeds)
    return compare(grid, options, page=options.report)


def compare(grid: Grid, options: Namespace, page: str | Path | None) -> Outcome:
    """Run what is missing, write the numbers beside the runs and, if wanted, a page."""
    for library in ("jinja2", "matplotlib") if page is not None else ():
        require(library, extra="report")  # before anything is trained
    failed = _run_missing(grid, options)
    groups = groups_of(grid)
    if not groups:
        raise DataError(f"none of the runs came to anything: {next(iter(failed.values()))}")
    written = {}
    for name, text in (("results", results_csv(groups)), ("summary", summary_csv(groups))):
        path = grid.folder / f"{name}.csv"
        write_text(path, text)
        written[name] = str(path)
    if page is not None:
        places = [grid.place(cell) for cell in grid.cells if grid.is_done(cell)]
        written["page"] = str(report(places, page, progress=not options.quiet))
    return _outcome(groups, failed, written)


def _run_missing(grid: Grid, options: Namespace) -> dict[Cell, ShoalError]:
    """Here, or in as many processes as were asked for."""
    data = make_data(grid.config)
    check_grid(grid, data)
    done = len(grid.cells) - len(grid.queue)
    if not options.quiet:
        print(printable(_announcement(grid, done)), file=sys.stderr)
    with Ticker(len(grid.cells), done, not options.quiet) as ticker:

        def after(cell: Cell) -> None:
            ticker.tick(_line(grid, cell))

        def prepare(ensemble: Ensemble) -> None:
            set_threads(options.threads, ensemble.weights, grid.config.batch_size)

        if options.jobs > 1:
            threads = options.threads or 1
            return run_jobs(grid, options.jobs, after, threads=threads, debug=options.debug)
        check_device(grid.config.device)
        return run_grid(grid, resident(data, grid.config.device), after, prepare)


def _usual(config: Config) -> str:
    """What to compare when nobody says: the config's method with the plain ensemble."""
    return f"ensemble,{variant_of(config.method).label}"


def _sizes(text: str | None) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(",")) if text is not None else ()
    except ValueError:
        raise ConfigError(f"sizes are whole numbers, as in --sizes 1,5, not {text!r}") from None
    return tuple(dict.fromkeys(sizes))


def _announcement(grid: Grid, done: int) -> str:
    parts = {"method": len(grid.variants), "size": len(grid.sizes), "seed": grid.seeds}
    product = ", ".join(counted(count, word) for word, count in parts.items())
    text = f"{counted(len(grid.cells), 'run')} in {grid.folder}: {product}"
    return f"{text}; {done} done already" if done else text


def _line(grid: Grid, cell: Cell) -> str:
    name = f"{cell.variant.label}, {counted(cell.members, 'member')}, seed {cell.seed}"
    if not grid.is_done(cell):
        return f"{name}: came to nothing"
    entry = tell([grid.place(cell)]).entries[0]
    shown = [
        (measure.title, measure(entry)) for measure in map(Measure, ("accuracy", "rmse", "nll"))
    ]
    figures = ", ".join(f"{title} {value:.4f}" for title, value in shown if value == value)
    return f"{name}: {figures}, {entry.provenance.get('seconds', 0.0):.1f} s"


def _outcome(
    groups: list[Group], failed: dict[Cell, ShoalError], written: dict[str, str]
) -> Outcome:
    notes, answers = _notes(groups), _answers(groups)
    text = [comparison_text(groups)]
    if answers:
        text.append("\n".join(answers))
    if notes:
        text.append("\n".join(f"{label}: {note}" for label, note in notes.items()))
    if failed:
        text.append(
            "\n".join(f"{cell.name} came to nothing: {why}" for cell, why in failed.items())
        )
    text.append("\n".join(f"{what:8}{path}" for what, path in written.items()))
    value = {
        "groups": comparison_value(groups),
        "answers": answers,
        "notes": notes,
        "failed": {cell.name: str(why) for cell, why in failed.items()},
        **written,
    }
    status = max((why.exit_status for why in failed.values()), default=0)
    return Outcome("\n\n".join(text), value, status)


def _answers(groups: list[Group]) -> list[str]:
    """What the strengths and the sizes say, where there are several."""
    found, measure = sweeps(groups), Measure("nll")
    size = max((sweep.members for sweep in found), default=0)
    largest = [sweep for sweep in found if sweep.members == size]
    told = [strength_sentence(largest, groups, measure)] if largest else []
    growth = growth_sentence(groups, measure)
    return told + ([growth] if growth else [])


def _notes(groups: list[Group]) -> dict[str, str]:
    """The first thing worth knowing about each method and size."""
    first = {}
    for group in groups:
        notes = [note for entry in group.entries for note in entry.notes]
        if notes:
            first[f"{group.label}, {counted(group.members, 'member')}"] = notes[0]
    return first
