"""How a velocity at the outputs should move the weights: rules compared on known posteriors.

python -m studies.jacobian.make [--jobs K] [--within SECONDS] [--seeds 5] [--out DIR]
python -m studies.jacobian.make --tables       # tables.md and figure from raw.csv, no training

Cells that raw.csv has are not repeated. Whole seeds complete first.
"""

import argparse
import csv
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from shoal.prediction.statistics import holm, mean_and_error, paired_difference, paired_p_value
from studies import RESULTS
from studies.common import finished, read_csv
from studies.jacobian import flows

FOLDER = RESULTS / "jacobian"

PROBLEMS = ("linear", "regression", "classification", "digits")
STEPS = (50, 400)
KEY = ("problem", "form", "rule", "steps", "seed")
MEASURED = (
    "frechet", "frechet/on", "frechet/off", "tv", "tv/on", "tv/off", "mean/on", "mean/off",
    "std/on", "std/off", "ksd", "ksd2", "accuracy", "rmse", "rest_weights", "rest_outputs",
    "seconds",
)  # fmt: skip
WORDS = {
    "transpose": "J^T v by Adam (published)",
    "transpose-flow": "J^T v, plain steps",
    "ntk": "J^T (J J^T + λ)^-1 v",
    "gauss-newton": "(J^T Λ J + P)^-1 J^T v",
    "other-batch": "push elsewhere, J of the batch (released)",
    "other-exact": "push elsewhere, its own J",
    "draws": "20 exact draws",
}
Cell = tuple[str, str, str, int, int]
Rows = dict[Cell, dict[str, float]]


def cells(seeds: int) -> Iterator[Cell]:
    """All cells, whole seeds first; the longest of a seed first."""
    for seed in range(seeds):
        for name in reversed(PROBLEMS):
            yield name, "", "draws", 0, seed
            for steps, form, rule in product(reversed(STEPS), flows.FORMS, flows.RULES):
                yield name, form, rule, steps, seed


def read(path: Path) -> Rows:
    """Rows of raw.csv by cell."""
    return {
        (r["problem"], r["form"], r["rule"], int(r["steps"]), int(r["seed"])): {
            name: float(r[name]) for name in MEASURED if r[name]
        }
        for r in read_csv(path, missing_ok=True)
    }


def train(out: Path, seeds: int, jobs: int, within: float) -> None:
    """Run what is missing, and append a row after every cell."""
    path = out / "raw.csv"
    out.mkdir(parents=True, exist_ok=True)
    done = read(path)
    todo = [where for where in cells(seeds) if where not in done]
    with path.open("a") as file:
        writer = csv.writer(file)
        if not done:
            writer.writerow([*KEY, *MEASURED])
        for where, found in finished(todo, flows.cell, jobs, within, kind=lambda cell: cell[:4]):
            writer.writerow([*where, *(found.get(name, "") for name in MEASURED)])
            file.flush()


def values(rows: Rows, where: Sequence, name: str) -> dict[int, float]:
    """The measure of every seed."""
    return {c[4]: v[name] for c, v in rows.items() if c[:4] == tuple(where) and name in v}


def table(rows: Rows, name: str, steps: int, digits: int = 3) -> str:
    """Mean and standard error of a measure, by rule and problem."""
    lines = [
        f"| form | rule | {' | '.join(PROBLEMS)} |",
        "| --- | --- |" + " --- |" * len(PROBLEMS),
    ]
    wanted = [("", "draws", 0), *((f, r, steps) for f, r in product(flows.FORMS, flows.RULES))]
    for form, rule, count in wanted:
        entries = []
        for problem in PROBLEMS:
            found = [*values(rows, (problem, form, rule, count), name).values()]
            entries.append(_entry([v for v in found if not math.isnan(v)], digits))
        lines.append(f"| {form or 'posterior'} | {WORDS[rule]} | {' | '.join(entries)} |")
    return "\n".join(lines)


def _entry(found: Sequence[float], digits: int) -> str:
    """Mean, standard error if there are several seeds, and their number."""
    if not found:
        return ""
    mean, error = mean_and_error(found)
    spread = "" if math.isnan(error) else f" ± {error:.{digits}f}"
    return f"{mean:.{digits}f}{spread} ({len(found)})"


