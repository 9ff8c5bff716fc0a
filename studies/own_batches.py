"""Members with batches of their own beside members that share them: python -m studies.own_batches

The runs of the first table come from the command line, for each experiment and for `own` and
`common`. Their `results.csv` is kept as docs/results/own-batches/EXPERIMENT-BATCHES.csv:

    shoal compare digits batches=own --methods ensemble --seeds 10 --device cuda -o runs/digits-own

`python -m studies.own_batches --train` trains the runs of the second table, where outputs repel
each other, and adds each to compared.csv. Rows that are already there are not trained again. With
`--bench` it times steps on one thread of a CPU, and adds them to steps.csv. All commands write the
tables into the page.
"""

import re
import statistics
import sys
import time
from collections import defaultdict
from itertools import compress, product
from pathlib import Path

import torch

import shoal
from shoal.experiment.bench import networks
from shoal.experiment.bench.battery import Case, contestants, measure
from shoal.experiment.bench.networks import Network
from shoal.experiment.build import make_data, train
from shoal.experiment.config import load_config
from shoal.models import MLP, SmallCNN, ViT
from shoal.prediction.statistics import holm, paired_difference, paired_p_value
from studies import RESULTS
from studies.common import Column, append_rows, read_csv, test_of

FOLDER = RESULTS / "own-batches"
EXPERIMENTS = ("digits", "digits-cnn", "mnist", "fashion-mnist")
COLUMNS = (
    Column("test.nll", "NLL", 1.0, 4),
    Column("test.accuracy", "accuracy, %", 100.0, 2),
    Column("test.ece", "ECE, %", 100.0, 2),
    Column("test.disagreement", "disagreement, %", 100.0, 3),
)

COMPARED = FOLDER / "compared.csv"
SEEDS, STRENGTHS = 10, (1, 100)
QUARTER = 'method={{name="f-kde", points={{name="{}", {}count=32}}}}'
ARMS = {
    "common batches": ("batches=common", "method=f-kde"),
    "own, common quarter": ("batches=own", "method=f-kde"),
    "own, training inputs": ("batches=own", QUARTER.format("dataset", 'data="digits", ')),
    "own, mixup": ("batches=own", QUARTER.format("mixup", "")),
}
PLANS = {"digits": (36, tuple(ARMS)), "digits-cnn": (6, tuple(ARMS)[:3])}
"""Epochs and arms of each experiment."""
TESTED = ("own, common quarter", "own, training inputs")
"""The planned tests compare these two arms."""
STEPS = FOLDER / "steps.csv"
NETWORKS = {
    "perceptron of `digits`": (Network("digits", MLP((100, 100)), (64,)), 128),
    "perceptron 784-100-100-100-10": (networks.network("mlp"), 128),
    "small CNN of `digits-cnn`": (Network("cnn", SmallCNN((16, 32, 32)), (1, 8, 8)), 128),
    "small vision transformer": (Network("vit", ViT(width=64, depth=2, heads=4), (3, 32, 32)), 8),
}
"""Networks with their batch sizes; five members each, in float32."""
TIMED = ("ensemble", "f-kde")
SCORES = (
    Column("nll", "NLL", 1.0, 4),
    Column("accuracy", "accuracy, %", 100.0, 2),
    Column("auroc_entropy", "AUROC, photographs, %", 100.0, 2),
    Column("ratio", "force ratio", 1.0, 4),
    Column("seconds", "seconds", 1.0, 1),
)


Rows = list[dict[str, str]]


def mean(column: Column, rows: Rows) -> str:
    """The mean over the seeds."""
    return f"{statistics.mean(values(column, rows)):.{column.digits}f}"


def values(column: Column, rows: Rows) -> list[float]:
    """The metric of each run."""
    return [column.scale * float(row[column.metric]) for row in rows]


def change(column: Column, first: Rows, second: Rows) -> str:
    """The paired difference with its 95 % interval, bold if the interval leaves out zero."""
    difference, low, high = paired_difference(values(column, second), values(column, first))
    digits = column.digits
    text = f"{difference:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
    return f"**{text}**" if low * high > 0 else text


def table() -> str:
    """One row per experiment."""
    lines = [f"| experiment | seeds | {' | '.join(column.title for column in COLUMNS)} |"]
    lines.append("| --- " * (2 + len(COLUMNS)) + "|")
    for name in EXPERIMENTS:
        common, own = (read_csv(FOLDER / f"{name}-{kind}.csv") for kind in ("common", "own"))
        assert [row["seed"] for row in common] == [row["seed"] for row in own]
        cells = " | ".join(f"{mean(c, common)}, {change(c, common, own)}" for c in COLUMNS)
        lines.append(f"| `{name}` | {len(own)} | {cells} |")
    return "\n".join(lines)


