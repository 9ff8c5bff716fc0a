"""Tables and figures of the study, from raw.csv and points.csv alone.

Differences are paired by seed, with 95 % intervals by Student's t. A star marks a difference whose
p value is below 0.05 after Holm's correction over the rows of its table.
"""

import math
from pathlib import Path
from typing import Any

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import (
    holm,
    mean_and_error,
    paired_difference,
    paired_p_value,
    t_quantile,
)
from studies.common import read_csv

__all__ = ["FIELDS", "POINTS", "Rows", "read", "values", "write"]

FIELDS = ("case", "seed", "analysis", "split", "treatment", "metric", "value")
POINTS = ("case", "figure", "series", "x", "y")
PAIRS = (
    ("5 member", "1 member", "ensembling"),
    ("1 average", "1 member", "averaging weights"),
    ("5 average", "5 member", "averaging weights of an ensemble"),
    ("5 member", "1 average", "ensembling against averaging"),
    ("5 member", "1 SWAG", "ensembling against SWAG"),
    ("5 member", "1 dropout", "ensembling against dropout"),
    ("5 member", "mean-field", "ensembling against mean-field VI"),
    ("5 SWAG", "5 average", "SWAG samples in every mode"),
)
"""Two treatments, and what their difference tests."""

FIGURES = """![diversity against accuracy](diversity.png)

*Disagreement with a reference, divided by the own error rate, seed 0. The reference is the first
member; for mean-field VI it is the mean network.*

![the low-loss tunnel](tunnel.png)

*The low-loss tunnel between two members, seed 0. Enforced: bisection puts the loss of 41 points
(dots) on 2,000 training images to the level of the ends. Found: the loss at the 40 points between
them (crosses), the loss on 2,000 other training images (grey), and everything below.*

![NLL by corruption](averaging.png)

*NLL of one and five modes, with and without weight averages, and of mean-field VI. Means over
seeds.*"""

Rows = list[dict[str, Any]]


def read(path: Path) -> Rows:
    """All rows of a file; numbers as numbers."""
    numbers = {"seed": int, "value": float, "x": float, "y": float}
    rows = read_csv(path, missing_ok=True)
    return [{k: numbers.get(k, str)(v) for k, v in row.items()} for row in rows]


