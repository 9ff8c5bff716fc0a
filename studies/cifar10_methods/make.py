"""Every method of two papers on repulsive ensembles, on a part of CIFAR-10 with ResNet32.

    python -m studies.cifar10_methods.make --device cuda
    python -m studies.cifar10_methods.make --small     a small CNN, for a CPU: ../small
    python -m studies.cifar10_methods.make --tables

Group after group and seed after seed, one run per arm, until the time is over. `arms.py` explains
the words of the arms. `validation_nll` is that of images that neither train nor judge: `--small`
chooses strengths by it, in runs of another seed. The corruptions are all nineteen, at severities
1, 3 and 5, scored as one set. SVHN is the OOD set. Writes raw.csv after every run, and tables.md
and figures at the end. The same command goes on where it ended.
"""

import argparse
import csv
import json
import math
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import shoal
from shoal.analysis.landscape.averaging import multiswag
from shoal.analysis.landscape.scene import Scene
from shoal.core.errors import DataError
from shoal.data.batches.augment import CropFlip
from shoal.data.corruptions import with_corruptions
from shoal.data.files.raw import RAW
from shoal.evaluation.inspection import attention_maps, gradient_similarity
from shoal.models import Blueprint, registry
from shoal.prediction.metrics.detection import auroc
from shoal.prediction.metrics.similarity import pairwise_disagreement
from shoal.prediction.predictive import Predictive
from studies import RESULTS
from studies.cifar10_methods import hyper, tables
from studies.cifar10_methods.arms import SIZES, Arm, named, parsed, settings
from studies.common import finished, image_arrays, image_set, test_of

FOLDER = RESULTS / "cifar10/methods"
GROUPS = (
    ("ensemble", "kde", "f-kde", "svgd", "f-svgd", "sge", "ssge", "f-sge", "f-ssge", "forde",
     "forde:FORDE", "kde:KDE", "f-kde:F-KDE"),
    ("ensemble+members=11", "forde-identity:FORDE", "kde+laplace:KDE", "ensemble+adversarial"),
    ("forde-tuned:FORDE", "forde-dct:FORDE", "ensemble+swag", "ensemble+empcov",
     "kde+hyperbolic:KDE"),
    ("kde+calibrated", "lit:LIT", "kde+linear-kernel:KDE", "hyper", "ensemble+nodes",
     "ensemble+own-batches"),
    tuple(arm for pair in SIZES.values() for arm in pair),
)  # fmt: skip
"""Arms by importance: all seeds of a group come before the next group."""
SMALL = {
    "out": FOLDER.parent / "small", "device": "cpu", "seeds": 10, "choose": True,
    "model": '{"name": "small-cnn", "channels": [16]}', "pool": 4, "images": 2_000,
    "validation": 1_000, "skip": 1_000, "tested": 1_000, "corrupted": 40, "epochs": 3,
    "batch": 50, "lr": 5e-3, "plain_images": True,
}  # fmt: skip
"""Options of the study that a CPU can afford."""
COMPARED = 128
"""Test images on which input gradients and class-activation maps are compared."""
FIELDS = (
    "method", "seed", "accuracy", "nll", "ece", "corrupted_accuracy", "corrupted_nll",
    "corrupted_ece", "auroc_entropy", "auroc_mutual_information", "validation_nll", "ratio",
    "seconds", "noise_accuracy", "other_accuracy", "disagreement", "gradient_cosine",
    "h2_first", "h2_last", "h2_least", "h2_most", "jobs",
)  # fmt: skip
"""Columns of every network; `cam_SIZE` stands beside, for each size that its maps have."""


