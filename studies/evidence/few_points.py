"""Evidence with the curvature of few points: python -m studies.evidence.few_points digits

One seed, the plain ensemble of the study. Rows of the table: all training points; 500 points for
the curvature and all points for the gradient; 500 points for both, as before version 0.2.
"""

import argparse
import time
import warnings
from dataclasses import replace

import torch
from torch import Tensor

import shoal
from shoal.analysis.evidence.curvature import Expansion, last_layer
from shoal.analysis.evidence.laplace import fit_laplace
from shoal.analysis.evidence.members import log_likelihoods, modules_of
from shoal.analysis.evidence.pointmass import log_evidence
from shoal.core.random import generator
from shoal.data.dataset import Split
from studies.evidence.make import MEMBERS, task

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
    print(f"{asked.data}, seed {asked.seed}, N = {len(train):,}")
    print(f"point masses: {log_evidence(each):.2f}")
    modules = modules_of(run.ensemble, range(MEMBERS))
    rows = torch.randperm(len(train), generator=generator(0, "curvature"))[:POINTS]
    some = Split(train.x[rows], train.y[rows])

    def expanded(data: Split, chosen: Tensor | None = None) -> list[Expansion]:
        pairs = zip(modules, each, strict=True)
        return [last_layer(m, run.likelihood, data, float(value), chosen) for m, value in pairs]

    print("| curvature | gradient | at the members | width | at zero | width | CPU seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    kinds = (("all | all", train, None), ("500 | all", train, rows), ("500 | 500", some, None))
    for words, data, chosen in kinds:
        started = time.process_time()
        found = expanded(data, chosen)
        taken = time.process_time() - started
        if data is some:
            found = [_scaled(each, len(train) / POINTS) for each in found]
        numbers = []
        for centre in ("members", "zero"):
            fitted = fit_laplace(found, centre)
            numbers += [f"{log_evidence(fitted.log_evidences):.2f}"]
            numbers += [f"{float(fitted.log_scales.exp()):.3g}"]
        print(f"| {words} | {' | '.join(numbers)} | {taken:.1f} |", flush=True)


def _scaled(expansion: Expansion, factor: float) -> Expansion:
    """The expansion of a subset, scaled to all data: the former estimate."""
    gradient, curvature = factor * expansion.gradient, factor * expansion.curvature
    return replace(expansion, gradient=gradient, curvature=curvature)


if __name__ == "__main__":
    main()
