"""Residual networks on half of CIFAR-10, clean and under every corruption, with repulsion or not.

    python -m studies.cifar10 --device cuda --runs FOLDER

The training is that of an experiment, for a given number of epochs. The folder of --runs keeps the
runs, and the same command resumes an interrupted study. After every run the script writes the
numbers so far beside this file, or into the folder of --out: results.csv (every score of every
run), summary.csv (means, and differences paired by seed), study.json (settings, machine, cost),
tables.md (means, with published numbers in parentheses) and two figures.
"""

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.display.text import markdown_table
from shoal.core.storage.files import write_bytes, write_json, write_text
from shoal.core.storage.lock import FolderLock
from shoal.data.corruptions import SEVERITIES
from shoal.data.corruptions import registry as corruptions
from shoal.experiment.bench.measure import machine, versions
from shoal.experiment.bench.plan import find_device
from shoal.experiment.build import make_data
from shoal.experiment.config import load_config
from shoal.experiment.grid import Grid, check_grid, resident, run_point
from shoal.experiment.variants import parse_variants
from shoal.page.compare import comparison_value, groups_of, results_csv, summary_csv
from shoal.page.measures import Measure, against_baseline
from shoal.page.report_data import RunRecord, SeedGroup
from shoal.page.verdicts import decide_groups
from shoal.plots import MetricCurve, png, severity
from studies import RESULTS
from studies.common import read_csv

FOLDER = RESULTS / "cifar10"
COLUMNS = {
    "accuracy": ("accuracy, %", Measure("accuracy"), 2),
    "nll": ("NLL", Measure("nll"), 4),
    "ece": ("ECE", Measure("ece"), 4),
    "corrupted_accuracy": ("corrupted accuracy, %", Measure("accuracy", "corrupted:all"), 2),
    "corrupted_nll": ("corrupted NLL", Measure("nll", "corrupted:all"), 3),
    "corrupted_ece": ("corrupted ECE", Measure("ece", "corrupted:all"), 4),
    "auroc": ("AUROC by predictive entropy, SVHN", Measure("auroc_entropy", "ood:svhn"), 3),
    "auroc_disagreement": (
        "AUROC by disagreement, SVHN",
        Measure("auroc_disagreement", "ood:svhn"),
        3,
    ),
}
PUBLISHED = {"cifar10-forde": "published.csv", "cifar10-resnet32": "published-resnet32.csv"}


