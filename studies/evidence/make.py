"""Evidence of ensembles, with seeds: python -m studies.evidence.make --jobs 2

Every cell is one ensemble: data, method and seed. It is trained, its evidence is computed, and its
rows are appended to raw.csv. Cells that are already there are not computed again. `--tables` writes
tables.md and the figures from raw.csv and prior.csv alone.
"""

import argparse
import csv
import itertools
import math
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import shoal
from shoal.analysis.evidence.members import log_likelihoods, modules_of
from shoal.analysis.evidence.prior_comparison import PriorComparison
from shoal.data.dataset import Split
from shoal.inference.posterior import as_points
from shoal.models import MLP, Blueprint
from shoal.prediction.metrics.similarity import affinity, effective_number
from shoal.prediction.predict import member_outputs
from studies import RESULTS
from studies.common import finished, read_csv
from studies.evidence.tables import METHODS, spearman, write

FOLDER = RESULTS / "evidence"

FIELDS = ("data", "method", "seed", "metric", "value")
MEMBERS, SUBSET = 10, 3
TEST = 5000
KEYS = ("train_x", "train_y", "test_x", "test_y")
UCI = ("concrete", "energy", "yacht")
ALL = {"digits": 1e9, "mnist": 2000, "heads": 1e9}
"""Training points of the curvature."""


class Cell(NamedTuple):
    """One ensemble, or one exact integral."""

    data: str
    method: str
    seed: int


class Task(NamedTuple):
    """A data set, a function that builds one network, and the options of `fit`."""

    data: shoal.data.Dataset
    build: Any
    options: dict[str, Any]


def cells(seeds: int) -> Iterator[Cell]:
    """All cells; a seed is complete before the next one begins."""
    for seed in range(seeds):
        yield Cell("toy-regression", "ensemble", seed)
        for name in ("linear", "logistic"):
            yield from (Cell(f"exact {name}, N = {n}", "ensemble", seed) for n in (20, 200))
        for data in ("mnist", "heads", "digits", *(f"uci-{name}" for name in UCI)):
            yield from (Cell(data, method, seed) for method in METHODS)


def task(name: str, seed: int, quick: bool) -> Task:
    """Data, network and training of a problem; `quick` only checks that everything runs."""
    if name == "digits":
        data = shoal.data.load({"name": "digits"})
        settings = {"lr": 1e-3, "epochs": 1 if quick else 60, "batch_size": 128}
        return Task(data, _mlp(data, (100, 100), 10), settings)
    if name == "mnist":
        data = _images("mnist", 300 if quick else 10_000)
        settings = {"lr": 1e-3, "epochs": 1 if quick else 10, "schedule": "cosine"}
        return Task(data, _mlp(data, (100, 100, 100), 10), settings | {"batch_size": 128})
    if name == "heads":
        return _heads(seed, quick)
    if name == "toy-regression":
        data = shoal.data.load({"name": "toy-regression"})
        settings = {"lr": 1e-2, "epochs": 2 if quick else 500, "schedule": "cosine"}
        settings |= {"likelihood": shoal.likelihoods.Gaussian(0.25), "batch_size": 30}
        return Task(data, _mlp(data, (50, 50), 1), settings)
    data = shoal.data.load({"name": "uci", "problem": name.removeprefix("uci-"), "split": seed})
    settings = {"lr": 1e-2, "epochs": 1 if quick else 40, "schedule": "cosine", "batch_size": 100}
    return Task(data, _mlp(data, (50,), 2), settings | {"likelihood": "heteroscedastic"})


def _images(name: str, count: int) -> shoal.data.Dataset:
    """The first images of a set and its first 5,000 test images, from IMAGES where it is given."""
    if "IMAGES" not in os.environ:
        found = shoal.data.load({"name": name, "subset": count, "ood": []})
        assert found.test is not None and found.test.y is not None
        return replace(found, test=Split(found.test.x[:TEST], found.test.y[:TEST]), shifts={})
    with np.load(os.environ["IMAGES"]) as file:
        arrays = {key: torch.from_numpy(file[f"{name}_{key}"]) for key in KEYS}
    x, y, test_x, test_y = (arrays[key] for key in KEYS)
    pixels = [(images[:, None].float() / 255) for images in (x[:count], test_x)]
    return shoal.data.Dataset(
        name, Split(pixels[0], y[:count].long()), test=Split(pixels[1], test_y.long())
    )


def _mlp(data: Any, hidden: tuple[int, ...], outputs: int) -> Blueprint:
    return Blueprint(MLP(hidden), data.input_shape, outputs)


def _heads(seed: int, quick: bool) -> Task:
    """Last layers for MNIST on a perceptron that was trained on Fashion-MNIST."""
    data = _images("fashion-mnist", 300 if quick else 10_000)
    one = shoal.Ensemble.init(_mlp(data, (100, 100), 10), members=1, seed=seed)
    shoal.fit(one, data, method="ensemble", epochs=1 if quick else 5, seed=seed, progress=False)
    data = _images("mnist", 300 if quick else 2000)
    build = shoal.adapters.last_layer(one.member(0))
    return Task(data, build, {"lr": 1e-2, "epochs": 1 if quick else 40, "schedule": "cosine"})


def compute(cell: Cell, out: str, quick: bool) -> list[list[Any]]:
    """Rows of a cell."""
    torch.set_num_threads(1)
    start = time.time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shoal.ShoalWarning)
        if cell.data.startswith("exact"):
            from studies.evidence.exact import differences

            found = differences(cell.data, cell.seed)
        else:
            found = _trained(cell, Path(out), quick)
    found["seconds"] = time.time() - start
    return [[*cell, metric, f"{value:.10g}"] for metric, value in found.items()]


