"""The sampled ensembles of bde on the small problems; appends to bde.csv.

    pip install sklearn-contrib-bde
    python -m studies.uci.bde_runs --data uci_regression.npz --splits 3 --within 600

Settings are those of the README of bde 1.0.2, with one hidden layer of 50 and five members, as in
the other columns. bde needs JAX and does not import shoal.
"""

# Libraries of this study alone.
# pyright: reportMissingImports=false

import argparse
import csv
import math
import time
from pathlib import Path

import numpy as np
from bde import BdeRegressor
from bde.loss import GaussianNLL

from studies import RESULTS

PLACE = RESULTS / "uci/bde.csv"
PROBLEMS = ("yacht", "boston", "energy", "concrete", "wine")


def scores(arrays, split: int) -> dict[str, float]:
    """Scores of one training in the units of the targets."""
    x, y, test = arrays
    held = test[split]
    centre, scale = x[~held].mean(0), x[~held].std(0)
    middle, unit = y[~held].mean(), y[~held].std()
    x = (x - centre) / np.where(scale > 0, scale, 1)
    z = (y - middle) / unit
    model = BdeRegressor(
        hidden_layers=[50], n_members=5, seed=split, loss=GaussianNLL(), epochs=200,
        validation_split=0.15, lr=1e-3, weight_decay=1e-4, warmup_steps=5000, n_samples=2000,
        n_thinning=2, patience=10,
    )  # fmt: skip
    start = time.perf_counter()
    model.fit(x=x[~held], y=z[~held][:, None])
    seconds = time.perf_counter() - start
    raw = np.asarray(model.predict(x[held], raw=True), np.float64)
    raw = raw.reshape(-1, *raw.shape[2:])
    mean, std = raw[..., 0], np.logaddexp(0, raw[..., 1]) + 1e-6
    return _scores(mean, std, z[held], float(unit)) | {"seconds": round(seconds, 1)}


def _scores(mean, std, z, unit: float) -> dict[str, float]:
    """RMSE and NLL of the mixture over all draws [draws, points]."""
    log_prob = -0.5 * ((z - mean) / std) ** 2 - np.log(std) - 0.5 * math.log(2 * math.pi)
    mixture = np.logaddexp.reduce(log_prob, 0) - math.log(len(log_prob))
    return {
        "rmse": unit * float(np.sqrt(np.mean((z - mean.mean(0)) ** 2))),
        "nll": math.log(unit) - float(mixture.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds")
    parser.add_argument("--out", type=Path, default=PLACE)
    asked = parser.parse_args()
    held = np.load(asked.data)
    done = set()
    if asked.out.exists():
        with asked.out.open(newline="") as file:
            done = {(row["problem"], int(row["split"])) for row in csv.DictReader(file)}
    end = time.monotonic() + asked.within
    for split in range(asked.splits):
        for problem in PROBLEMS:
            if (problem, split) in done or time.monotonic() > end:
                continue
            arrays = [held[f"{problem}_{name}"] for name in ("x", "y", "test")]
            row = {"problem": problem, "split": split, "column": "bde", **scores(arrays, split)}
            new = not asked.out.exists()
            with asked.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, row)
                if new:
                    writer.writeheader()
                writer.writerow(row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
