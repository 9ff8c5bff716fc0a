"""Plain ensemble, coupled and separate points of a quarter of each batch, on a part of CIFAR-10.

    python -m studies.forde_coupled --out docs/results/forde/coupled/cifar10.jsonl

Seed after seed, three runs each, until the time is over; the differences are paired by seed. The
corruptions are all nineteen, at severities 1, 3 and 5, on 1,000 test images, scored as one set.
"""

import argparse
import json
import statistics
import time
import warnings

import torch

import shoal
from shoal.data.corruptions import with_corruptions
from shoal.models import Blueprint, registry
from shoal.prediction.statistics import paired_difference
from studies.common import image_arrays, image_set


def options() -> argparse.Namespace:
    """The command-line options."""
    made = argparse.ArgumentParser()
    made.add_argument(
        "--data", help="a file with train_x, train_y, test_x and test_y; by default CIFAR-10"
    )
    made.add_argument("--out", required=True)
    made.add_argument("--within", type=float, default=240)
    made.add_argument("--first", type=int, default=0)
    made.add_argument("--epochs", type=int, default=15)
    made.add_argument("--members", type=int, default=4)
    made.add_argument("--images", type=int, default=10_000)
    made.add_argument("--tested", type=int, default=1_000)
    made.add_argument("--model", default="resnet18")
    made.add_argument("--device", default="cuda")
    return made.parse_args()


def quarter(coupled):
    """Repelled input gradients of a quarter of each batch."""
    return shoal.methods.get("forde", fraction=0.25, coupled=coupled).with_strength(16.0)


METHODS = {"ensemble": "ensemble", "coupled": quarter(True), "separate": quarter(False)}


def images(asked):
    """The first images of CIFAR-10."""
    train, test = image_arrays("cifar10", asked.data)
    (x, y), (x_test, y_test) = train, test
    held = (x_test[: asked.tested], y_test[: asked.tested])
    return image_set("cifar10", (x[: asked.images], y[: asked.images]), held)


def scores(run, split):
    """Accuracy, NLL and ECE on a split."""
    values = shoal.evaluate(shoal.predict(run, split.x), split.y)
    return {name: float(values[name]) for name in ("accuracy", "nll", "ece")}


def trained(asked, data, shifts, method, seed):
    """The scores of one run."""
    build = Blueprint(registry.make(asked.model), data.input_shape, data.outputs)
    ensemble = shoal.Ensemble.init(build, asked.members, seed=seed)
    run = shoal.fit(
        ensemble,
        data,
        method=method,
        seed=seed,
        progress=False,
        epochs=asked.epochs,
        batch_size=128,
        lr=0.1,
        schedule="flat-then-linear",
        prior="flat",
        augment="crop-flip",
        device=asked.device,
        precision="bfloat16" if asked.device == "cuda" else "float32",
        optimizer={"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
    )
    row = scores(run, data.test)
    row |= {f"corrupted_{name}": value for name, value in scores(run, shifts).items()}
    row["seconds_per_epoch"] = statistics.median(
        r["seconds"] for r in run.history[1:] or run.history
    )
    return row | {"losses": run.history[-1]["loss"], "ratio": run.history[-1]["ratio"]}


def print_differences(rows) -> None:
    """Differences of the methods, paired by seed."""
    for name, other in (("coupled", "ensemble"), ("separate", "ensemble"), ("coupled", "separate")):
        for key in ("accuracy", "corrupted_accuracy", "corrupted_nll", "corrupted_ece"):
            first, second = ([r[key] for r in rows if r["method"] == m] for m in (name, other))
            if len(first) > 1:
                print(f"{name} - {other}, {key}: {paired_difference(first, second)}")


def main() -> None:
    """Train seed after seed, and print the differences."""
    warnings.simplefilter("ignore")
    begun, asked = time.monotonic(), options()
    data = images(asked)
    levels = (1, 3, 5) if asked.device == "cuda" else (5,)
    splits = list(with_corruptions(data, severities=levels).shifts.values())
    shifts = shoal.Split(
        torch.cat([s.x.cpu() for s in splits]), torch.cat([s.y.cpu() for s in splits])
    )
    print(f"data ready after {time.monotonic() - begun:.0f} s", flush=True)
    rows, longest, seed = [], 0.0, asked.first
    while time.monotonic() - begun + longest < asked.within and seed < asked.first + 12:
        started = time.monotonic()
        for name, method in METHODS.items():
            row = {"seed": seed, "method": name, **trained(asked, data, shifts, method, seed)}
            rows.append(row)
            with open(asked.out, "a") as file:
                file.write(json.dumps(row, default=float) + "\n")
            print(
                seed,
                name,
                {k: round(v, 4) for k, v in row.items() if isinstance(v, float)},
                flush=True,
            )
        longest, seed = max(longest, time.monotonic() - started), seed + 1
    print_differences(rows)


if __name__ == "__main__":
    main()