def options() -> argparse.Namespace:
    """The command-line options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--experiment", default="cifar10-forde")
    made.add_argument("--epochs", type=int, default=36)
    made.add_argument("--seeds", type=int, default=4)
    made.add_argument("--first", type=int, default=0, help="the first seed")
    made.add_argument("--methods", default="ensemble,forde:16")
    made.add_argument("--members", type=int, default=5)
    made.add_argument("--device", help="cpu or cuda; by default a GPU where there is one")
    made.add_argument("--runs", default="runs/cifar10-study", help="the folder of the runs")
    made.add_argument("--out", default=str(FOLDER), help="the folder of the numbers")
    made.add_argument(
        "--within", type=float, help="start no run that would end after so many seconds"
    )
    made.add_argument("--quick", action="store_true", help="digits: a short test")
    return made.parse_args()


def planned(asked: argparse.Namespace) -> Grid:
    """The grid of runs."""
    source = "digits-forde" if asked.quick else asked.experiment
    changes = [f"epochs={asked.epochs}", f"members={asked.members}", "save_every=1e9"]
    changes += [f"seed={asked.first}", f"device={find_device(asked.device)}"]
    if asked.quick:
        changes += ['data={name="digits", corruptions="all", severities=[1, 5]}']
    elif source == "cifar10-forde":
        changes += ["data.ood=[]"]
    config = load_config(source, changes)
    return Grid(
        config, Path(asked.runs), parse_variants(asked.methods), (config.members,), asked.seeds
    )


def trained(grid: Grid, data: Any, within: float | None, after: Any) -> None:
    """Train every missing run, while there is time for one as long as the longest."""
    begun, longest, queue = time.monotonic(), 0.0, grid.queue
    with FolderLock(grid.folder):
        for place, point in enumerate(queue):
            started = time.monotonic()
            if within is not None and started - begun + longest > within:
                return say(f"{len(queue) - place} runs remain for the next call")
            run_point(grid, point, data)
            seconds = time.monotonic() - started
            longest = max(longest, seconds)
            say(f"{place + 1}/{len(queue)}  {point.name}: {seconds:.0f} s")
            after()


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


def write(grid: Grid, out: Path, found: dict[str, Any]) -> None:
    """Write everything that is known so far."""
    groups = groups_of(grid)
    if not groups:
        return
    family = decide_groups(groups)
    write_text(out / "results.csv", results_csv(groups))
    write_text(out / "summary.csv", summary_csv(family))
    costs = {group.label: cost(group) for group in groups}
    value = found | {"results": comparison_value(family), "cost": costs}
    write_json(out / "study.json", value)
    write_text(out / "tables.md", tables(groups, costs, _published(grid)))
    for metric, share in (("accuracy", True), ("ece", False)):
        write_bytes(out / f"{metric}.png", png(_by_severity(groups, metric, share), 110))


def cost(group: SeedGroup) -> dict[str, float]:
    """Seconds per epoch, without the epochs that capture steps, and per run."""
    epochs = [row["seconds"] for entry in group.entries for row in entry.history[2:]]
    epochs = epochs or [row["seconds"] for entry in group.entries for row in entry.history]
    steps = {entry.history[0]["step"] for entry in group.entries}
    epoch = statistics.median(epochs)
    whole = [float(entry.provenance["seconds"]) for entry in group.entries]
    return {
        "seconds_an_epoch": epoch,
        "ms_a_step": 1e3 * epoch / statistics.median(steps),
        "training_seconds": statistics.mean(whole),
    }


def _published(grid: Grid) -> dict[str, dict[str, str]]:
    """Numbers of the paper by method, if the experiment uses its data."""
    if grid.config.name not in PUBLISHED:
        return {}
    return {row["method"]: row for row in read_csv(FOLDER / PUBLISHED[grid.config.name])}


def tables(
    groups: list[SeedGroup], costs: dict[str, dict[str, float]], known: dict[str, dict[str, str]]
) -> str:
    """Tables of means with published means, differences, each corruption, and cost."""
    header = ["method", "seeds", *(title for title, _, _ in _columns(groups).values())]
    names = [group.label.partition(":")[0] for group in groups]
    first = [_means(g, groups, known.get(name, {})) for g, name in zip(groups, names, strict=True)]
    second = [points for group in groups if (points := _differences(group, groups))]
    plain = next((group for group in groups if group.label == "ensemble"), None)
    kinds = ["mean accuracy over severities, %", *(group.label for group in groups)]
    third = [_one_corruption(name, groups) for name in _corruptions(groups)]
    titles = ["seconds per epoch", "ms per step", "ratio to the plain ensemble", "training, s"]
    fourth = [_cost(group, plain, costs) for group in groups]
    blocks = [(header, first), (header, second), (kinds, third), (["method", *titles], fourth)]
    return "\n\n".join(markdown_table(*block) for block in blocks if block[1]) + "\n"


def _columns(groups: list[SeedGroup]) -> dict[str, tuple[str, Measure, int]]:
    """The columns for which these runs have scores."""
    return {key: column for key, column in COLUMNS.items() if groups[0].values(column[1])}


def _means(group: SeedGroup, groups: list[SeedGroup], known: dict[str, str]) -> list[str]:
    points = [group.label, str(len(group.entries))]
    for key, (_, measure, digits) in _columns(groups).items():
        scale = 100 if key.endswith("accuracy") else 1
        mean, error = (scale * value for value in measure.summary(group))
        beside = f" ({known[key]})" if key in known else ""
        plus_minus = f" ± {error:.{digits}f}" if error == error else ""
        points.append(f"{mean:.{digits}f}{plus_minus}{beside}")
    return points


def _differences(group: SeedGroup, groups: list[SeedGroup]) -> list[str]:
    """Differences from the plain ensemble, paired by seed, with their 95 % intervals."""
    points = [f"{group.label} − ensemble", str(len(group.entries))]
    for key, (_, measure, digits) in _columns(groups).items():
        found = against_baseline(measure, group, groups)
        if found is None:
            return []
        scale = 100 if key.endswith("accuracy") else 1
        middle, ends = _interval(found[0], scale, digits)
        points.append(f"{middle} ({ends})" if ends else middle)
    return points


def _interval(found: Sequence[float], scale: int, digits: int) -> tuple[str, str]:
    """A difference and the ends of its interval; one seed has no interval."""
    middle, low, high = (f"{scale * value:+.{digits}f}" for value in found)
    return middle, f"{low} to {high}" if all(map(math.isfinite, found)) else ""


def _one_corruption(name: str, groups: list[SeedGroup]) -> list[str]:
    """The mean of each method, with the difference from the plain ensemble."""
    measure = functools.partial(_over_severities, name)
    points = [name.replace("-", " ")]
    for group in groups:
        mean = statistics.fmean(group.values(measure).values())
        found = against_baseline(measure, group, groups)
        difference = [] if found is None else filter(None, _interval(found[0], 1, 2))
        words = "; ".join(difference)
        points.append(f"{mean:.2f} ({words})" if words else f"{mean:.2f}")
    return points


def _corruptions(groups: list[SeedGroup]) -> list[str]:
    """The corruptions under which every run was evaluated."""
    everyone = sum(len(group.entries) for group in groups)
    measures = {name: functools.partial(_over_severities, name) for name in corruptions}
    known = {n: sum(len(group.values(m)) for group in groups) for n, m in measures.items()}
    return [name for name, count in known.items() if count == everyone]


def _over_severities(name: str, entry: RunRecord) -> float:
    places = [Measure("accuracy", f"shift:{name}-{severity}") for severity in SEVERITIES]
    known = [value for place in places if not math.isnan(value := place(entry))]
    return 100 * statistics.fmean(known) if known else math.nan


def _cost(
    group: SeedGroup, plain: SeedGroup | None, costs: dict[str, dict[str, float]]
) -> list[str]:
    """The ratio is for runs of one command: two commands may differ in machine and code."""
    spent, ratio = costs[group.label], "-"
    if plain is not None and _commands(group) == _commands(plain):
        ratio = f"{spent['ms_a_step'] / costs[plain.label]['ms_a_step']:.2f}"
    points = [f"{spent['seconds_an_epoch']:.2f}", f"{spent['ms_a_step']:.1f}", ratio]
    return [group.label, *points, f"{spent['training_seconds']:.0f}"]


def _commands(group: SeedGroup) -> set[str]:
    return {entry.provenance["command"] for entry in group.entries}


def _by_severity(groups: list[SeedGroup], metric: str, share: bool) -> Any:
    places = {0.0: Measure(metric)}
    places |= {float(s): Measure(metric, f"corrupted:severity-{s}") for s in SEVERITIES}
    curves = {}
    for group in groups:
        known = {x: measure for x, measure in places.items() if group.values(measure)}
        points = [measure.summary(group) for measure in known.values()]
        curves[group.label] = MetricCurve(
            list(known), [m for m, _ in points], [e for _, e in points]
        )
    return severity(curves, Measure(metric).title, share=share)


def _known(file: Path) -> dict[str, Any]:
    """Machine, versions and settings of the finished runs."""
    study = json.loads(file.read_text())
    return {key: study[key] for key in ("machine", "versions", "settings")}


def main() -> None:
    """Train and evaluate missing runs, and write the numbers after every run."""
    asked = options()
    grid, out = planned(asked), Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    grid.folder.mkdir(parents=True, exist_ok=True)
    if not grid.queue and (out / "study.json").exists():
        return write(grid, out, _known(out / "study.json"))
    data = make_data(grid.config)
    check_grid(grid, data)
    device = find_device(asked.device)
    shared = {key: value for key, value in grid.config.table.items() if key != "out"}
    found = {"machine": machine(device), "versions": versions(), "settings": shared}
    trained(grid, resident(data, device), asked.within, lambda: write(grid, out, found))
    write(grid, out, found)


if __name__ == "__main__":
    main()
