"""Every method of the paper on repulsive ensembles, on a part of CIFAR-10 with ResNet32.

    python docs/results/cifar10/methods/make.py --device cuda

Seed after seed, one run per method, until the time is over. `validation_nll` is that of images that
neither train nor judge: a strength is chosen by it.
The corruptions are all nineteen, at severities 1, 3 and 5, scored as one set. SVHN is the OOD set.
Writes raw.csv after every run, and tables.md at the end. The same command goes on where it ended.
"""

import argparse
import csv
import itertools
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoal
from shoal.core.errors import DataError
from shoal.core.text import markdown_table
from shoal.data.corruptions import with_corruptions
from shoal.data.image_sets import OBJECTS, image_dataset
from shoal.data.raw import RAW
from shoal.models import Blueprint, registry
from shoal.prediction.detection import auroc
from shoal.prediction.statistics import paired_difference

HERE = Path(__file__).resolve().parent
PUBLISHED = (
    "ensemble",
    "kde",
    "f-kde",
    "svgd",
    "f-svgd",
    "sge",
    "ssge",
    "f-sge",
    "f-ssge",
    "forde",
)
STRONGER = ("forde:16", "kde:1000", "f-kde:30")
SCORES = ("accuracy", "nll", "ece", "corrupted_accuracy", "corrupted_nll", "corrupted_ece",
          "auroc_entropy", "auroc_mutual_information")  # fmt: skip


def options() -> argparse.Namespace:
    """The command-line options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument(
        "--data",
        help="arrays of images; by default CIFAR-10 and SVHN",
    )
    made.add_argument("--out", type=Path, default=HERE, help="the folder of the numbers")
    made.add_argument("--within", type=float, default=1e9, help="start no run that would end later")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, default=20)
    made.add_argument("--members", type=int, default=5)
    made.add_argument("--images", type=int, default=10_000)
    made.add_argument("--validation", type=int, default=2_000)
    made.add_argument("--tested", type=int, default=2_000)
    made.add_argument("--corrupted", type=int, default=500)
    made.add_argument("--model", default="resnet32")
    made.add_argument("--device", default="cuda")
    return made.parse_args()


class Study:
    """The data, and how a run is trained and scored."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        if asked.data is None:
            train, test = (RAW["cifar10"](split) for split in ("train", "test"))
            others = RAW["svhn"]("test")[0]
        else:
            held = np.load(asked.data)
            train, test = ((held[f"{name}_x"], held[f"{name}_y"]) for name in ("train", "test"))
            others = held["ood_x"]
        first, last = asked.images, asked.images + asked.validation
        self.data = self._set(train, slice(0, first), test, slice(0, asked.tested))
        self.validation = self._set(train, slice(0, first), train, slice(first, last)).test
        few = self._set(train, slice(0, first), test, slice(0, asked.corrupted))
        splits = list(with_corruptions(few, severities=(1, 3, 5)).shifts.values())
        self.shifts = shoal.Split(*(torch.cat([getattr(s, n).cpu() for s in splits]) for n in "xy"))
        labels = np.zeros(len(others), dtype=np.int64)
        whole = slice(0, asked.tested)
        self.others = self._set(train, slice(0, first), (others, labels), whole).test

    def _set(self, train: Any, some: slice, test: Any, tested: slice) -> shoal.Dataset:
        """Images in the scale of the training images."""
        parts = [(x[at], y[at].astype(np.int64)) for (x, y), at in ((train, some), (test, tested))]
        return image_dataset("cifar10", OBJECTS, *parts, {}, None, 0, "standard", ())

    def row(self, name: str, seed: int) -> dict[str, Any]:
        """Train an ensemble and score it."""
        started, found = time.monotonic(), {"method": name, "seed": seed}
        try:
            run = self._trained(name, seed)
        except DataError:  # all members diverged
            names = (*SCORES, "validation_nll", "ratio", "seconds")
            return found | dict.fromkeys(names, math.nan)
        seconds = time.monotonic() - started
        test = shoal.predict(run, self.data.test.x)
        found |= _scores(test, self.data.test.y)
        shifted = _scores(shoal.predict(run, self.shifts.x), self.shifts.y)
        found |= {f"corrupted_{key}": value for key, value in shifted.items()}
        other = shoal.predict(run, self.others.x)
        for key in ("entropy", "mutual_information"):
            found[f"auroc_{key}"] = auroc(*(getattr(each, key)() for each in (test, other)))
        held = _scores(shoal.predict(run, self.validation.x), self.validation.y)
        last = run.history[-1]
        return found | {"validation_nll": held["nll"], "ratio": last["ratio"], "seconds": seconds}

    def _trained(self, name: str, seed: int) -> shoal.Run:
        asked = self.asked
        build = Blueprint(registry.make(asked.model), self.data.input_shape, self.data.outputs)
        ensemble = shoal.Ensemble.init(build, asked.members, seed=seed)
        method, _, strength = name.partition(":")
        return shoal.fit(
            ensemble, self.data, method=method, strength=float(strength) if strength else None,
            seed=seed, progress=False, epochs=asked.epochs, batch_size=128, lr=1e-3, clip=5.0,
            schedule="flat-then-linear", augment="crop-flip", device=asked.device,
            precision="bfloat16" if asked.device == "cuda" else "float32",
        )  # fmt: skip


