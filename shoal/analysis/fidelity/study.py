"""The study: distance to the true posterior of every method on every problem, several seeds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from shoal.analysis.fidelity import problems
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.contestants import Budget, train
from shoal.analysis.fidelity.distances import (
    covariance_error,
    function_distances,
    ksd,
    mean_error,
    mmd,
    sliced_wasserstein,
)
from shoal.analysis.fidelity.problems import Problem
from shoal.analysis.fidelity.reference import Reference
from shoal.prediction.statistics import mean_and_error

__all__ = ["Row", "Study", "discrepancy", "distances_of", "summarise"]

ALWAYS = "posterior draws"
"""The baseline: M exact draws from the posterior, new draws for each seed."""


@dataclass(frozen=True)
class Row:
    """One trained ensemble on one problem.

    Attributes:
        problem: its name.
        method: label of the contestant.
        seed: seed of initialisation and training.
        distances: by name.
    """

    problem: str
    method: str
    seed: int
    distances: dict[str, float]


@dataclass(frozen=True)
class Study:
    """Plan of a study.

    Attributes:
        problems: names of the problems.
        methods: labels of the methods.
        seeds: number of seeds.
        budget: ensemble size and length of every training.
    """

    problems: Sequence[str]
    methods: Sequence[str]
    seeds: int
    budget: Budget

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.problems) * (len(self.methods) + 1) * self.seeds

    def run(
        self, tell: Callable[[Row], None] = lambda row: None, done: Sequence[Row] = ()
    ) -> list[Row]:
        """All rows; `tell` is called with each new row, and rows in `done` are reused."""
        known = {(row.problem, row.method, row.seed): row for row in done}
        rows = []
        for name in self.problems:
            problem = problems.make(name)
            reference = references.load(problem)
            for method, seed in product((ALWAYS, *self.methods), range(self.seeds)):
                row = known.get((name, method, seed))
                if row is None:
                    flat = self._members(problem, reference, method, seed)
                    row = Row(name, method, seed, distances_of(problem, reference, flat))
                    tell(row)
                rows.append(row)
        return rows

    def _members(self, problem: Problem, reference: Reference, method: str, seed: int) -> Tensor:
        if method != ALWAYS:
            return train(problem, method, self.budget, seed)
        random = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(reference.draws), generator=random)
        return reference.draws[order[: self.budget.members]]


def distances_of(problem: Problem, reference: Reference, flat: Tensor) -> dict[str, float]:
    """Every distance of members given as flat weights [M, D]."""
    found = function_distances(problem, reference, flat)
    for name in ("frechet", "tv"):
        found[name] = (found[f"{name}/on"] + found[f"{name}/off"]) / 2
    found["ksd"], found["ksd2"] = discrepancy(problem, flat), discrepancy(problem, flat, True)
    found |= _quality(problem, flat)
    if not problem.network.hidden:
        mean, covariance = references.moments(problem)
        found |= {
            "weights/mean": mean_error(flat, mean, covariance),
            "weights/covariance": covariance_error(flat, covariance),
            "weights/sliced": sliced_wasserstein(flat, reference.draws),
            "weights/mmd": mmd(flat, reference.draws),
        }
    return found


def discrepancy(problem: Problem, flat: Tensor, unbiased: bool = False) -> float:
    """Kernel Stein discrepancy of members from the problem's posterior, per dimension.

    The biased form is small wherever scores are small, also at modes. The unbiased square is about
    0 only for exact draws, and large for members that have collapsed to modes.
    """
    live = flat.double().requires_grad_()
    (scores,) = torch.autograd.grad(problem.log_density(live).sum(), live)
    found = ksd(live.detach(), scores, unbiased=unbiased)
    return found / flat.shape[1] if unbiased else found / math.sqrt(flat.shape[1])


def _quality(problem: Problem, flat: Tensor) -> dict[str, float]:
    """Accuracy, or root mean square error, on new data."""
    outputs = problem.apply(flat, problem.on)
    if problem.classes:
        right = outputs.softmax(-1).mean(0).argmax(-1) == problem.truth
        return {"accuracy": float(right.float().mean())}
    error = outputs.mean(0).squeeze(-1) - problem.truth
    return {"rmse": float(error.square().mean().sqrt())}


def summarise(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Mean and standard error over seeds of every distance, by (problem, method)."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in rows:
        found.setdefault((row.problem, row.method), []).append(row.distances)
    return {
        where: {name: mean_and_error([d[name] for d in several]) for name in several[0]}
        for where, several in found.items()
    }