def differences(rows: Rows, name: str, steps: int) -> str:
    """Paired difference of every rule to its baseline, with Holm's correction over the table.

    The baseline is the published rule. A push elsewhere by its own J is compared with J of the
    batch.
    """
    found = []
    for problem, form, rule in product(PROBLEMS, flows.FORMS, flows.RULES):
        base = {"transpose": None, "other-exact": "other-batch"}.get(rule, "transpose")
        if base is None:
            continue
        a = values(rows, (problem, form, rule, steps), name)
        b = values(rows, (problem, form, base, steps), name)
        seeds = sorted(a.keys() & b.keys())
        pair = [a[s] for s in seeds], [b[s] for s in seeds]
        if len(seeds) > 2:  # two seeds tell no variance
            where = problem, form, rule, base
            found.append((where, paired_difference(*pair), paired_p_value(*pair), len(seeds)))
    lines = [
        f"| problem | form | rule | minus | {name} at {steps} steps | 95 % interval | Holm's p "
        "| seeds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for ((problem, form, rule, base), d, _, count), p in zip(
        found, holm([row[2] for row in found]), strict=True
    ):
        number = f"{d.difference:+.3f}"
        number = f"**{number}**" if p < 0.05 else number
        words = f"{problem} | {form} | {WORDS[rule]} | {WORDS[base]}"
        lines.append(f"| {words} | {number} | {d.low:+.3f} to {d.high:+.3f} | {p:.2g} | {count} |")
    return "\n".join(lines)


def write_tables(out: Path) -> None:
    """tables.md and rules.png from raw.csv."""
    rows = read(out / "raw.csv")
    parts = [
        f"# Tables of the Jacobian study\n\n{len(rows)} runs. Mean ± standard error over seeds; "
        "the number of seeds is in brackets."
    ]
    for name, title in (
        ("frechet", "Fréchet distance of predictions"),
        ("tv", "Total variation of predictive distributions"),
        ("rest_weights", "Rest |J^T v| / (|J^T drive| + |J^T push|)"),
        ("rest_outputs", "Rest |v| / (|drive| + |push|) at the outputs"),
        ("seconds", "Seconds of training"),
    ):
        for steps in STEPS:
            parts.append(f"## {title}, {steps} steps\n\n{table(rows, name, steps)}")
    for steps in STEPS:
        parts.append(f"## Differences, {steps} steps\n\n{differences(rows, 'frechet', steps)}")
    (out / "tables.md").write_text("\n\n".join(parts) + "\n")
    draw(rows, out / "rules.png")


def draw(rows: Rows, path: Path) -> None:
    """Fréchet distance by rule, for both numbers of steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from shoal.plots.figure import COLOURS

    colours = [*COLOURS.values()]
    figure, axes = pyplot.subplots(1, len(PROBLEMS), figsize=(13, 3.6), layout="constrained")
    for axis, problem in zip(axes, PROBLEMS, strict=True):
        for row, (form, steps) in enumerate(product(flows.FORMS, STEPS)):
            for index, rule in enumerate(flows.RULES):
                found = [*values(rows, (problem, form, rule, steps), "frechet").values()]
                if not found:
                    continue
                mean, error = mean_and_error(found)
                error = 0.0 if math.isnan(error) else error
                height = row + (index - 2.5) * 0.12
                label = WORDS[rule] if row == 0 and problem == PROBLEMS[0] else None
                axis.errorbar(mean, height, xerr=error, fmt="o", color=colours[index], label=label)
        exact = [*values(rows, (problem, "", "draws", 0), "frechet").values()]
        if exact:
            axis.axvline(sum(exact) / len(exact), color="grey", linestyle=":")
        axis.set(title=problem, xlabel="Fréchet distance")
        axis.set_xlim(left=0)
        words = [f"{form}, {steps} steps" for form, steps in product(flows.FORMS, STEPS)]
        axis.set_yticks(range(len(words)), words if problem == PROBLEMS[0] else [""] * len(words))
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Parse what was typed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--within", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="only cpu is used")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tables", action="store_true")
    asked = parser.parse_args()
    if not asked.tables:
        train(asked.out, asked.seeds, asked.jobs, asked.within)
    write_tables(asked.out)


if __name__ == "__main__":
    main()
