"""The landscape study over seeds, data sets and networks: intervals instead of one run.

    python -m studies.landscape_seeds.make --device cuda
    python -m studies.landscape_seeds.make --tables

One cell is a case (data set and network) with one seed. Cells are in order of seeds. raw.csv gets
the numbers of a cell when the cell is done, points.csv the points of the figures of seed 0. The
same command goes on where it ended.
"""

import argparse
import csv
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from shoal.data.corruptions import with_corruptions
from shoal.data.sets.image_sets import FASHION, OBJECTS
from shoal.models import MLP, MediumCNN, SmallCNN
from studies import RESULTS
from studies.common import finished, image_arrays, image_set
from studies.landscape_seeds import figures, tables
from studies.landscape_seeds.cell import Case, analysed

FOLDER = RESULTS / "landscape/seeds"
CASES = {
    "cifar10/medium-cnn": (MediumCNN(), 1.6e-3),
    "fashion-mnist/mlp": (MLP(hidden=(200, 200), dropout=0.1), 1e-3),
    "fashion-mnist/small-cnn": (SmallCNN(dropout=0.1), 1e-3),
}
"""Network and first learning rate of every case."""
CLASSES = {"cifar10": OBJECTS, "fashion-mnist": FASHION}


def options() -> argparse.Namespace:
    """The command-line options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--cifar", help="arrays of images; by default CIFAR-10")
    made.add_argument("--fashion", help="arrays of images; by default Fashion-MNIST")
    made.add_argument("--out", type=Path, default=FOLDER, help="the folder of the numbers")
    made.add_argument(
        "--within", type=float, default=1e9, help="start no cell that would end later"
    )
    made.add_argument("--jobs", type=int, default=1)
    made.add_argument("--cases", help="such as fashion-mnist/mlp (default: all)")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--epochs", type=int, default=20)
    made.add_argument("--steps", type=int, default=300, help="training steps of the tunnel")
    made.add_argument("--images", type=int, default=10_000)
    made.add_argument("--validation", type=int, default=2_000)
    made.add_argument("--tested", type=int, default=10_000, help="at most so many test images")
    made.add_argument("--corrupted", type=int, default=2_000)
    made.add_argument("--device", default="cuda")
    made.add_argument("--tables", action="store_true", help="only tables and figures")
    return made.parse_args()


def prepared(name: str, asked: argparse.Namespace) -> Case:
    """The data of a case, with all corruptions at severity 3, and its network."""
    source = name.split("/")[0]
    file = asked.cifar if source == "cifar10" else asked.fashion
    train, test = image_arrays(source, file)
    first, last = asked.images, asked.images + asked.validation

    def made(images: Any, at: slice) -> Any:
        (x, y), (x_test, y_test) = train, images
        parts = (x[:first], y[:first]), (x_test[at], y_test[at])
        return image_set(source, *parts, CLASSES[source], "unit")

    data, few = (made(test, slice(0, count)) for count in (asked.tested, asked.corrupted))
    shifts = with_corruptions(few, severities=(3,)).shifts
    network, lr = CASES[name]
    validation = made(train, slice(first, last)).test
    whole = type(data)(data.name, data.train, data.test, shifts, classes=data.classes)
    return Case(whole, validation, network, lr, asked.epochs, asked.steps)


def _run(name: str, seed: int, asked: argparse.Namespace) -> tuple[list, list, float]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    started = time.monotonic()
    rows, points = analysed(prepared(name, asked), seed, asked.device)
    return rows, points, time.monotonic() - started


def _append(path: Path, titles: tuple[str, ...], rows: list[tuple]) -> None:
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([titles] if new else [])
        writer.writerows([*row[:-1], f"{row[-1]:.6g}"] for row in rows)


def train(asked: argparse.Namespace) -> None:
    """Run the missing cells, and write the numbers of each cell when it is done."""
    begun = time.monotonic()
    done = {(row["case"], row["seed"]) for row in tables.read(asked.out / "raw.csv")}
    names = asked.cases.split(",") if asked.cases else list(CASES)
    missing = [(n, s, asked) for s in range(asked.seeds) for n in names if (n, s) not in done]
    for (name, seed, _), found in finished(missing, _run, asked.jobs, asked.within):
        rows, points, seconds = found
        rows.append(("cost", "", "", "seconds", seconds))
        _append(asked.out / "raw.csv", tables.FIELDS, [(name, seed, *row) for row in rows])
        if seed == 0:
            points = [(name, *point) for point in points]
            _append(asked.out / "points.csv", tables.POINTS, points)
        print(f"{time.monotonic() - begun:.0f} s: {name}, seed {seed}: {seconds:.0f} s", flush=True)


def main() -> None:
    """Train and analyse, then write tables and figures."""
    asked = options()
    asked.out.mkdir(parents=True, exist_ok=True)
    if not asked.tables:
        train(asked)
    tables.write(asked.out)
    figures.write(asked.out)


if __name__ == "__main__":
    main()
