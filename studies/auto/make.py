"""The grid from which the rule of `strength="auto"` was chosen.

    python -m studies.auto.make --jobs 2                       the sets of the design
    python -m studies.auto.make --sets notmnist,kin8nm         other sets
    python -m studies.auto.make --controller                   targets of a controller
    python -m studies.auto.make --target                       one target, on the other sets
    python -m studies.auto.make --own-batches                  plain members, own batches
    python -m studies.auto.make --own-grid                     all candidates, own batches
    python -m studies.auto.make --trunk                        candidates that differ late
    python -m studies.auto.rules                               rules, tables and the figure

For each set and seed, every arm (a method at a strength) is trained three times: for an eighth and
for a third of the steps on four fifths of the training data, judged by the held-out fifth, and in
full on all training data, judged by the test data. Every rule that chooses by the short runs can
then be computed from raw.csv, with the result that `fit` would have had (rules.py).
Rows are appended after every set and seed; the same command goes on where it ended.
"""

import argparse
import csv
import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shoal
from shoal.core.errors import ShoalError
from shoal.core.random import generator
from shoal.prediction.metrics.detection import auroc
from studies import RESULTS
from studies.auto.controller import TARGETS, Controlled, Controller, train
from studies.auto.problems import ALL, CHEAP, DESIGN, SCIKIT_LEARN, Problem, problem
from studies.common import finished, read_csv

FOLDER = RESULTS / "auto"

MEMBERS, HELD = 10, 0.2
STAGES = {"0.125": 1 / 8, "0.333": 1 / 3, "1": 1.0}
"""Lengths of training, as shares of the steps; only the last one has all training data."""
TRUNKS = ("0.5@0.6", "1@0.8")
"""Length of a training on the data that are not held out, and the share after which arms differ."""
ARMS = (
    "ensemble",
    *(f"kde:{s}" for s in ("1", "100", "1e3", "1e4", "1e5")),
    *(f"f-kde:{s}" for s in ("1", "10", "100", "1e3")),
    *(f"forde:{s}" for s in ("1", "4", "16", "64")),
    "kde:calibrated",
)
CONTROLLED = ("ensemble", *(f"{m}@{t}" for m in ("kde", "f-kde") for t in TARGETS))
"""A method at a force ratio that a controller keeps."""
TARGET = ("ensemble", "kde@0.03")
"""The target that was best on `CHEAP`, without a search."""
CANDIDATES = ("ensemble", "kde:1e3", "forde:4", "forde:16")
"""The candidates of `method="auto"`."""
OWN = "+own-batches"
TESTED = ("nll", "accuracy", "rmse", "ece", "shifted_nll", "shifted_accuracy", "shifted_rmse",
          "auroc", "auroc_mi")  # fmt: skip
CHOSEN_BY = ("held_nll", "held_shifted", "clean_diff", "clean_se", "shift_diff", "shift_se")
FIELDS = ("set", "seed", "arm", "stage", "seconds", "ratio", *CHOSEN_BY, *TESTED)
"""Columns of the rows; those of a controller also have the strength at the end."""


def shifted_copies(x: Tensor, spread: Tensor, seed: int) -> list[Tensor]:
    """Mild shifts: noise; for images also a translation, less contrast and a blur."""
    noise = torch.randn(x.shape, generator=generator(seed, "shifts")).to(x)
    found = [x + 0.3 * spread * noise]
    if x.ndim == 4 and min(x.shape[2:]) >= 8:
        way = max(1, round(0.1 * x.shape[-1]))
        mean = x.mean((1, 2, 3), keepdim=True)
        found += [
            x.roll((way, -way), (2, 3)),
            mean + 0.7 * (x - mean),
            torch.nn.functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
        ]
    return found


def spread_of(x: Tensor) -> Tensor:
    """Standard deviation of each column, or of each channel of images."""
    axes = (0,) if x.ndim == 2 else (0, *range(2, x.ndim))
    return x.std(axes, keepdim=True)