def train_missing() -> None:
    """Train the runs that have no row yet; the arms of a seed follow each other."""
    done = {
        (row["experiment"], row["arm"], row["strength"], row["seed"])
        for row in read_csv(COMPARED, missing_ok=True)
    }
    for experiment, (epochs, arms) in PLANS.items():
        for seed, strength, arm in product(range(SEEDS), STRENGTHS, arms):
            case = (experiment, arm, str(strength), str(seed))
            if case not in done:
                scores = compared(experiment, arm, strength, seed, epochs)
                header = ["experiment", "arm", "strength", "seed", *scores]
                append_rows(COMPARED, header, [(*case, *scores.values())])


def compared(experiment: str, arm: str, strength: int, seed: int, epochs: int) -> dict[str, float]:
    """Scores of one run of `f-kde`."""
    settings = (*ARMS[arm], f"strength={strength}", f"seed={seed}", f"epochs={epochs}")
    config = load_config(experiment, settings)
    data = make_data(config)
    started = time.perf_counter()
    run = train(config, data, None, progress=False)
    seconds = time.perf_counter() - started
    test = test_of(data)
    pred, ood = (shoal.predict(run, x) for x in (test.x, data.ood["photographs"].x))
    scores = shoal.evaluate(pred, test.y, ood)  # pyright: ignore[reportArgumentType]
    scores |= {"ratio": statistics.mean(row["ratio"] for row in run.history), "seconds": seconds}
    return {column.metric: scores[column.metric] for column in SCORES}


def compared_table() -> str:
    """Means of the common quarter, what other arms change, and p of the tests by Holm."""
    rows = defaultdict[tuple[str, ...], Rows](list)
    for row in read_csv(COMPARED):
        rows[row["experiment"], row["strength"], row["arm"]].append(row)
    cases = list(product(PLANS, map(str, STRENGTHS)))
    tests = [[values(SCORES[0], rows[*case, arm]) for arm in TESTED] for case in cases]
    done = [len(pair[0]) == len(pair[1]) == SEEDS for pair in tests]
    found = [
        paired_p_value(a, b) if whole else 1.0 for (a, b), whole in zip(tests, done, strict=True)
    ]
    p_values = dict(zip(cases, holm(found), strict=True))
    cases = list(compress(cases, done))
    titles = " | ".join(column.title for column in SCORES)
    lines = [f"| outputs repelled | arm | {titles} | p of NLL |", "| --- " * 8 + "|"]
    for case in cases:
        default, *others = sorted(PLANS[case[0]][1], key=lambda arm: arm != TESTED[0])
        first = rows[*case, default]
        means = " | ".join(mean(column, first) for column in SCORES)
        lines.append(f"| `{case[0]}`, strength {case[1]} | {default} | {means} | |")
        for arm in others:
            cells = " | ".join(change(column, first, rows[*case, arm]) for column in SCORES)
            p = f"{p_values[case]:.2g}" if arm == TESTED[1] else ""
            lines.append(f"| | {arm} | {cells} | {p} |")
    return "\n".join(lines)


def time_steps(repetitions: int = 5, seconds: float = 0.5) -> None:
    """Time steps with common and own batches in turns, several times."""
    for repetition, (name, (network, size)) in product(range(repetitions), NETWORKS.items()):
        case = Case(network, 5, size, "float32", "sgd", torch.device("cpu"), 20 * size)
        entries = contestants(case, TIMED, ["auto"], ["common", "own"])
        rows = measure([entry for entry in entries if entry.method], seconds)
        header = ["repetition", "network", "method", "batches", "ms"]
        told = [(repetition, name, row["method"], row["batches"], row["ms"]) for row in rows]
        append_rows(STEPS, header, told)


def steps_table() -> str:
    """Median times over the repetitions, and their median ratio with its range."""
    times = defaultdict[tuple[str, ...], list[float]](list)
    for row in read_csv(STEPS):
        times[row["network"], row["method"], row["batches"]].append(float(row["ms"]))
    lines = ["| on one thread | method | common, ms | own, ms | own / common |", "| --- " * 5 + "|"]
    for case in product(NETWORKS, TIMED):
        common, own = (times[*case, kind] for kind in ("common", "own"))
        ratios = [b / a for a, b in zip(common, own, strict=True)]
        medians = " | ".join(f"{statistics.median(each):.3g}" for each in (common, own))
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {case[0]} | `{case[1]}` | {medians} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is asked for, and write the tables into the page."""
    torch.set_num_threads(1)
    for word, act in (("--train", train_missing), ("--bench", time_steps)):
        if word in sys.argv:
            act()
    page: Path = FOLDER / "README.md"
    text = page.read_text(encoding="utf-8")
    tables = {"experiment": table}
    if COMPARED.exists():
        tables["outputs repelled"] = compared_table
    if STEPS.exists():
        tables["on one thread"] = steps_table
    for title, made in tables.items():
        text = re.sub(rf"\| {title} .*?\n\n", lambda _: made() + "\n\n", text, flags=re.DOTALL)  # noqa: B023
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
