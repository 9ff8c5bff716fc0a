"""`shoal compare`: a grid of methods, ensemble sizes and seeds, and one table."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from shoal.cli.outcome import Outcome
from shoal.core.display.text import counted
from shoal.core.errors import ConfigError
from shoal.engine.resources.autotune import set_threads
from shoal.experiment.config import Config
from shoal.experiment.equal_cost import parse_arms
from shoal.experiment.grid import Grid
from shoal.experiment.variants import parse_strengths, parse_variants, swept, usual_methods
from shoal.inference.ensemble import Ensemble
from shoal.integrations.submitit import Request, parse_request, run_submitted
from shoal.page.compare import Comparison, Runner, compare_grid, comparison_text
from shoal.page.report_data import SeedGroup
from shoal.page.verdicts import parse_margins

__all__ = ["compare", "run"]


def run(options: Namespace) -> Outcome:
    """Run the unfinished runs of the grid, and show the comparison."""
    config: Config = options.config
    if options.device is not None:
        config = replace(config, device=options.device)
    variants = parse_variants(options.methods or usual_methods(config.method))
    if options.strengths is not None:
        variants = swept(variants, parse_strengths(options.strengths))
    sizes = _sizes(options.sizes) or (config.members,)
    folder = Path(options.out or config.out or Path("runs") / config.name)
    grid = Grid(config, folder, variants, sizes, options.seeds)
    return compare(grid, options, page=options.report, runner=_runner(options))


def _runner(options: Namespace) -> Runner | None:
    """Submits the runs to a cluster, if that is asked for."""
    request = parse_request(options.request, options.partition)
    if options.submit is None:
        if request:
            raise ConfigError("a request to a cluster needs its name; add --submit slurm")
        return None
    threads = options.threads or 1
    asked = Request(options.submit, options.time, options.jobs, threads, request)
    return lambda grid, after: run_submitted(grid, asked, after, retries=options.retries)


def compare(
    grid: Grid, options: Namespace, page: str | Path | None, runner: Runner | None = None
) -> Outcome:
    """Run the unfinished runs, write the results next to them and, if asked for, a report."""

    def prepare(ensemble: Ensemble) -> None:
        set_threads(options.threads, ensemble.weights, grid.config.batch_size)

    how = {name: getattr(options, name) for name in ("threads", "debug", "retries")}
    how |= {"jobs": options.jobs or 1, "prepare": prepare, "runner": runner}
    how["equal_cost"] = _arms(options, runner)
    how["margins"] = parse_margins(getattr(options, "margin", None))
    comparison = compare_grid(grid, page=page, progress=not options.quiet, **how)
    return _outcome(comparison)


def _arms(options: Namespace, runner: Runner | None) -> tuple[str, ...]:
    """Kinds of arms of equal cost; none if they are not asked for."""
    asked = getattr(options, "equal_cost", None)
    if asked is None:
        return ()
    if runner is not None:
        raise ConfigError("--equal-cost measures on this machine; leave --submit out")
    return parse_arms(asked)


def _sizes(text: str | None) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.split(",")) if text is not None else ()
    except ValueError:
        raise ConfigError(f"sizes are whole numbers, such as --sizes 1,5, not {text!r}") from None
    return tuple(dict.fromkeys(sizes))


def _outcome(comparison: Comparison) -> Outcome:
    groups, failed, written = comparison.groups, comparison.failed, comparison.written
    notes, answers = _notes(groups), comparison.answers
    text = [comparison_text(comparison.family)]
    if answers:
        text.append("\n".join(answers))
    if comparison.equal_cost is not None:
        text.append(str(comparison.equal_cost))
    if notes:
        text.append("\n".join(f"{label}: {note}" for label, note in notes.items()))
    if failed:
        text.append(comparison.missing)
    text.append("\n".join(f"{what:8}{path}" for what, path in written.items()))
    value = {
        "groups": comparison.scores,
        "answers": answers,
        "equal_cost": None if comparison.equal_cost is None else comparison.equal_cost.value,
        "power": None if comparison.power is None else comparison.power.value,
        "notes": notes,
        "failed": {point.name: str(why) for point, why in failed.items()},
        **written,
    }
    status = max((why.exit_status for why in failed.values()), default=0)
    return Outcome("\n\n".join(text), value, status)


def _notes(groups: list[SeedGroup]) -> dict[str, str]:
    """The first note about each method and ensemble size."""
    first = {}
    for group in groups:
        notes = [note for record in group.entries for note in record.notes]
        if notes:
            first[f"{group.label}, {counted(group.members, 'member')}"] = notes[0]
    return first
