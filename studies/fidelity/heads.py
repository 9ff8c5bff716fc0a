"""Certificates of last layers on digits: python -m studies.fidelity.heads --jobs 5

For each seed, one perceptron is trained on half of the digits. Twenty last layers of each method
are trained on the other half. `shoal.fidelity` measures their distances to the posterior by NUTS.
Rows are appended to heads.csv; seeds that are already there are left out. `--tables` prints the
table of README.md.
"""

import argparse
import csv
import math
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.core.display.text import markdown_table
from shoal.data.dataset import Split
from shoal.models import MLP, Blueprint
from shoal.prediction.statistics import mean_and_error, paired_difference
from studies import RESULTS
from studies.common import finished, read_csv

FOLDER = RESULTS / "fidelity"

MEMBERS = 20
SHOWN = ("frechet/on", "frechet/off", "tv/on", "tv/off", "weights/sliced", "weights/mmd")


def certificate(seed: int, quick: bool) -> list[list[Any]]:
    """Rows of one seed: method, distance and value."""
    torch.set_num_threads(1)
    os.environ["JAX_PLATFORMS"] = "cpu"
    data = shoal.data.load({"name": "digits"})
    x, y = data.train.x, data.train.y
    assert y is not None
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    first, second = (Split(x[half], y[half]) for half in order.chunk(2))
    build = Blueprint(MLP((50, 16)), data.input_shape, 10)
    how = {"method": "ensemble", "seed": seed, "progress": False, "lr": 1e-2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shoal.ShoalWarning)
        whole = replace(data, train=first)
        one = shoal.Ensemble.init(build, members=1, seed=seed)
        shoal.fit(one, whole, epochs=2 if quick else 60, **how)
        heads = shoal.adapters.last_layer(one.member(0))
        rest = replace(data, train=second)
        ensemble = shoal.Ensemble.init(heads, members=MEMBERS, seed=seed)
        run = shoal.fit(ensemble, rest, epochs=2 if quick else 200, schedule="cosine", **how)
        methods = ["ensemble"] if quick else list(METHODS)
        found = shoal.fidelity(run, rest, methods=methods, draws=100 if quick else 1000, seed=seed)
    rows = [[seed, "NUTS", k, v] for k, v in found.reference.items() if not isinstance(v, str)]
    for method, distances in found.distances.items():
        rows += [[seed, method, name, f"{value:.6g}"] for name, value in distances.items()]
    return rows


METHODS = (
    "ensemble", "kde", "svgd", "f-kde", "f-svgd",
    "kde:calibrated", "svgd:calibrated", "f-kde:calibrated", "f-svgd:calibrated",
)  # fmt: skip


def tables(path: Path) -> str:
    """Mean ± standard error of each distance, and the difference to the plain ensemble."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in read_csv(path):
        by_method = found.setdefault(row["method"], {}).setdefault(row["distance"], {})
        by_method[int(row["seed"])] = float(row["value"])
    quality = found.pop("NUTS")
    rows, plain = [], found["ensemble"]["frechet/on"]
    for method, distances in found.items():
        cells = []
        for name in SHOWN:
            mean, error = mean_and_error(list(distances[name].values()))
            cells.append(f"{mean:.3f} ± {error:.3f}" if math.isfinite(error) else f"{mean:.3f}")
        own = distances["frechet/on"]
        seeds = sorted(own.keys() & plain.keys())
        change = paired_difference([own[s] for s in seeds], [plain[s] for s in seeds])
        words = f"{change.difference:+.3f} ({change.low:+.3f} to {change.high:+.3f})"
        rows.append([method, *cells, "" if method == "ensemble" else words])
    header = ["method", *SHOWN, "frechet/on minus ensemble (95 %)"]
    worst, fewest = max(quality["rhat"].values()), min(quality["effective"].values())
    seeds = len(quality["rhat"])
    divergences = sum(quality["divergences"].values())
    note = f"{seeds} seeds; largest R-hat {worst:.4f}, at least {fewest:.0f} effective draws, "
    return f"{markdown_table(header, rows)}\n\n{note}{divergences:.0f} divergences."


def main() -> None:
    """Compute missing seeds, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="check that everything runs")
    parser.add_argument("--tables", action="store_true")
    asked = parser.parse_args()
    path = asked.out / "heads.csv"
    if asked.tables:
        return print(tables(path))
    asked.out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_text("seed,method,distance,value\n")
    done = {int(row["seed"]) for row in read_csv(path)}
    todo = [(seed, asked.quick) for seed in range(asked.seeds) if seed not in done]
    for (seed, _), rows in finished(todo, certificate, asked.jobs, math.inf):
        with path.open("a") as lines:
            csv.writer(lines, lineterminator="\n").writerows(rows)
        print(f"seed {seed} done", flush=True)


if __name__ == "__main__":
    main()