@dataclass(frozen=True)
class Late:
    """No repulsion before a share of the steps."""

    after: float
    of: str = "push"

    def __call__(self, step: int, steps: int) -> float:
        """Factor of the push."""
        return float(step >= round(self.after * steps))


@dataclass
class Cell:
    """One set and seed: its data, and how an arm is trained and scored."""

    name: str
    seed: int
    of: Problem
    device: str
    arms: tuple[str, ...] = ARMS
    stages: tuple[str, ...] = tuple(STAGES)

    def __post_init__(self) -> None:
        n = len(self.of.x)
        order = torch.randperm(n, generator=generator(self.seed, "validation"))
        held, kept = order[: round(HELD * n)], order[round(HELD * n) :]
        self.part = self.of.x[kept], self.of.y[kept]
        copies = shifted_copies(self.of.x[held], spread_of(self.part[0]), self.seed)
        self.held = [self.of.x[held], *copies], self.of.y[held]

    def fit(self, arm: str, stage: str) -> shoal.Run | Controlled:
        """Train an arm for a share of the steps."""
        method, _, word = arm.removesuffix(OWN).partition(":")
        method, _, target = method.partition("@")
        calibrated = word == "calibrated"
        options = dict(self.of.options)
        length, _, trunk = stage.partition("@")
        share = STAGES.get(length) or float(length)
        x, y = (self.of.x, self.of.y) if stage == "1" else self.part
        batches = math.ceil(len(self.of.x) / options["batch_size"])
        steps = max(1, round(share * options.pop("epochs") * batches))
        ensemble = shoal.Ensemble.init(self.of.build, MEMBERS, seed=self.seed)
        if target:
            controller = Controller(float(target))
            options |= {"steps": steps, "seed": self.seed}
            return train(ensemble, (x, y), method, controller, **options)
        if arm.endswith(OWN):
            options["batches"] = "own"
        if trunk and method != "ensemble":
            options["annealing"] = Late(float(trunk))
        return shoal.fit(
            ensemble, (x, y), method=method, calibrated=calibrated,
            strength=float(word) if word and not calibrated else None, steps=steps,
            seed=self.seed, device=self.device, progress=False, **options,
        )  # fmt: skip

    def held_scores(self, run: Any) -> tuple[Tensor, Tensor]:
        """NLL of every held-out point: clean, and mean over the shifted copies."""
        copies, y = self.held
        nll = torch.stack([-shoal.predict(run, x).log_prob(y).flatten().cpu() for x in copies])
        return nll[0].double(), nll[1:].mean(0).double()

    def rows(self) -> list[dict[str, Any]]:
        """One row for each arm and stage."""
        found = []
        for stage in self.stages:
            plain: tuple[Tensor, Tensor] | None = None
            for arm in self.arms:
                row: dict[str, Any] = dict.fromkeys(FIELDS, math.nan)
                row |= {"set": self.name, "seed": self.seed, "arm": arm, "stage": stage}
                started = time.monotonic()
                try:
                    run = self.fit(arm, stage)
                    row |= {"seconds": time.monotonic() - started}
                    row["ratio"] = run.history[-1].get("ratio") or 0.0
                    row["strength"] = run.history[-1].get("strength")
                    if stage == "1":
                        row |= self.tested(run)
                    else:
                        scores = self.held_scores(run)
                        plain = plain or scores
                        row |= compared(scores, plain)
                except ShoalError:  # all members diverged
                    row |= {"seconds": time.monotonic() - started}
                found.append(row)
        return found

    def tested(self, run: Any) -> dict[str, float]:
        """Scores on the test data: clean, under shift, and beside OOD inputs."""
        x, y = self.of.test
        clean, shifted = shoal.predict(run, x), shoal.predict(run, self.of.shifted[0])
        ood = shoal.predict(run, self.of.ood)
        found = {k: float(v) for k, v in shoal.evaluate(clean, y).items() if k in TESTED}
        moved = shoal.evaluate(shifted, self.of.shifted[1])
        found |= {f"shifted_{k}": float(v) for k, v in moved.items() if f"shifted_{k}" in TESTED}
        if clean.task == "classification":
            found["auroc"] = auroc(clean.entropy(), ood.entropy())
            found["auroc_mi"] = auroc(clean.mutual_information(), ood.mutual_information())
        else:
            found["auroc"] = auroc(clean.stddev.flatten(), ood.stddev.flatten())
            found["auroc_mi"] = auroc(*(p.member_means.std(0).flatten() for p in (clean, ood)))
        return found