def options() -> argparse.Namespace:
    """The command-line options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--data", help="arrays of images; by default CIFAR-10 and SVHN")
    made.add_argument("--out", type=Path, default=FOLDER, help="the folder of the numbers")
    made.add_argument("--within", type=float, default=1e9, help="start no run that would end later")
    made.add_argument("--jobs", type=int, default=1, help="processes; times are fair with one")
    made.add_argument("--arms", help="such as ensemble,forde:16 (default: all)")
    made.add_argument("--small", action="store_true", help="the study of ../small")
    made.add_argument("--choose", action="store_true", help="choose strengths, by other seeds")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--first", type=int, default=0, help="the first seed")
    made.add_argument("--epochs", type=int, default=20)
    made.add_argument("--members", type=int, default=5)
    made.add_argument("--images", type=int, default=10_000)
    made.add_argument("--validation", type=int, default=2_000)
    made.add_argument("--tested", type=int, default=2_000)
    made.add_argument("--corrupted", type=int, default=500)
    made.add_argument("--skip", type=int, default=0, help="test images that are left out")
    made.add_argument("--pool", type=int, default=1, help="average squares of so many pixels")
    made.add_argument("--plain-images", action="store_true", help="no crops, no mirror images")
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--lr", type=float, default=1e-3)
    made.add_argument("--model", default="resnet32", help="a name, or a table as JSON")
    made.add_argument("--device", default="cuda")
    made.add_argument("--tables", action="store_true", help="only tables and figures")
    if made.parse_known_args()[0].small:
        made.set_defaults(**SMALL)
    return made.parse_args()


class Study:
    """The data, and how a run is trained and scored."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        train, test = image_arrays("cifar10", asked.data)
        others = RAW["svhn"]("test")[0] if asked.data is None else np.load(asked.data)["ood_x"]
        first, last = asked.images, asked.images + asked.validation
        judged = slice(asked.skip, asked.skip + asked.tested)
        full = self._set(train, slice(0, first), test, judged)
        self.data = replace(full, train=self._pooled(full.train), test=self._pooled(full.test))
        held = self._set(train, slice(0, first), train, slice(first, last)).test
        self.validation = self._pooled(held)
        some = slice(asked.skip, asked.skip + asked.corrupted)
        few = self._set(train, slice(0, first), test, some)
        splits = with_corruptions(few, severities=(1, 3, 5)).shifts
        parts = [(name, split.x.cpu(), split.y.cpu()) for name, split in splits.items()]
        x, y = (torch.cat(tensors) for tensors in ([p[1] for p in parts], [p[2] for p in parts]))
        self.shifts = self._pooled(shoal.Split(x, y))
        self.noisy = torch.cat([torch.full((len(y),), "noise" in name) for name, _, y in parts])
        labels = np.zeros(len(others), dtype=np.int64)
        whole = slice(0, asked.tested)
        self.others = self._pooled(self._set(train, slice(0, first), (others, labels), whole).test)

    def _set(self, train: Any, some: slice, test: Any, tested: slice) -> shoal.Dataset:
        """Images in the scale of the training images."""
        (x, y), (x_test, y_test) = train, test
        return image_set("cifar10", (x[some], y[some]), (x_test[tested], y_test[tested]))

    def _pooled(self, split: Any) -> Any:
        """A split with images of fewer pixels: averages over squares."""
        return replace(split, x=F.avg_pool2d(split.x, self.asked.pool))

    def row(self, word: str, seed: int) -> dict[str, Any]:
        """Train an ensemble and score it."""
        clock = time.process_time if self.asked.device == "cpu" else time.monotonic
        started, arm = clock(), parsed(word)
        found: dict[str, Any] = dict.fromkeys(FIELDS, math.nan)
        found |= {"method": word, "seed": seed, "jobs": self.asked.jobs}
        if arm.method == "hyper":
            predict = hyper.selected(self._start, self._fit, self.validation, seed, self.asked)
            return found | {"seconds": clock() - started} | self._scores(predict)
        with tempfile.TemporaryDirectory() as folder:
            try:
                run = self._trained(arm, seed, Path(folder))
            except DataError:  # all members diverged
                return found
            found["seconds"] = clock() - started
            predict = self._predictor(run, arm)
        return found | self._scores(predict) | _force(run) | self._diversity(run)

    def _trained(self, arm: Arm, seed: int, folder: Path) -> shoal.Run:
        asked, changes = self.asked, settings(arm, self.data, self.asked.device)
        if "swag" in arm.changes:
            changes |= {"out": folder / "run", "keep_every": 1}
        members = int(arm.changes.get("members") or asked.members)
        model = _model(asked)
        if "nodes" in arm.changes:
            model = {"name": "batch-ensemble", "network": model, "factors": "normal"}
        return self._fit(self._start(model, members, seed), seed, **changes)

    def _start(self, model: Any, members: int, seed: int) -> shoal.Ensemble:
        build = Blueprint(registry.make(model), self.data.input_shape, self.data.outputs)
        return shoal.Ensemble.init(build, members, seed=seed)

    def _fit(self, start: shoal.Ensemble, seed: int, **changes: Any) -> shoal.Run:
        asked = self.asked
        common = {
            "epochs": asked.epochs, "batch_size": asked.batch, "lr": asked.lr, "clip": 5.0,
            "schedule": "flat-then-linear",
            "augment": None if asked.plain_images else CropFlip(4 // asked.pool),
            "precision": "bfloat16" if asked.device == "cuda" else "float32",
        }  # fmt: skip
        return shoal.fit(
            start, self.data, seed=seed, progress=False, device=asked.device, **(common | changes),
        )  # fmt: skip

    def _predictor(self, run: shoal.Run, arm: Arm) -> Callable[[Tensor], Predictive]:
        if "swag" not in arm.changes:
            return lambda x: shoal.predict(run, x)
        modes = Scene(run, self.data).modes
        return lambda x: multiswag(modes, x, 5)

    def _scores(self, predict: Callable[[Tensor], Predictive]) -> dict[str, float]:
        tested = test_of(self.data)
        test, shifted = predict(tested.x), predict(self.shifts.x)
        found = _scores(test, tested.y)
        under = _scores(shifted, self.shifts.y)
        found |= {f"corrupted_{key}": value for key, value in under.items()}
        right = (shifted.probs.argmax(-1).cpu() == self.shifts.y).double()
        found["noise_accuracy"] = float(right[self.noisy].mean())
        found["other_accuracy"] = float(right[~self.noisy].mean())
        other = predict(self.others.x)
        for key in ("entropy", "mutual_information"):
            found[f"auroc_{key}"] = auroc(*(getattr(each, key)() for each in (test, other)))
        held = _scores(predict(self.validation.x), self.validation.y)
        apart = pairwise_disagreement(test)
        return found | {"validation_nll": held["nll"], "disagreement": _between(apart)}

    def _diversity(self, run: shoal.Run) -> dict[str, float]:
        """Similarity of input gradients, and diversity of class-activation maps by depth."""
        test = test_of(self.data)
        x, y = test.x[:COMPARED], test.y[:COMPARED]
        maps = attention_maps(run.ensemble, x, y).diversity
        cosine = gradient_similarity(run.ensemble, x, y, run.likelihood)
        found = {f"cam_{size[0]}": value for size, value in maps.items()}
        return found | {"gradient_cosine": _between(cosine)}


def _model(asked: argparse.Namespace) -> Any:
    return json.loads(asked.model) if asked.model.startswith("{") else asked.model


def _scores(predictive: Any, y: Tensor) -> dict[str, float]:
    found = shoal.evaluate(predictive, y)
    return {name: float(found[name]) for name in ("accuracy", "nll", "ece")}


def _between(matrix: Tensor) -> float:
    """Mean over pairs of different members."""
    M = len(matrix)
    return float((matrix.sum() - matrix.diagonal().sum()) / (M * (M - 1)))


def _force(run: shoal.Run) -> dict[str, float]:
    """The last force ratio, and the squared bandwidth over training."""
    widths = [row["h2"] for row in run.history if row["h2"] is not None] or [math.nan]
    found = {"h2_first": widths[0], "h2_last": widths[-1]}
    found |= {"h2_least": min(widths), "h2_most": max(widths)}
    return found | {"ratio": run.history[-1]["ratio"]}


_study: Study | None = None


def _prepare(asked: argparse.Namespace) -> None:
    """Load the data once per process."""
    global _study
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if platform.machine() == "aarch64":  # oneDNN has only slow convolutions there
        torch.backends.mkldnn.set_flags(False)
    _study = Study(asked)


def _run(word: str, seed: int) -> dict[str, Any]:
    assert _study is not None, "_prepare ran first"
    return _study.row(word, seed)


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows."""
    with open(folder / "raw.csv", "w", newline="") as file:
        names = [*FIELDS, *tables.maps(rows)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def train(
    asked: argparse.Namespace, rows: list[dict[str, Any]], cells: list[tuple[str, int]]
) -> None:
    """Train what is missing of these arms and seeds, and write the rows after every run."""
    begun = time.monotonic()
    done = {(row["method"], row["seed"]) for row in rows}
    missing = [cell for cell in cells if cell not in done]
    for (word, seed), row in finished(missing, _run, asked.jobs, asked.within, _prepare, (asked,)):
        rows.append(row)
        print(f"{time.monotonic() - begun:.0f} s: {word} {seed}: NLL {row['nll']:.4f}, "
              f"corrupted {row['corrupted_nll']:.4f}", flush=True)  # fmt: skip
        write(asked.out, rows)


def main() -> None:
    """Train, then write tables and figures."""
    asked = options()
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = tables.read(asked.out / "raw.csv")
    if not asked.tables:
        if asked.choose:
            train(asked, rows, [(word, tables.CHOOSING) for word in tables.CANDIDATES])
        groups = (asked.arms.split(","),) if asked.arms else GROUPS
        seeds = range(asked.first, asked.first + asked.seeds)
        order = [(word, seed) for group in groups for seed in seeds for word in group]
        strengths = tables.strengths(rows)
        train(asked, rows, [(named(word, strengths), seed) for word, seed in order])
    tables.write(asked.out, rows)


if __name__ == "__main__":
    main()
