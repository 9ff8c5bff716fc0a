"""UCI regression: nine problems, all published splits, five networks with one hidden layer.

    python -m studies.uci.make settings   candidates for `uci`, on held-out training data
    python -m studies.uci.make strengths  strengths of kde and f-kde, on held-out training data
    python -m studies.uci.make splits     every column on the published splits
    python -m studies.uci.make tables     tables.md and results.png, without training

Rows go to settings.csv, strengths.csv and raw.csv in --out. What is there is not computed again.
Split follows split, and no run starts that would end after --within seconds.
"""

import argparse
import csv
import math
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import shoal
from shoal.experiment.build import make_data, train
from shoal.experiment.config import load_config
from shoal.prediction.metrics.regression import in_units
from studies import RESULTS
from studies.common import finished, read_csv
from studies.uci import tables

FOLDER = RESULTS / "uci"

FILES = {"settings": "settings.csv", "strengths": "strengths.csv", "splits": "raw.csv"}
SPLITS = {"protein": 5}
LARGE = ("kin8nm", "power", "naval", "protein")
CHOICE_SPLITS = 3
STRENGTHS = {"f-kde": (1.0, 10.0, 100.0), "kde": (10.0, 1e3, 1e4)}

# The publication has 100 hidden units for protein. Forty epochs of protein are 16,480 steps.
PROTEIN = ["model.hidden=[100]"]
BEFORE = FOLDER / "before.toml"
LONG = {"uci": ["steps=20000"]}

COLUMNS: dict[str, tuple[str, list[str]]] = {
    "uci": ("uci", []),
    "uci-published": ("uci-published", []),
    "f-kde": ("uci", ["method=f-kde"]),
    "kde": ("uci", ["method=kde"]),
    "lr 0.1": ("uci-published", ["lr=0.1"]),
    "not adversarial": ("uci-published", ["adversarial=none"]),
    "gaussian": ("uci", ["likelihood=heteroscedastic", "lr=0.01", "steps=5000"]),
    "before": ("before", []),
}
"""Config and changes of each column; `before` is `uci` as it was before this study."""

_ADVERSARIAL = "adversarial={epsilon=0.01, relative=true}"
_SMALL = "adversarial={epsilon=0.002, relative=true}"
_HEAVY = "likelihood=student-t"
_STOP = ["validation=0.1", "keep=best"]
CANDIDATES = {
    "lr 0.01 + 40 epochs": ["lr=0.01", "epochs=40"],
    "lr 0.01": ["lr=0.01"],
    "lr 0.03": ["lr=0.03"],
    "lr 0.01 + adversarial": ["lr=0.01", _ADVERSARIAL],
    "lr 0.03 + adversarial": ["lr=0.03", _ADVERSARIAL],
    "lr 0.01 + best epoch": ["lr=0.01", *_STOP],
    "lr 0.03 + best epoch": ["lr=0.03", *_STOP],
    "lr 0.01 + adversarial + best epoch": ["lr=0.01", _ADVERSARIAL, *_STOP],
    "lr 0.03 + adversarial + best epoch": ["lr=0.03", _ADVERSARIAL, *_STOP],
    "lr 0.03 + student-t": ["lr=0.03", _HEAVY],
    "lr 0.03 + student-t + best epoch": ["lr=0.03", _HEAVY, *_STOP],
    "lr 0.03 + student-t + small adversarial": ["lr=0.03", _HEAVY, _SMALL],
}
"""Candidates for `uci`: 3,000 steps of a plain ensemble unless the name has epochs."""


class Cell(NamedTuple):
    """One training."""

    what: str
    problem: str
    split: int
    column: str
    config: str
    changes: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, str]:
        """Trainings of one kind take about the same time."""
        return self.problem, self.column


def cells(asked: argparse.Namespace) -> list[Cell]:
    """All trainings of the study, split after split."""
    found = []
    for split in range(asked.seeds):
        for problem in asked.problems.split(","):
            splits = _splits(asked.what, problem)
            if split < splits:
                found += _columns(asked, problem, split)
    return found


def _splits(what: str, problem: str) -> int:
    """Splits of a problem; a held-out tenth of a large problem tells enough by itself."""
    if what == "splits":
        return SPLITS.get(problem, 20)
    return 1 if what == "strengths" and problem in LARGE else CHOICE_SPLITS


