"""Grids of methods, ensemble sizes and seeds: trained, evaluated, and compared in tables.

`compare` is the public call, `compare_grid` runs a grid, and `Comparison` shows means with error
bars and differences to the plain ensemble.
"""

import csv
import functools
import html
import io
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import torch

from shoal.core.arguments import checked, items, one_or_more, whole, whole_or_zero
from shoal.core.arguments import path as path_of
from shoal.core.display.notebook import facts_html
from shoal.core.display.progress import Ticker, printable
from shoal.core.display.text import counted, number, plus_minus, table
from shoal.core.errors import ConfigError, DataError, ShoalError, ShoalWarning
from shoal.core.optional import require
from shoal.core.registry import Registry
from shoal.core.storage.files import write_text
from shoal.data.batches import augment as augmentations
from shoal.data.batches.arrays import inputs_digest
from shoal.data.dataset import Dataset
from shoal.evaluation.data_arguments import Inputs, Labelled, Shifts, splits_of
from shoal.experiment.build import check_device, make_data
from shoal.experiment.config import Config, load_config, make_config
from shoal.experiment.equal_cost import CostPlan, check_arms, parse_arms, planned
from shoal.experiment.grid import Grid, GridPoint, check_grid, resident, run_grid
from shoal.experiment.jobs import run_jobs
from shoal.experiment.variants import Variant, parse_strengths, parse_variants, swept, usual_methods
from shoal.inference import likelihoods, priors
from shoal.inference.ensemble import Ensemble
from shoal.inference.members import Build
from shoal.interaction import repulsion as repulsions
from shoal.page.equal_cost import EqualCost
from shoal.page.measures import Measure, headlines
from shoal.page.report import report as write_report
from shoal.page.report_data import SeedGroup, flat, load_report_data
from shoal.page.sweep import growth_sentence, strength_sentence, sweeps
from shoal.page.verdicts import (
    MARGINS,
    Family,
    Power,
    decide_groups,
    family_sentences,
    method_sentences,
    parse_margins,
    planned_power,
)
from shoal.prediction.statistics import Decision, Verdict
from shoal.training.folder.own_data import OWN_DATA
from shoal.training.options import annealing as annealings
from shoal.training.options.adversarial import Adversarial
from shoal.training.options.optim import optimizer_table
from shoal.training.options.options import DEFAULTS, RunOptions, accepted
from shoal.training.options.torch_schedules import as_schedule, schedules

__all__ = [
    "COLUMNS",
    "Comparison",
    "Runner",
    "compare",
    "compare_grid",
    "comparison_text",
    "comparison_value",
    "every_measure",
    "groups_of",
    "results_csv",
    "summary_csv",
]

Runner = Callable[[Grid, Callable[[GridPoint], None]], dict[GridPoint, ShoalError]]
"""Runs the unfinished points of a checked grid, calls a function after each, returns failures."""