def compared(mine: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Mean scores, and paired differences to the plain ensemble with standard errors."""
    found = {"held_nll": float(mine[0].mean()), "held_shifted": float(mine[1].mean())}
    for key, own, other in zip(("clean", "shift"), mine, plain, strict=True):
        difference = own - other
        found[f"{key}_diff"] = float(difference.mean())
        found[f"{key}_se"] = float(difference.std() / math.sqrt(len(difference)))
    return found


def work(name: str, seed: int, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one set and seed, in a process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    images = np.load(asked.data) if asked.data else None
    of = problem(name, seed, images)
    return Cell(name, seed, of, asked.device, asked.arms, asked.stages).rows()


def options() -> argparse.Namespace:
    """The command-line options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--sets")
    made.add_argument("--arms", help="the plain ensemble comes first")
    made.add_argument("--controller", action="store_true", help="targets of a controller")
    made.add_argument("--target", action="store_true", help="one target, without a search")
    made.add_argument("--own-batches", action="store_true", help="plain members, own batches")
    made.add_argument("--own-grid", action="store_true", help="all candidates, own batches")
    made.add_argument("--trunk", action="store_true", help="candidates that differ late")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--jobs", type=int, default=1)
    made.add_argument("--device", default="cpu")
    made.add_argument("--data", help="a file with the arrays of images")
    made.add_argument(
        "--within", type=float, default=1e9, help="start no cell that would end later"
    )
    made.add_argument("--out", type=Path)
    asked = made.parse_args()
    name, sets, arms, stages = "raw.csv", DESIGN, ARMS, tuple(STAGES)
    if asked.controller:
        name, sets, arms = "controller.csv", CHEAP, CONTROLLED
    elif asked.target:
        sets = [n for n in ALL if n not in CHEAP]
        name, arms, stages = "target.csv", TARGET, ("1",)
    elif asked.own_batches:
        name, sets, arms, stages = "own-batches.csv", ALL, (CANDIDATES[0] + OWN,), ("1",)
    elif asked.own_grid:
        name, sets, arms = "own-grid.csv", ALL, tuple(arm + OWN for arm in CANDIDATES)
    elif asked.trunk:
        name, sets, arms, stages = "trunk.csv", (*CHEAP, *SCIKIT_LEARN), CANDIDATES, TRUNKS
    asked.out = asked.out or FOLDER / name
    asked.sets = asked.sets.split(",") if asked.sets else sets
    asked.arms = tuple(asked.arms.split(",")) if asked.arms else arms
    asked.stages = stages
    return asked


def main() -> None:
    """Train what is missing, and write the rows of every set and seed."""
    asked = options()
    rows: list[dict[str, Any]] = [*read_csv(asked.out, missing_ok=True)]
    done = {(row["set"], int(row["seed"])) for row in rows}
    tasks = [
        (name, seed, asked)
        for seed in range(asked.seeds)
        for name in asked.sets
        if (name, seed) not in done
    ]
    columns = (*FIELDS, "strength") if asked.controller or asked.target else FIELDS
    for (name, seed, *_), found in finished(
        tasks, work, asked.jobs, asked.within, kind=lambda task: task[0]
    ):
        rows += found
        with open(asked.out, "w", newline="") as file:
            writer = csv.DictWriter(file, list[str](columns), extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{name} {seed}: {sum(float(row['seconds']) for row in found):.0f} s", flush=True)


if __name__ == "__main__":
    main()
