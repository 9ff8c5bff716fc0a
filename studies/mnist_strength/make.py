"""Strengths on MNIST, chosen on held-out training images and judged on test and OOD images.

    python -m studies.mnist_strength.make --device cuda --jobs 8
    python -m studies.mnist_strength.make --tables

The first 2,000 training images are held out, and the next 18,000 train. Letters (NotMNIST), clothes
(Fashion-MNIST) and characters (KMNIST) are OOD sets. Four methods at seven strengths come with
what the published study compares: six estimators, the Laplace kernel and adversarial training.
raw.csv has a row per run, seed after seed. The same command goes on where it ended.
"""

import argparse
import csv
import itertools
import math
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import shoal
from shoal.core.errors import DataError
from shoal.core.random import generator
from shoal.data.files.raw import RAW
from shoal.data.sets.image_sets import rotated_flipped, rotated_shifts
from shoal.data.sets.images import as_pixels
from shoal.interaction.kernels import Fixed, Laplace
from shoal.interaction.methods import METHODS
from shoal.models import Blueprint, registry
from shoal.prediction.metrics.calibration import accuracy_confidence
from shoal.prediction.metrics.detection import auroc
from studies import RESULTS
from studies.common import finished, read_csv
from studies.mnist_strength.tables import write

FOLDER = RESULTS / "mnist/strength"

SWEPT = ("kde", "f-kde", "svgd", "f-svgd")
STRENGTHS = ("100", "1000", "10000", "100000", "1000000")
ESTIMATORS = ("ensemble", "kde", "sge", "ssge", "svgd", "f-kde", "f-sge", "f-ssge", "f-svgd")
EXTRA = ("kde+laplace", "ensemble+adversarial")
PUBLISHED = tuple(f"published/{n}" for n in ("ensemble", "kde", "kde+laplace", "f-kde")) + (
    "published/ensemble+adversarial",
)
OTHERS = {"letters": "notmnist", "clothes": "fashion-mnist", "characters": "kmnist"}
THRESHOLDS = [i / 10 for i in range(10)]
BINS, SHOWN, HELD, NOISE = 24, 8, 2_000, 0.2
OURS = {"lr": 1e-3, "schedule": "cosine"}
THEIRS = {
    "legacy": True, "lr": 1e-2, "schedule": {"name": "stairs", "flights": 15, "factor": 0.8},
    "prior": {"name": "gaussian", "std": 0.5}, "annealing": {"name": "constant", "gamma": 0.01},
}  # fmt: skip
KDE = METHODS["kde"].repulsion
assert KDE is not None
LAPLACE = replace(KDE, kernel=Laplace())


class Cell(NamedTuple):
    """One run."""

    method: str
    members: int
    seed: int


def cells(seeds: int, only: str | None) -> list[Cell]:
    """Every run, seed after seed; sizes 9 and 13 are for the figure of the first seed."""
    if only:
        pairs = [word.rsplit("/", 1) for word in only.split(",")]
        return [Cell(name, int(size), seed) for seed in range(seeds) for name, size in pairs]
    made = []
    strong = [f"{name}:{strength}" for name, strength in itertools.product(SWEPT, STRENGTHS)]
    for seed in range(seeds):
        made.append(Cell("ensemble", 1, seed))
        for members in (17, 5):
            names = (*ESTIMATORS, *strong, *EXTRA, *PUBLISHED)
            made += [Cell(name, members, seed) for name in names]
        if seed == 0:
            made += [Cell(n, m, seed) for m, n in itertools.product((9, 13), ESTIMATORS)]
    return made


def settings(name: str) -> dict[str, Any]:
    """The arguments of `fit` for a method's name."""
    published = name.startswith("published/")
    word, _, strength = name.removeprefix("published/").partition(":")
    found: dict[str, Any] = dict(THEIRS if published else OURS)
    found["method"] = word.split("+")[0]
    if word == "kde+laplace":  # the published kernel has the fixed length 100
        found["method"] = replace(LAPLACE, bandwidth=Fixed(h2=1e4)) if published else LAPLACE
        found["legacy"] = False  # the composition says it all
    if word.endswith("+own"):
        found["batches"] = "own"
    if word == "ensemble+adversarial":
        found["adversarial"] = {"epsilon": 0.001, "shared": True} if published else 0.01
    return found | ({"strength": float(strength)} if strength else {})


def arrays(images: int) -> dict[str, np.ndarray]:
    """Images and labels as bytes: the first training images, all test and OOD images."""
    found = {"train": RAW["mnist"]("train"), "test": RAW["mnist"]("test")}
    some = {"train": images or None, "test": None}
    both = [(f"{n}_x", x[: some[n]]) for n, (x, _) in found.items()]
    both += [(f"{n}_y", y[: some[n]]) for n, (_, y) in found.items()]
    return dict(both) | {word: RAW[name]("test")[0] for word, name in OTHERS.items()}