def values(rows: Rows, **wanted: Any) -> dict[int, float]:
    """Value by seed of the rows with these fields; the mean if a seed has several."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if all(row[key] == value for key, value in wanted.items()):
            found.setdefault(row["seed"], []).append(row["value"])
    return {seed: sum(each) / len(each) for seed, each in found.items()}


def write(folder: Path) -> None:
    """Write tables.md."""
    rows, points = read(folder / "raw.csv"), read(folder / "points.csv")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    parts = []
    for case in cases:
        mine = [row for row in rows if row["case"] == case]
        seeds = len({row["seed"] for row in mine})
        parts += [
            f"## {case}: {seeds} seed{'s' if seeds != 1 else ''}",
            _simple(
                mine, "diversity", "equal", "disagreement / error rate, at the members' accuracy"
            ),
            _simple(mine, "diversity", "full", "disagreement / error rate, as drawn"),
            _simple(mine, "trajectories", "apart", "share of other labels"),
            _simple(mine, "line", "barrier", "loss barrier on the straight line, nats"),
            _simple(mine, "tunnel", "value", "low-loss tunnel"),
            _simple(mine, "mean-field", "nll", "validation NLL of mean-field VI by KL weight"),
            _averaging(mine),
            _differences(mine),
            _bias(mine),
        ]
    parts += ["## Better under how many corruptions", _counts(rows, cases)]
    if points and rows:
        parts += ["## Figures", FIGURES]
    (folder / "tables.md").write_text("\n\n".join(part for part in parts if part) + "\n")


def interval(found: dict[int, float], digits: int = 3) -> str:
    """Mean with its 95 % interval over seeds."""
    mean, error = mean_and_error([*found.values()])
    if math.isnan(error):
        return f"{mean:.{digits}f}"
    reach = t_quantile(0.975, len(found) - 1) * error
    return f"{mean:.{digits}f} ({mean - reach:.{digits}f} to {mean + reach:.{digits}f})"


def _simple(rows: Rows, analysis: str, metric: str, title: str) -> str:
    mine = [row for row in rows if row["analysis"] == analysis and row["metric"] == metric]
    names = list(dict.fromkeys(row["treatment"] for row in mine))
    lines = [[name, interval(values(mine, treatment=name))] for name in names]
    return markdown_table([title, "mean over seeds (95 %)"], lines) if lines else ""


def shifted(rows: Rows, metric: str, treatment: str) -> dict[int, float]:
    """Mean over all corruptions, by seed."""
    mine = [row for row in rows if row["analysis"] == "averaging" and row["split"] != "test"]
    return values(mine, metric=metric, treatment=treatment)


def tested(rows: Rows, metric: str, treatment: str) -> dict[int, float]:
    """Value on clean test images, by seed."""
    return values(rows, analysis="averaging", split="test", metric=metric, treatment=treatment)


def _averaging(rows: Rows) -> str:
    names = list(dict.fromkeys(r["treatment"] for r in rows if r["analysis"] == "averaging"))
    lines = [
        [
            name,
            *(interval(each(rows, "nll", name)) for each in (tested, shifted)),
            *(
                interval({s: 100 * v for s, v in each(rows, "accuracy", name).items()}, 2)
                for each in (tested, shifted)
            ),
        ]
        for name in names
    ]
    titles = ["modes and treatment", "NLL", "NLL, mean over corruptions",
              "accuracy, %", "accuracy, mean over corruptions, %"]  # fmt: skip
    return markdown_table(titles, lines)


def _differences(rows: Rows) -> str:
    """NLL of the first treatment minus that of the second, clean and corrupted."""
    keys = [(a, b, what, each) for a, b, what in PAIRS for each in (tested, shifted)]
    both = []
    for a, b, _, each in keys:
        first, second = each(rows, "nll", a), each(rows, "nll", b)
        seeds = [seed for seed in first if seed in second]
        both.append(([first[s] for s in seeds], [second[s] for s in seeds]))
    if not both or len(both[0][0]) < 2:
        return ""
    adjusted = holm([paired_p_value(*pair) for pair in both])
    lines = []
    for (a, b, what, each), pair, p in zip(keys, both, adjusted, strict=True):
        mean, low, high = (f"{value:+.3f}" for value in paired_difference(*pair))
        where = "test" if each is tested else "corrupted"
        lines.append(
            [what, f"{a} - {b}", where, f"{mean} ({low} to {high}){'*' if p < 0.05 else ''}"]
        )
    return markdown_table(["question", "treatments", "images", "NLL, difference"], lines)


def _bias(rows: Rows) -> str:
    mine = [row for row in rows if row["analysis"] == "bias-variance"]
    keys = list(dict.fromkeys((row["split"], row["treatment"]) for row in mine))
    lines = [
        [
            split,
            name,
            *(
                interval(values(mine, split=split, treatment=name, metric=metric))
                for metric in ("one", "variance", "averaged")
            ),
        ]
        for split, name in keys
    ]
    titles = ["images", "five networks", "Brier score of one", "- variance", "= of their mean"]
    return markdown_table(titles, lines)


def _counts(rows: Rows, cases: list[str]) -> str:
    """Corruptions under which the first treatment has the lower mean NLL."""
    lines = []
    for case in cases:
        mine = [r for r in rows if r["case"] == case and r["analysis"] == "averaging"]
        splits = [s for s in dict.fromkeys(row["split"] for row in mine) if s != "test"]
        for first, second, what in PAIRS:
            losses = [
                [mean_and_error([*values(mine, split=s, treatment=t, metric="nll").values()])[0]
                 for t in (first, second)]
                for s in splits
            ]  # fmt: skip
            won = sum(a < b for a, b in losses)
            lines.append([case, what, f"{first} - {second}", f"{won} of {len(splits)}"])
    return markdown_table(["case", "question", "treatments", "lower NLL"], lines)