_NAMED: dict[str, Registry] = {
    "likelihood": likelihoods.registry,
    "prior": priors.registry,
    "schedule": schedules,
    "annealing": annealings.registry,
    "augment": augmentations.registry,
    "method": repulsions.registry,
}


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """The result of a grid; printed, a table with error bars.

    Attributes:
        folder: holds the folder of each run, which `shoal.load` opens.
        groups: completed runs, grouped by method and ensemble size.
        failed: failed runs, with their errors; the table lacks them.
        written: written files: "results", "summary" and, if requested, "page".
        equal_cost: what arms of equal cost decide; None unless they were asked for.
        margins: margins of equality that the user gave, by metric.
        power: what the planned seeds find, computed before the runs; None without a plain ensemble.
    """

    folder: Path
    groups: list[SeedGroup]
    failed: dict[GridPoint, ShoalError] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    margins: Mapping[str, float] = field(default_factory=dict)
    power: Power | None = None
    equal_cost: EqualCost | None = None

    @functools.cached_property
    def family(self) -> Family:
        """All comparisons with the plain ensemble, decided together."""
        return decide_groups(self.groups, self.margins)

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Means, standard errors and differences to the plain ensemble, per method and size."""
        return comparison_value(self.family)

    @property
    def verdicts(self) -> list[str]:
        """One sentence per method and ensemble size: better, equal, worse or not decided."""
        return method_sentences(self.family)

    @property
    def answers(self) -> list[str]:
        """A sentence per method, then sentences about strengths and ensemble sizes."""
        every, measure = sweeps(self.groups), Measure("nll")
        size = max((sweep.members for sweep in every), default=0)
        largest = [sweep for sweep in every if sweep.members == size]
        strengths = [strength_sentence(largest, self.family, measure)] if largest else []
        growth = growth_sentence(self.family, measure)
        return [*self.verdicts, *strengths, *([growth] if growth else [])]

    @property
    def missing(self) -> str:
        """Which runs the table lacks, and why; empty if it has all."""
        if not self.failed:
            return ""
        lines = [f"{point.name} failed: {why}" for point, why in self.failed.items()]
        return "\n".join([f"Missing from the table: {counted(len(lines), 'run')}", *lines])

    def __str__(self) -> str:
        blocks = [comparison_text(self.family), "\n".join(self.answers), self.missing]
        blocks += [] if self.equal_cost is None else [str(self.equal_cost)]
        return "\n\n".join(filter(None, blocks))

    def __repr__(self) -> str:
        runs = sum(len(group.entries) for group in self.groups)
        count = f"{counted(len(self.groups), 'group')}, {counted(runs, 'run')}"
        return f"Comparison({count} in {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        rows = {"folder": self.folder, **self.written}
        return f"<pre>{html.escape(str(self))}</pre>{facts_html('Comparison', rows)}"


@checked(seeds=whole, jobs=whole, threads=whole, retries=whole_or_zero, out=path_of, report=path_of)
def compare(
    source: str | os.PathLike[str] | Config | Mapping[str, Any] | Build,
    data: Dataset | Labelled | None = None,
    *,
    methods: str | Sequence[str] | None = None,
    strengths: Sequence[float] | None = None,
    sizes: int | Sequence[int] | None = None,
    seeds: int = 3,
    test: Labelled | None = None,
    ood: Mapping[str, Inputs] | None = None,
    shifts: Shifts | None = None,
    out: str | os.PathLike[str] | None = None,
    report: str | os.PathLike[str] | None = None,
    equal_cost: bool | str = False,
    margin: str | Mapping[str, float] | None = None,
    jobs: int = 1,
    threads: int | None = None,
    retries: int = 1,
    progress: bool = True,
    **settings: Unpack[RunOptions],
) -> Comparison:
    """Train methods, ensemble sizes and seeds, and compare them with error bars.

        table = shoal.compare(build, (x, y), test=(x_test, y_test), methods=["ensemble", "f-kde"])
        table = shoal.compare("digits", methods=["ensemble", "kde:300"], sizes=[5, 10], seeds=5)
        print(table)

    Every run has its own folder. The same call can be repeated: it skips completed runs and
    resumes interrupted ones. `shoal compare CONFIG` does the same.

    Main arguments:
        source: a function that makes your network; or a config: a TOML file, an experiment's name
            or a table.
        data: training data for a function: a `Dataset`, a pair (x, y) or a loader.
        methods: names, optionally with a strength, as "kde:300", settings, as
            "kde+placebo=true:300", and options of their runs, as "ensemble+batches=own+members=11";
            or "all". By default the plain ensemble and the method of the config; if that is plain
            too, "auto".
        strengths: train each repulsive method at each of these strengths.
        sizes: ensemble sizes; by default the config's, or 5.
        seeds: number of seeds per method and ensemble size.
        test: test data, where `data` has none.
        ood: out-of-distribution inputs by name, as `shoal.evaluate` takes them.
        shifts: changed test data by name, or names of corruptions, as `shoal.evaluate` takes them.
        out: folder of all runs; by default runs/NAME.
        report: path of a report to write.
        equal_cost: add plain ensembles that get the seconds of the dearest method, and placebos;
            True for all, or some of "members,longer,own,tuned,placebo" (docs/equal-cost.md).
        margin: differences that do not matter, by metric, such as {"nll": 0.01, "accuracy": 0.005}.
            These are the defaults, with ECE 0.005, AUROC 0.01, and 2 % of the plain ensemble's
            value for every other metric.
        jobs: processes that share the runs; more than 1 needs a config.
        threads: CPU threads of each process.
        retries: further attempts at a failed run; an error of data or settings is final.
        progress: report progress on standard error.

    Every other argument is an option of `shoal.fit` for all runs, such as `epochs`. Its default is
    the config's, or that of `shoal.fit`. `method` is your own repulsion, called "custom" in
    `methods`.
    """
    changes, margins = accepted(compare, RunOptions, settings), parse_margins(margin)
    changes = {key: _plain(key, value) for key, value in changes.items()}
    if callable(source):
        if data is None:
            raise ConfigError(
                "your own network needs data; type: shoal.compare(build, (x, y), ...)"
            )
        if equal_cost and not isinstance(data, Dataset) and not hasattr(data, "__len__"):
            raise DataError(
                "equal cost needs data of a known length; give arrays, a Dataset or a DataLoader"
            )
        known = splits_of(data, test, ood, shifts)
        config, build = _own_config(source, known, changes), source
    else:
        if data is not None or test is not None:
            raise ConfigError("a config names its data; change them in the config")
        config, build = _config(source, changes), None
        known = splits_of(make_data(config), None, ood, shifts) if ood or shifts else None
    variants = parse_variants(_listed(methods) or usual_methods(config.method))
    if strengths is not None:
        variants = swept(variants, parse_strengths(_listed(strengths)))
    grid = Grid(config, _folder(out, config), variants, _sizes(sizes, config), seeds, build)
    if (build is not None or known is not None) and jobs > 1:
        raise ConfigError("several jobs need a config that names network and data; type jobs=1")
    return compare_grid(
        grid,
        known,
        page=report,
        equal_cost=parse_arms(equal_cost) if equal_cost else (),
        margins=margins,
        jobs=jobs,
        threads=threads,
        retries=retries,
        progress=progress,
    )


def _config(source: Any, settings: Mapping[str, Any]) -> Config:
    """The config of a file, a name or a table, with the given settings replaced."""
    if isinstance(source, Config):
        config = source
    elif isinstance(source, Mapping):
        config = make_config(source, "compare")
    else:
        config = load_config(Path(source))
    length = {"epochs", "steps"}  # one of them takes the place of the other
    replaced = settings.keys() | (length if length & settings.keys() else set())
    changed = {key: value for key, value in config.table.items() if key not in replaced}
    changed |= {key: value for key, value in settings.items() if value is not None}
    return make_config(changed, config.name)


def _own_config(build: Build, data: Dataset, settings: Mapping[str, Any]) -> Config:
    """A config that identifies the user's network and data, but cannot rebuild them."""
    name = getattr(build, "__qualname__", type(build).__qualname__)
    digest = "-".join(inputs_digest(t)[:16] for t in (data.train.x, data.train.y) if t is not None)
    known = {key: value for key, value in settings.items() if value is not None}
    made = {"data": {"custom": data.name, "sha256": digest}, "model": {"custom": name}}
    return make_config(made | known, "compare" if data.name == OWN_DATA else data.name)