class Study:
    """The images, and how a run is trained and scored."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        found = arrays(asked.images) if asked.data is None else np.load(asked.data)
        train, test = ((found[f"{name}_x"], found[f"{name}_y"]) for name in ("train", "test"))
        x, y = as_pixels(train[0]), torch.from_numpy(train[1].astype("int64"))
        self.train, held = (x[HELD:], y[HELD:]), x[:HELD]
        noise = torch.randn(held.shape, generator=generator(0, "strength", "noise"))
        self.images = {
            "test": as_pixels(test[0]),
            "rotated": rotated_shifts(test, (30,), 0)["rotated-30"].x,
            "turned": rotated_flipped(test, 0).x,
            "held": held,
            "noisy": held + NOISE * noise,
            "shuffled": shuffled(held),
        } | {word: as_pixels(found[word]) for word in OTHERS}
        self.labels = {"test": torch.from_numpy(test[1].astype("int64")), "held": y[:HELD]}

    def row(self, cell: Cell) -> dict[str, Any]:
        """Train an ensemble and score it."""
        started = time.monotonic()
        signed = cell.method.startswith("published/")
        scale = (lambda x: 2 * x - 1) if signed else (lambda x: x)
        try:
            run = self._trained(cell, scale)
        except DataError:  # all members diverged
            return cell._asdict() | {"diverged": 1}
        seconds = time.monotonic() - started
        found = {name: shoal.predict(run, scale(x)) for name, x in self.images.items()}
        row: dict[str, Any] = cell._asdict() | {"diverged": 0, "seconds": round(seconds, 2)}
        row["ratio"] = run.history[-1]["ratio"]
        for name, of in (("test", "test"), ("rotated", "test"), ("turned", "test"),
                         ("held", "held"), ("noisy", "held")):  # fmt: skip
            scores = shoal.evaluate(found[name], self.labels[of])
            row |= {f"{name}_{key}": float(scores[key]) for key in ("accuracy", "nll", "ece")}
        for word, name in (("shuffled", "held"), *((word, "test") for word in OTHERS)):
            for key in ("entropy", "mutual_information"):
                pair = (getattr(found[each], key)() for each in (name, word))
                row[f"auroc_{key}_{word}"] = auroc(*pair)
        return {k: _short(v) for k, v in row.items()} | self._lists(found)

    def _lists(self, found: dict[str, Any]) -> dict[str, str]:
        """What the figures need: histograms, curves, and the images with extreme disagreement."""
        lists: dict[str, Any] = {}
        for name in ("test", "letters"):
            entropy = found[name].entropy().cpu().double()
            lists[f"{name}_entropy"] = torch.histc(entropy, BINS, 0, math.log(10)).int().tolist()
            order = found[name].disagreement().cpu().argsort()
            lists[f"{name}_low"], lists[f"{name}_high"] = order[:SHOWN], order.flip(0)[:SHOWN]
        for name in ("test", "turned"):
            curve = accuracy_confidence(found[name], self.labels["test"], THRESHOLDS)
            lists[f"{name}_above"], lists[f"{name}_kept"] = curve.accuracy, curve.retained
        return {k: " ".join(_short(float(v)) for v in values) for k, values in lists.items()}

    def _trained(self, cell: Cell, scale: Any) -> shoal.Run:
        network = registry.make({"name": "mlp", "hidden": [100, 100, 100]})
        built = Blueprint(network, self.train[0].shape[1:], 10)
        ensemble = shoal.Ensemble.init(built, cell.members, seed=cell.seed)
        return shoal.fit(
            ensemble, (scale(self.train[0]), self.train[1]), epochs=self.asked.epochs,
            batch_size=128, seed=cell.seed, progress=False, device=self.asked.device,
            **settings(cell.method),
        )  # fmt: skip


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def shuffled(x: torch.Tensor) -> torch.Tensor:
    """The sixteen patches of every image in a random order: OOD images that cost no data."""
    patches = x.unfold(2, 7, 7).unfold(3, 7, 7).flatten(2, 3).squeeze(1)
    order = torch.rand(patches.shape[:2], generator=generator(0, "strength", "patches")).argsort(1)
    mixed = patches[torch.arange(len(x))[:, None], order].unflatten(1, (4, 4))
    return mixed.transpose(2, 3).reshape(x.shape)


_study: Study | None = None


def _prepare(asked: argparse.Namespace) -> None:
    """Load the images once per process."""
    global _study
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _study = Study(asked)


def _run(*cell: Any) -> dict[str, Any]:
    assert _study is not None, "_prepare ran first"
    return _study.row(Cell(*cell))


def train(asked: argparse.Namespace) -> None:
    """Train what is missing; a row is written after every run."""
    path = asked.out / "raw.csv"
    rows: list[dict[str, Any]] = [*read_csv(path, missing_ok=True)]
    done = {(row["method"], int(row["members"]), int(row["seed"])) for row in rows}
    missing = [cell for cell in cells(asked.seeds, asked.only) if cell not in done][: asked.first]
    for _, row in finished(missing, _run, asked.jobs, asked.within, _prepare, (asked,)):
        rows.append(row)
        print(row["method"], row["members"], row["seed"], row.get("seconds"), flush=True)
        columns = max(rows, key=len)  # a diverged run has fewer
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(rows)


def main() -> None:
    """Train, pack the images, or make the tables and figures from the rows."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, default=FOLDER, help="the folder of the numbers")
    made.add_argument("--within", type=float, default=1e9, help="start no run that would end later")
    made.add_argument("--jobs", type=int, default=2)
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--epochs", type=int, default=15)
    made.add_argument("--images", type=int, default=20_000, help="training images; 0 for all")
    made.add_argument("--first", type=int, default=None, help="only so many runs")
    made.add_argument("--only", help="methods and sizes, such as kde:1000/5,ensemble+own/5")
    made.add_argument("--device", default="cuda")
    made.add_argument("--data", help="the images of --pack; by default the data sets")
    made.add_argument("--pack", type=Path, help="write the images into a file, train nothing")
    made.add_argument("--tables", action="store_true", help="no training")
    asked = made.parse_args()
    if asked.pack:
        np.savez_compressed(asked.pack, **arrays(asked.images))  # type: ignore[arg-type]
    elif asked.tables:
        write(asked.out)
    else:
        asked.out.mkdir(parents=True, exist_ok=True)
        train(asked)


if __name__ == "__main__":
    main()
