"""Experiments at equal cost, decided: python -m studies.decided

Three families of comparisons were planned before their runs, on the pages of the folders below.
This script reads the raw files and writes decisions.md beside each page: differences paired by
seed with 95 % intervals, and verdicts after Holm's correction over the family. Other pairs of the
same runs follow, as a family of their own that was not planned.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from shoal.core.display.text import markdown_table
from shoal.core.storage.files import write_text
from shoal.prediction.statistics import Pairs, Verdict, decide
from studies import RESULTS
from studies.common import read_csv

Row = Mapping[str, str]
Arms = dict[str, dict[int, Row]]
"""Rows by arm and seed."""
Compared = list[tuple[str, str]]
"""Pairs of arms: the first minus the second."""


class Metric(NamedTuple):
    """A column, its title, what is better, its margin of equality, its unit and its digits."""

    column: str
    title: str
    better: str
    margin: float
    scale: float = 1.0
    digits: int = 3


def headline() -> tuple[Arms, Compared, Compared]:
    """`forde:16` and plain ResNet18; five members with common batches are stored runs."""
    stored = RESULTS / "cifar10"
    rows = [*read_csv(stored / "results.csv"), *read_csv(stored / "equal-cost/results.csv")]
    arms = grouped(rows, lambda row: f"{row['members']} {row['method']}")
    repelled = next(name for name in arms if "forde" in name)
    large = max((name for name in arms if "own" in name), key=lambda name: int(name.split()[0]))
    small = next(name for name in arms if "own" in name and name != large)
    return arms, [(repelled, large)], [(small, "5 ensemble"), (large, small)]


def weights() -> tuple[Arms, Compared, Compared]:
    """`kde:1000` and four plain or random arms of ResNet32; seed 100 chose the tuned one."""
    rows = read_csv(RESULTS / "cifar10/weights/raw.csv")
    chosen = min(
        (row for row in rows if row["seed"] == "100"), key=lambda row: float(row["validation_nll"])
    )
    arms = grouped((row for row in rows if row["seed"] != "100"), lambda row: row["method"])
    others = ("ensemble", "ensemble+own-batches", chosen["method"], "kde+placebo:1000")
    own, many = "ensemble+own-batches", "ensemble+members=11+own-batches"
    beside = [(own, "ensemble"), ("kde+own-batches:1000", "kde:1000"), ("kde:1000", many)]
    return (
        arms,
        [("kde:1000", other) for other in others],
        [*beside, ("kde+placebo:1000", "ensemble")],
    )


def mnist() -> tuple[Arms, Compared, Compared]:
    """The strength that held-out images choose in each seed, and plain members of equal cost."""
    rows = read_csv(RESULTS / "mnist/all-images/raw.csv")
    arms, pairs = grouped(rows, lambda row: f"{row['members']} {row['method']}"), []
    for size, equal in ((5, 8), (13, 21), (17, 28)):
        tried = [arms[f"{size} {name}"] for name in ("ensemble", "kde:10000", "kde:100000")]
        seeds = set.intersection(*(set(rows) for rows in tried))
        arms[f"{size} chosen"] = {
            seed: min((rows[seed] for rows in tried), key=lambda row: float(row["held_nll"]))
            for seed in sorted(seeds)
        }
        pairs.append((f"{size} chosen", f"{equal} ensemble"))
    sizes = (5, 13, 17)
    beside = [(f"{size} ensemble+own", f"{size} ensemble") for size in sizes]
    return arms, pairs, [*beside, *((f"{size} chosen", f"{size} ensemble") for size in sizes)]


FAMILIES: dict[Path, tuple[Callable[[], tuple[Arms, Compared, Compared]], tuple[Metric, ...]]] = {
    RESULTS / "cifar10/equal-cost": (
        headline,
        (
            Metric("test.accuracy", "clean accuracy, points", "higher", 0.005, 100, 2),
            Metric("test.nll", "clean NLL", "lower", 0.01, 1, 4),
            Metric("corrupted.all.accuracy", "corrupted accuracy, points", "higher", 0.005, 100, 2),
            Metric("corrupted.all.nll", "corrupted NLL", "lower", 0.01),
            Metric("corrupted.all.ece", "corrupted ECE", "lower", 0.005),
        ),
    ),
    RESULTS / "cifar10/weights": (
        weights,
        (
            Metric("nll", "NLL", "lower", 0.01),
            Metric("accuracy", "accuracy, points", "higher", 0.005, 100, 2),
            Metric("corrupted_nll", "corrupted NLL", "lower", 0.01),
            Metric("auroc_entropy", "AUROC by entropy, SVHN", "higher", 0.01),
        ),
    ),
    RESULTS / "mnist/all-images": (
        mnist,
        (
            Metric("test_nll", "NLL", "lower", 0.002, 1, 4),
            Metric("test_accuracy", "accuracy, points", "higher", 0.001, 100, 2),
            Metric("auroc_entropy_letters", "AUROC, letters", "higher", 0.01),
            Metric("auroc_entropy_clothes", "AUROC, clothes", "higher", 0.01),
            Metric("auroc_entropy_characters", "AUROC, characters", "higher", 0.01),
        ),
    ),
}
"""How each planned family is read, and its metrics, by the folder of its page."""


def grouped(rows: Iterable[Row], arm: Callable[[Row], str]) -> Arms:
    """The rows by arm and seed."""
    arms: Arms = {}
    for row in rows:
        arms.setdefault(arm(row), {})[int(row["seed"])] = row
    return arms


def values(arms: Arms, first: str, second: str, metric: Metric) -> Pairs:
    """Both arms in the seeds that both have."""
    seeds = sorted(arms[first].keys() & arms[second].keys())
    a, b = ([float(arms[arm][s][metric.column]) for s in seeds] for arm in (first, second))
    return Pairs(a, b, metric.better, metric.margin)


def means(arms: Arms, metrics: Iterable[Metric]) -> str:
    """A row per arm."""
    lines = []
    for name, rows in arms.items():
        cells = []
        for metric in metrics:
            mean = sum(float(row[metric.column]) for row in rows.values()) / len(rows)
            cells.append(f"{metric.scale * mean:.{metric.digits}f}")
        lines.append([f"`{name}`", str(len(rows)), *cells])
    return markdown_table(["arm", "seeds", *(metric.title for metric in metrics)], lines)


def decisions(arms: Arms, pairs: Compared, metrics: tuple[Metric, ...]) -> str:
    """A row per comparison of the family."""
    keys = [(first, second, metric) for first, second in pairs for metric in metrics]
    found = decide("these pairs", {key: values(arms, *key) for key in keys})
    lines = []
    for (first, second, metric), decision in found.items():
        ends = [f"{metric.scale * end:+.{metric.digits}f}" for end in decision.difference]
        words = str(decision.verdict)
        if decision.verdict is Verdict.UNDECIDED and decision.needed:
            words += f"; {decision.needed} seeds would decide"
        elif decision.within and decision.verdict is not Verdict.EQUAL:
            words += ", within the margin"
        cells = [str(decision.pairs), "{} ({} to {})".format(*ends)]
        cells += [f"{metric.scale * metric.margin:.{metric.digits}f}", words]
        lines.append([f"`{first}` − `{second}`", metric.title, *cells])
    titles = ["comparison", "metric", "seeds", "difference (95 %)", "margin", "verdict"]
    return markdown_table(titles, lines)


def main() -> None:
    """Write every table."""
    for folder, (read, metrics) in FAMILIES.items():
        arms, planned, beside = read()
        parts = ["## Decisions", decisions(arms, planned, metrics)]
        parts += ["## Other pairs, not planned", decisions(arms, beside, metrics)]
        parts += ["## Means", means(arms, metrics)]
        write_text(folder / "decisions.md", "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
