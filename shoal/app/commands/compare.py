"""`shoal compare`: a grid of methods, sizes and seeds, and one table."""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from shoal.app.api import report
from shoal.app.build import make_data
from shoal.app.comparison import comparison_text, comparison_value, groups_of, results_csv
from shoal.app.config import Config
from shoal.app.grid import Cell, Grid, check_grid, parse_variants, run_grid
from shoal.app.measures import Measure
from shoal.app.outcome import Outcome, counted
from shoal.app.story import Group, tell
from shoal.app.threads import set_threads
from shoal.app.ticker import Ticker
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import write_text
from shoal.inference.ensemble import Ensemble

__all__ = ["compare", "run"]


def run(options: Namespace) -> Outcome:
    """Run what is missing of the grid that the options describe, and tell the result."""
    config: Config = options.config
    if options.device is not None:
        config = replace(config, device=options.device)
    variants = parse_variants(options.methods or _usual(config))
    sizes = _sizes(options.sizes) or (config.members,)
    if options.seeds < 1:
        raise ConfigError(f"there must be at least one seed, not {options.seeds}")
    folder = Path(options.out or config.out or Path("runs") / config.name)
    grid = Grid(config, folder, variants, sizes, options.seeds)
    return compare(grid, options, page=options.report)


def compare(grid: Grid, options: Namespace, page: str | Path | None) -> Outcome:
    """Run what is missing, write results.csv and, if wanted, a page."""
    data = make_data(grid.config)
    check_grid(grid, data)

    def prepare(ensemble: Ensemble) -> None:
        set_threads(options.threads, ensemble, grid.config.batch_size)

    done = [cell for cell in grid.cells if grid.is_done(cell)]
    if not options.quiet:
        print(_announcement(grid, len(done)), file=sys.stderr)
    with Ticker(len(grid.cells), len(done), not options.quiet) as ticker:
        failed = run_grid(grid, data, lambda cell: ticker.tick(_line(grid, cell)), prepare)
    groups = groups_of(grid)
    if not groups:
        raise DataError(f"none of the runs came to anything: {next(iter(failed.values()))}")
    results = grid.folder / "results.csv"
    write_text(results, results_csv(groups))
    written = {"results": str(results)}
    if page is not None:
        places = [grid.place(cell) for cell in grid.cells if grid.is_done(cell)]
        written["page"] = str(report(places, page))
    return _outcome(groups, failed, written)


def _usual(config: Config) -> str:
    """What to compare when nobody says: the config's method with the plain ensemble."""
    return f"ensemble,{config.method if isinstance(config.method, str) else 'custom'}"


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


def _outcome(groups: list[Group], failed: dict[Cell, str], written: dict[str, str]) -> Outcome:
    notes = _notes(groups)
    text = [comparison_text(groups)]
    if notes:
        text.append("\n".join(f"{label}: {note}" for label, note in notes.items()))
    if failed:
        text.append(
            "\n".join(f"{cell.name} came to nothing: {why}" for cell, why in failed.items())
        )
    text.append("\n".join(f"{what:8}{path}" for what, path in written.items()))
    value = {
        "groups": comparison_value(groups),
        "notes": notes,
        "failed": {cell.name: why for cell, why in failed.items()},
        **written,
    }
    return Outcome("\n\n".join(text), value, DataError.exit_status if failed else 0)


def _notes(groups: list[Group]) -> dict[str, str]:
    """The first thing worth knowing about each method and size."""
    first = {}
    for group in groups:
        notes = [note for entry in group.entries for note in entry.notes]
        if notes:
            first[f"{group.label}, {counted(group.members, 'member')}"] = notes[0]
    return first