def _trained(cell: Cell, out: Path, quick: bool) -> dict[str, float]:
    data, build, options = task(cell.data, cell.seed, quick)
    ensemble = shoal.Ensemble.init(build, members=MEMBERS, seed=cell.seed)
    how = options | METHODS[cell.method] | {"seed": cell.seed, "progress": False}
    run = shoal.fit(ensemble, data, **how)
    if cell.data == "toy-regression":
        from studies.evidence.priors import write_draws

        return write_draws(run, data, out, cell.seed)
    plain = cell.method == "ensemble"
    points = int(min(ALL.get(cell.data, 1e9), len(data.train)))
    steps = 5 if quick else 200
    found = shoal.evidence(run, data, priors=plain, points=points, flow_steps=steps)
    rows = _point_masses(found) | _scores(run, data)
    for prior in found.learned_priors:
        rows |= _prior(f"prior/{prior.name}", prior)
    if plain and len(data.train) > 500:  # few_points.py has the former estimate beside this one
        for prior in _few_points(run, data, 500):
            rows |= _prior(f"prior, curvature of 500 points/{prior.name}", prior)
    rows["flow missing"] = float(plain and len(found.missing) > 0)
    return rows


def _few_points(run: Any, data: Any, points: int) -> list[Any]:
    """Gaussians on the last layer, with the curvature of few training points."""
    train = Split(data.train.x.double(), double(data.train.y))
    modules = modules_of(run.ensemble, range(run.ensemble.members))
    found = log_likelihoods(run, data.train)
    return PriorComparison(modules, run.likelihood, train, None, found, points).last_layer()


def double(y: Tensor) -> Tensor:
    return y.double() if y.is_floating_point() else y


def _prior(name: str, prior: Any) -> dict[str, float]:
    found = {
        f"{name}/log evidence": prior.log_evidence,
        f"{name}/NLL": prior.nll,
        f"{name}/NLL by evidence": prior.nll_posterior,
    }
    return found | {f"{name}/width of {layer}": width for layer, width in prior.scales.items()}


def _point_masses(found: Any) -> dict[str, float]:
    rows = {
        "points": found.points,
        "log evidence": found.log_evidence,
        "best log likelihood": found.upper,
        "range of log likelihoods": found.spread,
        "ties": found.ties,
        "half temperature": found.half_temperature,
        "distinct members": found.distinct,
        "largest gradient": max(found.gradient_norms),
    }
    for name, weighting in found.weightings.items():
        rows[f"weights/{name}/effective"] = weighting.effective
        rows[f"weights/{name}/NLL"] = weighting.nll
        rows[f"weights/{name}/total variation"] = weighting.total_variation
    return {name: float(value) for name, value in rows.items()}


def _scores(run: Any, data: Any) -> dict[str, float]:
    """Diversity and test NLL of all members, and their correlation over subsets of members."""
    outputs = member_outputs(run.ensemble, data.test).double()
    outputs, y = as_points(run.likelihood, outputs, data.test.y)
    pred = shoal.Predictive(outputs, run.likelihood)
    each = run.likelihood.log_prob(outputs, double(y))
    S = affinity(pred)

    def nll(chosen: list[int]) -> float:
        return -float((each[chosen].logsumexp(0) - math.log(len(chosen))).mean())

    single = -each.mean(1)
    subsets = [list(some) for some in itertools.combinations(range(len(each)), SUBSET)]
    diversity = [effective_number(S[some][:, some]) for some in subsets]
    losses = [nll(some) for some in subsets]
    means = [float(single[some].mean()) for some in subsets]
    return {
        "test NLL": nll(list(range(len(each)))),
        "mean member NLL": float(single.mean()),
        "effective functions": effective_number(S),
        "subsets/correlation": spearman(diversity, losses),
        "subsets/correlation, equal members": partial(diversity, losses, means),
    }


def partial(a: Any, b: Any, given: Any) -> float:
    """Rank correlation of a and b with a third quantity held fixed."""
    ab, ac, bc = spearman(a, b), spearman(a, given), spearman(b, given)
    rest = (1 - ac**2) * (1 - bc**2)
    return (ab - ac * bc) / math.sqrt(rest) if rest > 1e-12 else math.nan


def main() -> None:
    """Compute missing cells, or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--within", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="only the CPU is used"
    )
    parser.add_argument("--only", default="", help="only cells whose data start so")
    parser.add_argument("--quick", action="store_true", help="check that everything runs")
    parser.add_argument("--data", help="npz file of images, if the data sets are not whole")
    parser.add_argument("--tables", action="store_true")
    asked = parser.parse_args()
    if asked.tables:
        return write(asked.out)
    if asked.data:
        os.environ["IMAGES"] = str(Path(asked.data).absolute())
    asked.out.mkdir(parents=True, exist_ok=True)
    _compute_missing(asked)


def _compute_missing(asked: argparse.Namespace) -> None:
    raw = asked.out / "raw.csv"
    if not raw.exists():
        raw.write_text(",".join(FIELDS) + "\n")
    done = {Cell(r["data"], r["method"], int(r["seed"])) for r in read_csv(raw)}
    todo = [c for c in cells(asked.seeds) if c not in done and c.data.startswith(asked.only)]
    tasks = [(cell, str(asked.out), asked.quick) for cell in todo]
    for (cell, *_), rows in finished(
        tasks, compute, asked.jobs, asked.within, kind=lambda task: task[0][:2]
    ):
        with raw.open("a") as lines:
            csv.writer(lines, lineterminator="\n").writerows(rows)
        print(f"{cell}: {float(rows[-1][-1]):.0f} s", flush=True)


if __name__ == "__main__":
    main()