def _columns(asked: argparse.Namespace, problem: str, split: int) -> list[Cell]:
    wide = PROTEIN if problem == "protein" else []
    if asked.what == "settings":
        made = {
            name: ("before", ["method=ensemble", "steps=3000", *changes])
            for name, changes in CANDIDATES.items()
        }
    elif asked.what == "strengths":
        made = {
            f"{method} {strength:g}": ("uci", [f"method={method}", f"strength={strength}"])
            for method, candidates in STRENGTHS.items()
            for strength in candidates
        }
    else:
        known = tables.strengths(*dict.fromkeys([FOLDER, asked.out]))
        made = dict(COLUMNS)
        for method in ("f-kde", "kde"):
            config, changes = made[method]
            chosen = known.get((problem, method))
            if chosen is None:
                made.pop(method)
            else:
                made[method] = config, [*changes, f"strength={chosen}"]
    names = list(made) if asked.columns is None else asked.columns.split(",")
    result = []
    for name in names:
        if name in made:
            config, changes = made[name]
            long = LONG.get(config, []) if wide and "epochs=40" not in changes else []
            all_changes = (*wide, *changes, *long, *asked.set)
            result.append(Cell(asked.what, problem, split, name, config, all_changes))
    return result


def trained(cell: Cell, device: str) -> dict[str, Any]:
    """Scores of one training, on held-out training data or on the test set."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    data_changes = [f"data.problem={cell.problem}", f"data.split={cell.split}"]
    source = BEFORE if cell.config == "before" else cell.config
    config = load_config(source, [*data_changes, *cell.changes, f"device={device}"])
    data = make_data(config)
    judged = data.test
    if cell.what != "splits":
        held = [f"data.validation={round(0.1 * len(data.train))}", f"data.seed={cell.split}"]
        config = load_config(source, [*data_changes, *cell.changes, *held, f"device={device}"])
        data = make_data(config)
        judged = data.validation
    start = time.perf_counter()
    run = train(config, data, None, progress=False)
    seconds = time.perf_counter() - start
    assert judged is not None and data.scaling is not None
    pred = in_units(shoal.predict(run, judged.x, device="cpu"), data.scaling)
    y = data.scaling.original(judged.y.double())
    found = shoal.evaluate(pred, y)
    return {
        "problem": cell.problem,
        "split": cell.split,
        "column": cell.column,
        "strength": "" if config.strength is None else config.strength,
        "rmse": found["rmse"],
        "nll": found["nll"],
        "gaussian_nll": gaussian_nll(pred, y),
        "coverage_90": found["coverage_90"],
        "seconds": round(seconds, 2),
        "device": device,
    }


def gaussian_nll(pred: shoal.Predictive, y: torch.Tensor) -> float:
    """NLL of one Gaussian with mean and variance of the mixture, as in the publication."""
    mean, variance = pred.mean.double().flatten().cpu(), pred.variance.double().flatten().cpu()
    square = (y.squeeze(-1) if y.ndim > 1 else y).cpu() - mean
    return float((square**2 / variance + variance.log() + math.log(2 * math.pi)).mean() / 2)


class Results:
    """A CSV file that grows by a row after every training."""

    def __init__(self, path: Path, known: Path) -> None:
        self.path = path
        rows = [
            row for each in dict.fromkeys([known, path]) for row in read_csv(each, missing_ok=True)
        ]
        self.done = {(row["problem"], int(row["split"]), row["column"]) for row in rows}

    def add(self, row: dict[str, Any]) -> None:
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if new:
                writer.writeheader()
            writer.writerow(row)


def run(asked: argparse.Namespace) -> None:
    """Train what is missing, in several processes, as long as there is time."""
    asked.out.mkdir(parents=True, exist_ok=True)
    results = Results(asked.out / FILES[asked.what], FOLDER / FILES[asked.what])
    left = [c for c in cells(asked) if (c.problem, c.split, c.column) not in results.done]
    tasks = [(cell, asked.device) for cell in left]
    for (cell, _), row in finished(
        tasks, trained, asked.jobs, asked.within, kind=lambda task: task[0].kind
    ):
        results.add(row)
        words = cell.problem, cell.split, cell.column, f"{row['rmse']:.4g}", f"{row['nll']:.4g}"
        print(*words, f"{row['seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=[*FILES, "tables"])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=20, help="number of splits")
    parser.add_argument("--problems", default=",".join(tables.PUBLISHED))
    parser.add_argument("--columns", help="names of columns, with commas between them")
    parser.add_argument("--set", action="append", default=[], help="a change of every config")
    asked = parser.parse_args()
    np.seterr(all="raise", under="ignore")
    if asked.what == "tables":
        tables.write(FOLDER)
    else:
        run(asked)


if __name__ == "__main__":
    main()
