"""Evidence with the curvature of few points: python docs/results/evidence/few_points.py digits

One seed, the plain ensemble of the study. Rows of the table: all training points; 500 points for
the curvature and all points for the gradient; 500 points for both, as before version 0.2.
"""

import argparse
import time
import warnings
from dataclasses import replace

import torch
from make import MEMBERS, task
from torch import Tensor

import shoal
from shoal.analysis.evidence.curvature import Expansion, last_layer
from shoal.analysis.evidence.laplace import fit_laplace
from shoal.analysis.evidence.members import log_likelihoods, modules_of
from shoal.analysis.evidence.pointmass import log_evidence
from shoal.core.random import generator
from shoal.data.dataset import Split

POINTS = 500


def main() -> None:
    """Train, expand and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a data set of the study, such as digits or heads")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore", shoal.ShoalWarning)
    data, build, options = task(asked.data, asked.seed, False)
    ensemble = shoal.Ensemble.init(build, members=MEMBERS, seed=asked.seed)
    how = {**options, "seed": asked.seed, "progress": False}
    run = shoal.fit(ensemble, data, method="ensemble", **how)
    y = data.train.y
    train = Split(data.train.x.double(), y.double() if y.is_floating_point() else y)
    each = log_likelihoods(run, data.train)
    print(f"{asked.data}, seed {asked.seed}, N = {len(train):,}, 95 % intervals: none, one seed")
    print(f"point masses: {log_evidence(each):.2f}")
    modules = modules_of(run.ensemble, range(MEMBERS))
    rows = torch.randperm(len(train), generator=generator(0, "curvature"))[:POINTS]
    some = Split(train.x[rows], train.y[rows])

    def expanded(data: Split, chosen: Tensor | None = None) -> list[Expansion]:
        pairs = zip(modules, each, strict=True)
        return [last_layer(m, run.likelihood, data, float(value), chosen) for m, value in pairs]

    print("| curvature | gradient | at the members | width | at zero | width | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for words, chosen in (
        ("all | all", None),
        (f"{POINTS} | all", rows),
        (f"{POINTS} | 500", rows),
    ):
        started = time.monotonic()
        found = expanded(train, chosen)
        if words.endswith("500"):
            alone, factor = expanded(some), len(train) / POINTS
            found = [_with_gradient(e, a, factor) for e, a in zip(found, alone, strict=True)]
        taken = time.monotonic() - started
        numbers = []
        for centre in ("members", "zero"):
            fitted = fit_laplace(found, centre)
            numbers += [f"{log_evidence(fitted.log_evidences):.2f}"]
            numbers += [f"{float(fitted.log_scales.exp()):.3g}"]
        print(f"| {words} | {' | '.join(numbers)} | {taken:.1f} |", flush=True)


def _with_gradient(expansion: Expansion, alone: Expansion, factor: float) -> Expansion:
    """The expansion with the gradient of a subset."""
    assert expansion.basis is not None and alone.basis is not None
    gradient = factor * (alone.basis @ alone.gradient)
    return replace(expansion, gradient=gradient @ expansion.basis)


if __name__ == "__main__":
    main()
