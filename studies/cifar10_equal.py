"""The headline at equal cost: plain ResNet18 with batches of their own, as many as `forde` costs.

    python -m studies.cifar10_equal --device cuda --runs FOLDER    trains; the same command resumes
    python -m studies.decided                                      the tables, from the CSV files

The training is that of `studies.cifar10`. A pilot times one epoch of five plain members and of
five members of `forde:16`, in the same process. The plain ensemble then gets so many members that
its step is at least as long. One run serves two arms: its first five members are the plain
ensemble with own batches, all of them are the ensemble of equal cost. The other arms are the
stored runs of docs/results/cifar10, with the same seeds.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import shoal
from shoal.core.storage.files import write_json
from shoal.evaluation.evaluate import corrupted_means
from shoal.experiment.build import make_data, train
from shoal.experiment.config import load_config
from shoal.experiment.grid import resident
from shoal.prediction.predictive import Predictive
from studies import RESULTS
from studies.common import append_rows, read_csv, test_of

FOLDER = RESULTS / "cifar10" / "equal-cost"
SCORES = ("accuracy", "nll", "ece")


def options() -> argparse.Namespace:
    """The command-line options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--seeds", default="0,1,2,3")
    made.add_argument("--epochs", type=int, default=36)
    made.add_argument("--members", type=int, default=5, help="members of the dearer method")
    made.add_argument("--device", default="cuda")
    made.add_argument("--runs", type=Path, default=Path("runs/cifar10-equal"))
    made.add_argument("--out", type=Path, default=FOLDER)
    made.add_argument("--within", type=float, default=math.inf, help="start no run after seconds")
    made.add_argument("--quick", action="store_true", help="digits: a short test")
    return made.parse_args()


def configured(asked: argparse.Namespace, seed: int, *changes: str) -> Any:
    """The config of one run."""
    source = "digits-forde" if asked.quick else "cifar10-forde"
    shifts = '{name="digits", corruptions="all", severities=[1, 5]}'
    data = f"data={shifts}" if asked.quick else "data.ood=[]"
    common = (data, "save_every=1e9", f"seed={seed}", f"device={asked.device}")
    return load_config(source, [*common, *changes])


def pilot(asked: argparse.Namespace, data: shoal.Dataset) -> dict[str, Any]:
    """Seconds of an epoch by method, and the number of plain members that cost as much."""
    found = {}
    for name in ("ensemble", "forde"):
        config = configured(asked, 0, f"method={name}", f"members={asked.members}", "epochs=4")
        run = train(config, data, asked.runs / f"pilot-{name}", resume=False, progress=False)
        found[name] = min(row["seconds"] for row in run.history[1:])
    members = math.ceil(asked.members * found["forde"] / found["ensemble"])
    return {"seconds_an_epoch": found, "members": members}


def row(asked: argparse.Namespace, seed: int, members: int, data: shoal.Dataset) -> list[list[Any]]:
    """Train one ensemble, and score its first members and all of them."""
    changes = ("method=ensemble", f"members={members}", "batches=own", f"epochs={asked.epochs}")
    config = configured(asked, seed, *changes)
    run = train(config, data, asked.runs / f"m{members}-s{seed}", resume=True, progress=False)
    sizes = (asked.members, members)
    found: dict[int, dict[str, Any]] = {size: {} for size in sizes}
    for name, split in {"": test_of(data), **data.shifts}.items():
        outputs = shoal.predict(run, split.x)
        for size in sizes:
            few = Predictive(outputs.members[:size], outputs.likelihood)
            found[size][name] = shoal.evaluate(few, split.y)
    seconds = sum(entry["seconds"] for entry in run.history)
    lines = []
    for size, scores in found.items():
        clean, shifted = scores.pop(""), corrupted_means(scores)["all"]
        noise = corrupted_means({k: v for k, v in scores.items() if "noise" in k})["all"]
        cells = [part[key] for part in (clean, shifted) for key in SCORES] + [noise["accuracy"]]
        lines.append(["ensemble+batches=own", size, seed, seconds, *map(float, cells)])
    return lines


HEADER = ["method", "members", "seed", "seconds", *(f"test.{key}" for key in SCORES),
          *(f"corrupted.all.{key}" for key in SCORES), "noise.accuracy"]  # fmt: skip


def main() -> None:
    """Train what is missing; a row per arm and seed."""
    asked, begun = options(), time.monotonic()
    asked.out.mkdir(parents=True, exist_ok=True)
    data = resident(make_data(configured(asked, 0)), asked.device)
    timed, path = asked.out / "pilot.json", asked.out / "results.csv"
    if not timed.exists():
        write_json(timed, pilot(asked, data))
    members = json.loads(timed.read_text())["members"]
    done = {int(r["seed"]) for r in read_csv(path, missing_ok=True)}
    for seed in map(int, asked.seeds.split(",")):
        if seed not in done and time.monotonic() - begun <= asked.within:
            append_rows(path, HEADER, row(asked, seed, members, data))
            print(f"{time.monotonic() - begun:.0f} s: seed {seed}", flush=True)


if __name__ == "__main__":
    main()
