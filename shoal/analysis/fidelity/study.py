"""The study: distance to the true posterior of every method on every problem, several seeds.

`shoal.fit` trains all methods, published and calibrated, in the same way, with all data in one
batch; only the repulsion differs.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shoal.analysis.fidelity import problems
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.distances import (
    covariance_error,
    function_distances,
    ksd2,
    mean_error,
    mmd,
    sliced_wasserstein,
    squared_width,
)
from shoal.analysis.fidelity.problems import Problem
from shoal.analysis.fidelity.reference import Reference
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.tree import rows
from shoal.inference import samplers
from shoal.inference.ensemble import Ensemble
from shoal.interaction.methods import METHODS, Method, get
from shoal.interaction.spaces import LastLayer, Layerwise, Projected
from shoal.prediction.statistics import mean_and_error
from shoal.training.draw import draw
from shoal.training.fit import fit
from shoal.training.folder.run import Run

__all__ = [
    "EVERY",
    "QUICK",
    "Budget",
    "Row",
    "Study",
    "check_label",
    "contestant",
    "discrepancy",
    "distances_of",
    "fitted",
    "sampled",
    "summarise",
    "train",
]


_FORMS = ("legacy", "calibrated")
_SPACES = {"layerwise": Layerwise(), "last-layer": LastLayer(), "projected": Projected()}

EVERY = (
    "ensemble",
    *(f"{name}:{form}" for form in _FORMS for name in METHODS if METHODS[name].repulsion),
    *(f"kde:calibrated:{space}" for space in _SPACES),
)
"""Default methods of the comparison: `NAME:FORM`, and calibrated methods in other spaces."""

QUICK = ("ensemble", "svgd:legacy", "kde:legacy", "f-kde:legacy", "kde:calibrated",
         "f-kde:calibrated")  # fmt: skip
"""Methods that `--quick` compares."""


@dataclass(frozen=True)
class Budget:
    """Ensemble size and length of training.

    Attributes:
        members: M.
        steps: number of steps.
        lr: initial learning rate; a cosine schedule lowers it to zero.
    """

    members: int = 20
    steps: int = 400
    lr: float = 0.1


def contestant(label: str) -> Method:
    """The method with label `NAME`, `NAME:legacy`, `NAME:calibrated` or `NAME:calibrated:SPACE`.

    >>> contestant("f-kde:calibrated").repulsion.calibrated
    True
    """
    name, *words = label.split(":")
    form = words[0] if words else ""
    if form not in ("", *_FORMS) or len(words) > 2 or (len(words) == 2 and words[1] not in _SPACES):
        raise ConfigError(
            f"a method must be NAME, NAME:legacy or NAME:calibrated, optionally with a space "
            f"({', '.join(_SPACES)}), not {label!r}"
        )
    method = get(name, form == "legacy", form == "calibrated")
    if len(words) < 2:
        return method
    if method.repulsion is None or method.repulsion.space.base != "weights":
        raise ConfigError(f"only weight-space methods can have another space, not {label!r}")
    return replace(method, repulsion=replace(method.repulsion, space=_SPACES[words[1]]))


DRAWS = 50
"""Draws that each chain of a sampler keeps."""

_LENGTHS, _USUAL = {"mclmc": (500, 5), "hmc": (47, 1), "nuts": (50, 1)}, (1000, 10)
"""Steps before the first draw and from draw to draw; about 1,500 gradients for every sampler."""

_RATE = 1e-3
"""Learning rate of Langevin chains; 0.01 is unstable where the noise is small."""


def check_label(label: str) -> None:
    """Refuse what is neither a method, as `contestant` reads it, nor a sampler."""
    if label not in samplers.registry:
        contestant(label)


def train(problem: Problem, label: str, budget: Budget, seed: int) -> Tensor:
    """Flat weights [M, D] of the members after training; of a sampler, those of all draws."""
    if label in samplers.registry:
        return sampled(problem, label, fitted(problem, "ensemble", budget, seed), seed)
    return _flat(fitted(problem, label, budget, seed))


def sampled(problem: Problem, label: str, run: Run, seed: int) -> Tensor:
    """Flat weights [K M, D] of the draws of a sampler whose chains begin at the members of a run.

    Row k M + c is draw k of chain c.
    """
    warmup, thin = _LENGTHS.get(label, _USUAL)
    mini = not samplers.registry.make(label).whole
    return _flat(
        draw(
            run,
            (problem.x, problem.y),
            sampler={"name": label, "lr": _RATE} if mini else label,
            batch_size=len(problem.x) if mini else None,
            draws=DRAWS,
            warmup=warmup,
            thin=thin,
            prior=problem.prior,
            seed=seed,
            progress=False,
        )
    )


def _flat(run: Run) -> Tensor:
    return torch.cat([rows(tensor.detach()) for tensor in run.ensemble.weights.values()], 1)


def fitted(
    problem: Problem, label: str, budget: Budget, seed: int, callbacks: Sequence[Any] = ()
) -> Run:
    """The trained members."""
    ensemble = Ensemble.init(problem.build, budget.members, seed=seed)
    with warnings.catch_warnings():
        # The table shows negligible pushes, so the warning is not needed.
        warnings.simplefilter("ignore", ShoalWarning)
        return fit(
            ensemble,
            (problem.x, problem.y),
            method=contestant(label),
            likelihood=problem.likelihood,
            prior=problem.prior,
            steps=budget.steps,
            batch_size=len(problem.x),
            lr=budget.lr,
            schedule="cosine",
            seed=seed,
            engine="vmap",
            callbacks=callbacks,
            progress=False,
        )


WIDTH_DRAWS = 1000
"""Draws of the posterior whose distances give the kernel of the Stein discrepancy its width."""

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
    distances = function_distances(problem, reference, flat)
    for name in ("frechet", "tv"):
        distances[name] = (distances[f"{name}/on"] + distances[f"{name}/off"]) / 2
    distances["stein"] = discrepancy(problem, reference, flat)
    distances |= _quality(problem, flat)
    if not problem.network.hidden:
        mean, covariance = references.moments(problem)
        distances |= {
            "weights/mean": mean_error(flat, mean, covariance),
            "weights/covariance": covariance_error(flat, covariance),
            "weights/sliced": sliced_wasserstein(flat, reference.draws),
            "weights/mmd": mmd(flat, reference.draws),
        }
    return distances


def discrepancy(problem: Problem, reference: Reference, flat: Tensor) -> float:
    """Unbiased squared Stein discrepancy of members from the problem's posterior, per dimension.

    The kernel has the width of the posterior's draws for every method. A width from the members
    themselves would measure members that are close to each other by another kernel.
    """
    live = flat.double().requires_grad_()
    (scores,) = torch.autograd.grad(problem.log_density(live).sum(), live)
    width = squared_width(reference.draws[:WIDTH_DRAWS])
    return ksd2(live.detach(), scores, width) / flat.shape[1]


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
    by_method: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in rows:
        by_method.setdefault((row.problem, row.method), []).append(row.distances)
    return {
        where: {
            name: mean_and_error([d[name] for d in several])
            for name in several[0]
            if all(name in d for d in several)  # older rows have fewer distances
        }
        for where, several in by_method.items()
    }