def _scores(predictive: Any, y: torch.Tensor) -> dict[str, float]:
    found = shoal.evaluate(predictive, y)
    return {name: float(found[name]) for name in ("accuracy", "nll", "ece")}


def tables(rows: list[dict[str, Any]]) -> str:
    """Means, and differences to the plain ensemble with 95 % intervals, paired by seed."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    plain = {row["seed"]: row for row in rows if row["method"] == "ensemble"}
    cells = []
    for name in names:
        mine = [row for row in rows if row["method"] == name and row["seed"] in plain]
        if any(math.isnan(row["nll"]) for row in mine):
            cells.append([f"`{name}`", "diverged", *("" for _ in SCORES)])
            continue
        cells.append([f"`{name}`", str(len(mine)), *(_cell(mine, plain, key) for key in SCORES)])
    return markdown_table(["", "seeds", *(key.replace("_", " ") for key in SCORES)], cells)


def _cell(mine: list[dict[str, Any]], plain: dict[int, dict[str, Any]], key: str) -> str:
    factor, digits = (100, 2) if key.endswith("accuracy") else (1, 3)
    values = [factor * row[key] for row in mine]
    mean = f"{sum(values) / len(values):.{digits}f}"
    if mine[0]["method"] == "ensemble" or len(mine) < 2:
        return mean
    found = paired_difference(values, [factor * plain[row["seed"]][key] for row in mine])
    change, low, high = (f"{value:+.{digits}f}" for value in found)
    return f"{mean} ({change}, {low} to {high})"


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of earlier calls."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [
            {k: v if k == "method" else int(v) if k == "seed" else float(v) for k, v in r.items()}
            for r in csv.DictReader(file)
        ]


def main() -> None:
    """Train what is missing, and write the rows after every run."""
    warnings.simplefilter("ignore")
    asked, begun = options(), time.monotonic()
    study, rows = Study(asked), read(asked.out / "raw.csv")
    done, longest = {(row["method"], row["seed"]) for row in rows}, 0.0
    for seed, name in itertools.product(range(asked.seeds), (*PUBLISHED, *STRONGER)):
        started = time.monotonic()
        if (name, seed) in done or started - begun + longest > asked.within:
            continue
        rows.append(study.row(name, seed))
        say = {k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}
        print(say, flush=True)
        with open(asked.out / "raw.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        longest = max(longest, time.monotonic() - started)
    (asked.out / "tables.md").write_text(tables(rows))
    print(tables(rows))


if __name__ == "__main__":
    main()