def _plain(key: str, value: Any) -> Any:
    """A setting as a config stores it: objects by their names and settings."""
    if key == "optimizer":
        return optimizer_table(value)
    if key == "schedule" and isinstance(value, type | functools.partial):
        value = as_schedule(value, DEFAULTS["lr"])
    if isinstance(value, Adversarial):
        return asdict(value)
    if isinstance(value, torch.device):
        return str(value)
    if key in _NAMED and value is not None and not isinstance(value, str | Mapping):
        return _NAMED[key].spec(value)
    return dict(value) if isinstance(value, Mapping) else value


def _listed(words: str | Sequence[Any] | None) -> str:
    if words is None or isinstance(words, str):
        return words or ""
    return ",".join(map(str, items("methods and strengths", words)))


def _folder(out: str | os.PathLike[str] | None, config: Config) -> Path:
    return Path(out or config.out or Path("runs") / config.name)


def _sizes(sizes: int | Sequence[int] | None, config: Config) -> tuple[int, ...]:
    if sizes is None:
        return (config.members,)
    listed = one_or_more(whole)("sizes", sizes)
    return tuple(dict.fromkeys([listed] if isinstance(listed, int) else listed))


def compare_grid(
    grid: Grid,
    data: Dataset | None = None,
    *,
    page: str | os.PathLike[str] | None = None,
    equal_cost: Sequence[str] = (),
    margins: Mapping[str, float] | None = None,
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
        equal_cost: kinds of arms that get the seconds of the dearest method.
        margins: differences that do not matter, by metric.
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
    if equal_cost:
        check_arms(grid, equal_cost)
    data = make_data(grid.config) if data is None else data
    check_grid(grid, data)
    plan = None
    if equal_cost:
        check_device(grid.config.device)
        data = data if jobs > 1 else resident(data, grid.config.device)
        grid, plan = _with_arms(grid, data, equal_cost, prepare, progress)
    done, power = len(grid.points) - len(grid.queue), _power(grid)
    if progress:
        lines = [_announcement(grid, done), *([str(power)] if power else [])]
        print(printable("\n".join(lines)), file=sys.stderr)
    with Ticker(len(grid.points), done, progress) as ticker:

        def after(point: GridPoint) -> None:
            ticker.tick(_line(grid, point))

        if runner is not None:
            failed = runner(grid, after)
        elif jobs > 1:
            failed = run_jobs(grid, jobs, after, threads=threads or 1, debug=debug, retries=retries)
        else:
            check_device(grid.config.device)
            placed = resident(data, grid.config.device)
            failed = run_grid(grid, placed, after, prepare, retries=retries)
    groups = groups_of(grid)
    if not groups:
        first = next(iter(failed.values()))
        raise type(first)(f"every run failed: {first}") from first
    judged = None if plan is None else _judged(plan, groups, margins or {})
    found = Comparison(grid.folder, groups, failed, {}, margins or {}, power, judged)
    return replace(found, written=_written(grid, found, page, progress))


def _with_arms(
    grid: Grid,
    data: Dataset,
    kinds: Sequence[str],
    prepare: Callable[[Ensemble], None],
    progress: bool,
) -> tuple[Grid, CostPlan]:
    """The grid with the arms of equal cost, measured before anything is trained."""

    def say(text: str) -> None:
        if progress:
            print(printable(text), file=sys.stderr)

    plan = planned(grid, data, kinds, prepare, say)
    say(plan.announcement(grid.seeds))
    variants = parse_variants(",".join(arm.label for arm in plan.arms))
    return replace(grid, variants=variants), plan


def _judged(plan: CostPlan, groups: list[SeedGroup], margins: Mapping[str, float]) -> EqualCost:
    """What the arms decide; seconds that differ from the plan are warned of."""
    records = (record for group in groups for record in group.entries)
    judged = EqualCost.of(plan, records, margins.get("nll", MARGINS["nll"]))
    for sentence in judged.far:
        warnings.warn(sentence, ShoalWarning, stacklevel=3)
    return judged


def _power(grid: Grid) -> Power | None:
    """What the seeds of the grid will find, by the runs that are finished."""
    sizes: dict[int, set[Variant]] = {}
    for point in grid.points:
        sizes.setdefault(point.members, set()).add(point.variant)
    with_plain = [variants for variants in sizes.values() if not all(v.repels for v in variants)]
    compared = sum(len(variants) - 1 for variants in with_plain)
    return planned_power(grid.seeds, compared, decide_groups(groups_of(grid)))


def _written(
    grid: Grid, found: Comparison, page: str | os.PathLike[str] | None, progress: bool
) -> dict[str, str]:
    written, family = {}, found.family
    for name, text in (("results", results_csv(found.groups)), ("summary", summary_csv(family))):
        path = grid.folder / f"{name}.csv"
        write_text(path, text)
        written[name] = str(path)
    if page is not None:
        places = [grid.place(point) for point in grid.points if grid.is_done(point)]
        written["page"] = str(
            write_report(places, Path(page), margin=found.margins, progress=progress)
        )
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


def groups_of(grid: Grid) -> list[SeedGroup]:
    """The completed runs, grouped by method and ensemble size."""
    completed: dict[tuple[str, int], list[GridPoint]] = {}
    for point in grid.points:
        if grid.is_done(point):
            completed.setdefault((point.variant.label, point.members), []).append(point)
    return [
        SeedGroup(label, load_report_data([grid.place(point) for point in points]).entries)
        for (label, _), points in completed.items()
    ]


def comparison_text(family: Family) -> str:
    """A table of means, and one of differences to the plain ensemble where there is one."""
    groups = family.groups
    measures = headlines(groups)
    header = ["", "members", *(f"{m.title}, %" if m.share else m.title for m in measures)]
    rows = [
        [group.label, str(group.members), *(_mean(m, group) for m in measures)] for group in groups
    ]
    seeds = max(len(group.entries) for group in groups)
    heading = (
        f"Mean ± standard error over {seeds} seeds" if seeds > 1 else "One seed, no error bars"
    )
    blocks = [f"{heading}\n\n{table(rows, header)}"]
    differing = [
        [group.label, str(group.members), *(_difference(m, group, family) for m in measures)]
        for group in family.compared
    ]
    if differing and seeds > 1:
        words = "Difference to the plain ensemble of the same ensemble size and seeds"
        blocks.append(f"{words}\n\n{table(differing, header)}\n\n{family_sentences(family)}")
    return "\n\n".join(blocks)


def _mean(measure: Measure, group: SeedGroup) -> str:
    return plus_minus(*measure.summary(group), scale=measure.scale)


def _difference(measure: Measure, group: SeedGroup, family: Family) -> str:
    decision = family(group, measure)
    if decision is None:
        return ""
    difference, low, high = (measure.scale * value for value in decision.difference)
    text = number(difference, (high - low) / 4)
    beside = decision.within and decision.verdict is not Verdict.EQUAL
    word = f"{decision.verdict}, within margin" if beside else decision.verdict
    return f"{word} {text if text.startswith('−') else f'+{text}'}"


def comparison_value(family: Family) -> list[dict[str, Any]]:
    """The numbers of `comparison_text`, for programs."""
    rows = []
    for group in family.groups:
        scores: dict[str, Any] = {}
        for measure in headlines(family.groups):
            mean, error = measure.summary(group)
            scores[_key(measure)] = {"mean": mean, "error": error}
            decision = family(group, measure)
            if decision is not None:
                scores[_key(measure)]["to_ensemble"] = decision.difference._asdict()
                scores[_key(measure)]["decision"] = _decided(decision)
        head = {"method": group.label, "members": group.members, "seeds": len(group.entries)}
        rows.append(head | {"scores": scores})
    return rows


def _decided(decision: Decision) -> dict[str, Any]:
    """The decision for programs, and for the columns of summary.csv."""
    return {
        "verdict": str(decision.verdict),
        "margin": decision.margin,
        "within": decision.within,
        "p": decision.p,
        "p_equal": decision.p_equal,
        "p_worse": decision.p_worse,
        "comparisons": decision.comparisons,
        "needed": decision.needed,
    }


def _key(measure: Measure) -> str:
    return f"{measure.split}/{measure.key}"


def results_csv(groups: list[SeedGroup]) -> str:
    """Every score of every run, one row per run."""
    rows = []
    for group in groups:
        for record in group.entries:
            scores = record.assessment.scores if record.assessment else {}
            splits = {kind: scores.get(kind, {}) for kind in ("test", *_KINDS)}
            head = {"method": group.label, "members": group.members, "seed": record.seed}
            rows.append(head | _flat(splits))
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(scores: dict[str, Any]) -> dict[str, str]:
    return {key: "" if value == str(math.nan) else value for key, value in flat(scores).items()}


COLUMNS: tuple[str, ...] = (
    "method", "size", "metric", "part", "mean", "stderr", "n", "difference", "low", "high",
    "verdict", "margin", "within", "p", "p_equal", "p_worse", "comparisons", "needed",
)  # fmt: skip
"""`difference` is the mean over the seeds of this method minus the plain ensemble. Both have the
same ensemble size, seed and initial weights. `low` and `high` are the ends of the 95 % interval by
Student's t. `verdict` is "better", "worse", "equal", "different" or "not decided", as `Verdict`
has them. The p values are adjusted over `comparisons` tests: those of the family for a headline
metric, 1 for every other. `needed` is the number of seeds that would decide."""

_KINDS = {"shifts": "shift", "corrupted": "corrupted", "ood": "ood"}


def summary_csv(family: Family) -> str:
    """A row per method, ensemble size, metric and split; all digits, empty where not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for measure in every_measure(family.groups):
        known = [group for group in family.groups if group.values(measure)]
        writer.writerows(_row(measure, group, family) for group in known)
    return text.getvalue()


def every_measure(groups: Sequence[SeedGroup]) -> list[Measure]:
    """Every metric of the runs, split by split: test, shifts, means over corruptions, OOD."""
    measures: dict[Measure, None] = {}
    for group in groups:
        for record in group.entries:
            scores = record.assessment.scores if record.assessment else {}
            measures |= dict.fromkeys(_measures(scores))
    order = {split: i for i, split in enumerate(dict.fromkeys(m.split for m in measures))}
    return sorted(measures, key=lambda measure: order[measure.split])


def _measures(scores: dict[str, Any]) -> Iterator[Measure]:
    yield from (Measure(key) for key in scores.get("test", {}))
    for kind, start in _KINDS.items():
        for name, metrics in scores.get(kind, {}).items():
            yield from (Measure(key, f"{start}:{name}") for key in metrics)


def _row(measure: Measure, group: SeedGroup, family: Family) -> dict[str, Any]:
    mean, error = measure.summary(group)
    row: dict[str, Any] = {
        "method": group.label,
        "size": group.members,
        "metric": measure.key,
        "part": measure.split,
        "mean": _number(mean),
        "stderr": _number(error),
        "n": len(group.values(measure)),
    }
    decision = family(group, measure)
    if decision is None:
        return row
    row |= {name: _number(value) for name, value in decision.difference._asdict().items()}
    return row | {
        name: _number(value) if isinstance(value, float) else value
        for name, value in _decided(decision).items()
    }


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else ""
