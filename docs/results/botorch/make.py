"""Bayesian optimisation with an ensemble, beside a Gaussian process; writes README.md.

python docs/results/botorch/make.py [--seeds 3] [--steps 15] [--budget SECONDS]
"""

import argparse
import json
import time
import warnings
from pathlib import Path

import torch
from botorch.acquisition import qLogExpectedImprovement
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.optim import optimize_acqf
from botorch.test_functions import Branin, Hartmann
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import nn

import shoal
from shoal.inference.likelihoods import Gaussian
from shoal.integrations.botorch import EnsembleSurrogate
from shoal.prediction.statistics import mean_and_error, paired_difference, t_quantile

HERE = Path(__file__).parent
START = 10
FUNCTIONS = {"Branin": Branin(negate=True), "Hartmann6": Hartmann(dim=6, negate=True)}
NAMES = {"ensemble": "ensemble, f-kde", "gp": "Gaussian process", "random": "random points"}
SETTINGS = {"members": 8, "steps": 300, "lr": 0.01, "noise_std": 0.05}


def ensemble_model(x, y):
    """Members that differ in initialisation and repel each other's functions."""

    def build():
        d = x.shape[1]
        return nn.Sequential(
            nn.Linear(d, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    ensemble = shoal.Ensemble.init(build, members=SETTINGS["members"], seed=len(x))
    run = shoal.fit(
        ensemble,
        (x.float(), y.float()),
        method="f-kde",
        likelihood=Gaussian(SETTINGS["noise_std"]),
        steps=SETTINGS["steps"],
        lr=SETTINGS["lr"],
        batch_size=128,
        progress=False,
    )
    return EnsembleSurrogate(run)


def gp_model(x, y):
    """BoTorch's default Gaussian process."""
    model = SingleTaskGP(x, y.unsqueeze(1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def optimise(name: str, method: str, seed: int, steps: int) -> list[float]:
    """Best value so far after every evaluation; inputs are scaled to the unit cube."""
    function = FUNCTIONS[name]
    low, high = function.bounds.double()
    torch.manual_seed(seed)
    x = torch.rand(START, function.dim, dtype=torch.float64)
    cube = torch.stack([torch.zeros(function.dim), torch.ones(function.dim)]).double()

    def value(points):
        return function(low + (high - low) * points).double()

    y = value(x)
    for _ in range(steps):
        if method == "random":
            new = torch.rand(1, function.dim, dtype=torch.float64)
        else:
            scaled = (y - y.mean()) / y.std()
            model = (ensemble_model if method == "ensemble" else gp_model)(x, scaled)
            acquisition = qLogExpectedImprovement(model, best_f=scaled.max())
            how = {"num_restarts": 4, "raw_samples": 64, "options": {"maxiter": 50}}
            new, _ = optimize_acqf(acquisition, cube, q=1, **how)
        x = torch.cat([x, new])
        y = torch.cat([y, value(new)])
    return y.cummax(0).values[START - 1 :].tolist()


def interval(values: list[float]) -> str:
    """Mean and Student's 95 % interval."""
    mean, error = mean_and_error(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    return f"{mean:.3f} ± {t_quantile(0.975, len(values) - 1) * error:.3f}"


def page(found: dict, steps: int) -> str:
    """The results as Markdown: simple regret at the end."""
    lines = ["| function | method | seeds | regret at the start | regret at the end |"]
    lines.append("| --- | --- | ---: | --- | --- |")
    notes = []
    for name, function in FUNCTIONS.items():
        best = -function.optimal_value if function.negate is False else function.optimal_value
        regret = {}
        for method, label in NAMES.items():
            runs = found.get(name, {}).get(method, {})
            if not runs:
                continue
            regret[method] = {s: best - run[-1] for s, run in runs.items()}
            first = interval([best - run[0] for run in runs.values()])
            last = interval(list(regret[method].values()))
            lines.append(f"| {name} | {label} | {len(runs)} | {first} | {last} |")
        same = sorted(set(regret.get("ensemble", {})) & set(regret.get("gp", {})))
        if len(same) > 1:
            gap = paired_difference(*([regret[m][s] for s in same] for m in ("ensemble", "gp")))
            notes.append(
                f"{name}: the regret of the ensemble minus that of the Gaussian process is "
                f"{gap.difference:.3f} (95 % interval {gap.low:.3f} to {gap.high:.3f})."
            )
    return TEXT.format(table="\n".join(lines), notes="\n".join(notes), steps=steps, **SETTINGS)


TEXT = """# Bayesian optimisation with an ensemble

`python docs/results/botorch/make.py` writes this page. An ensemble of {members} perceptrons is the
surrogate of BoTorch's `qLogExpectedImprovement`, through `shoal.integrations.botorch`. It is
trained anew after each of {steps} evaluations, for {{n}} steps with f-kde. BoTorch's default
Gaussian process has the same start of 10 random points, the same acquisition function and the same
optimiser. Regret is the distance of the best value found from the maximum. Intervals are Student's
95 % intervals over the seeds.

{table}

{notes}
"""


def main() -> None:
    """Run what is missing within the budget, keep it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    options = parser.parse_args()
    file, begun = HERE / "results.json", time.monotonic()
    found = json.loads(file.read_text()) if file.exists() else {}
    warnings.simplefilter("ignore")
    for seed in range(options.seeds):
        for name in FUNCTIONS:
            for method in NAMES:
                runs = found.setdefault(name, {}).setdefault(method, {})
                if str(seed) in runs or time.monotonic() - begun > options.budget:
                    continue
                runs[str(seed)] = optimise(name, method, seed, options.steps)
                file.write_text(json.dumps(found, indent=1) + "\n")
                told = round(time.monotonic() - begun)
                print(name, method, seed, runs[str(seed)][-1], f"{told} s", flush=True)
    text = page(found, options.steps).replace("{n}", str(SETTINGS["steps"]))
    (HERE / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
