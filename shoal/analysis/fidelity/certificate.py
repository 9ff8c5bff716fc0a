"""Distances of a run, of the same weights trained or drawn otherwise, and of Laplace, to the
posterior.

The weights are those of the last layer given the trunk, or those of the whole network on a subspace
through one member. The posterior comes from the no-U-turn sampler, or for the last layer in closed
form for known normal noise. The sampler works in coordinates that Laplace's covariance whitens. The
certificate is stored in the folder of the run, or in its `results` without a folder.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.analysis.evidence.compute_evidence import step_of
from shoal.analysis.evidence.curvature import last_layer
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.distances import (
    function_distances,
    mmd,
    output_distances,
    sliced_wasserstein,
)
from shoal.analysis.fidelity.last_layer_problem import Restricted, last_layer_problem
from shoal.analysis.fidelity.problems import Problem
from shoal.analysis.fidelity.reference import LIMIT, Reference, Whitening
from shoal.analysis.fidelity.study import ALWAYS, Budget, check_label, discrepancy, train
from shoal.analysis.fidelity.subspace_problem import SubspaceProblem, subspace_problem
from shoal.analysis.stored_results import keep_result, stored_table
from shoal.core.display.text import seconds
from shoal.core.errors import CheckpointCorrupt, ConfigError
from shoal.core.optional import require
from shoal.data.dataset import Dataset, Split
from shoal.inference.likelihoods import Gaussian
from shoal.training.folder.own_data import again
from shoal.training.folder.run_folder import DRAWS

__all__ = [
    "FILE",
    "METHODS",
    "RUN",
    "Certificate",
    "certify",
    "keep_certificate",
    "laplace",
    "load_certificate",
    "price",
]


METHODS = ("ensemble", "kde", "f-kde", "f-svgd", "kde:calibrated", "f-kde:calibrated",
           "f-svgd:calibrated", "mclmc")  # fmt: skip
"""Methods that train the same last layers for comparison, and a sampler that draws them."""

RUN, LAPLACE, ITSELF = "this run", "last-layer Laplace", "error of the posterior"
_LAPLACE_THERE = "Laplace in the subspace"
LAPLACE_DRAWS, WARMUP = 1000, 300
_HALVED = ("mean", "std", "frechet", "tv", "calibration")
_COMPARED = 300
"""Draws of the posterior whose weights are compared."""

_LARGEST, _EXACT = 4000, 4000

_GRADIENTS = 15
"""Gradients of a draw in whitened coordinates, roughly."""


@dataclass(frozen=True)
class Certificate:
    """How close the members of a run are to the posterior of its last layer, or in a subspace.

    Attributes:
        members: number of finite members; of a run of draws, the draws of all chains.
        layer: name of the last layer; of a subspace, what its directions are.
        features: number of inputs of the last layer; 0 for a subspace.
        outputs: number of its outputs.
        points: training points of the posterior.
        all_points: training points of the run; more than `points` for a subset.
        shared_trunk: whether all members have the same features. Otherwise the trunk is member 0's.
        off: name of the OOD set; empty without any.
        reference: method and quality of the posterior: R-hat, effective draws, divergences.
        distances: by method, then by name; `NAME/on` at test inputs, `NAME/off` at OOD inputs.
        step: training step of the run.
        chains: number of chains of a run of draws; 0 if members are no draws.
        exact: number of exact draws in the row of the posterior's draws; 0 for `members` of them.
        subspace: number of directions of a subspace; 0 for the last layer.
        all_weights: number of weights of the network that the subspace is in; 0 for the last layer.
    """

    members: int
    layer: str
    features: int
    outputs: int
    points: int
    all_points: int
    shared_trunk: bool
    off: str
    reference: dict[str, Any]
    distances: dict[str, dict[str, float]]
    step: int
    chains: int = 0
    exact: int = 0
    subspace: int = 0
    all_weights: int = 0

    @property
    def laplace(self) -> str:
        """The row of Laplace's approximation."""
        return _LAPLACE_THERE if self.subspace else LAPLACE

    @property
    def converged(self) -> bool:
        """Whether the posterior can be trusted: exact, or chains that agree."""
        return self.reference.get("rhat", 1.0) < LIMIT


def price(points: int, weights: int, chains: int, draws: int) -> float:
    """Seconds of sampling on one core, roughly.

    A gradient takes about 6 N D operations for the likelihood and 4 D² for the whitening, and a
    draw about fifteen gradients.
    """
    gradients = _GRADIENTS * chains * (WARMUP + draws)
    return 5 + gradients * (6 * points * weights + 4 * weights**2) / 3e9


def certify(
    run: Any,
    data: Dataset,
    *,
    methods: Sequence[str] = METHODS,
    subspace: int | None = None,
    points: int | None = None,
    draws: int = 500,
    chains: int = 4,
    within: float = 600.0,
    seed: int = 0,
    budget: Budget | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Certificate:
    """Sample the posterior and measure all distances; see `shoal.fidelity`."""
    for label in methods:
        check_label(label)
    part = _part(run, data, subspace, points, seed)
    problem = part.problem
    closed = _has_closed_form(problem)
    _check_size(part, chains, draws, within)
    if not closed:
        require("numpyro", extra="fidelity")  # before any work
    whitening = laplace(problem)
    if closed:
        whole = references.closed_form(problem, _EXACT, kept=_EXACT)
    else:
        count = chains * draws
        whole = references.sampled(problem, WARMUP, draws, chains, seed, whitening, kept=count)
    tell(f"posterior: {whole.diagnostics['method']}")
    reference = replace(whole, draws=_spaced(whole.draws, _COMPARED))
    members = len(part.outputs["on"])
    exact = min(members, len(whole.draws) // 2)
    sampling = int(run.config.get(DRAWS, {}).get("chains", 0))
    distances = {RUN: _of_run(part, reference), ITSELF: _own_error(problem, whole)}
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(whole.draws), generator=random)[:exact]
    distances[ALWAYS] = _of_weights(problem, reference, whole.draws[order])
    there = LAPLACE if subspace is None else _LAPLACE_THERE
    distances[there] = _of_weights(problem, reference, _drawn(whitening, random))
    plan = budget or Budget()
    plan = Budget(sampling or members, plan.steps, plan.lr)
    for label in methods:
        distances[label] = _of_weights(problem, reference, train(problem, label, plan, seed))
        tell(label)
    return Certificate(
        members, part.name, 0 if subspace else problem.x.shape[1], problem.outputs, part.points,
        part.all_points, part.flat is not None, part.off, reference.diagnostics, distances,
        step_of(run), sampling, exact, subspace or 0, part.all_weights,
    )  # fmt: skip


def _part(
    run: Any, data: Dataset, subspace: int | None, points: int | None, seed: int
) -> Restricted:
    """The weights whose posterior is sampled."""
    if subspace is None:
        return last_layer_problem(run, data, points, seed=seed)
    return subspace_problem(run, data, subspace, points, seed=seed)


def _has_closed_form(problem: Problem) -> bool:
    return problem.in_jax and isinstance(problem.likelihood, Gaussian)


def _own_error(problem: Problem, reference: Reference) -> dict[str, float]:
    """What the distances would be to the same posterior from other draws.

    The draws of one half are compared with those of the other. Each half has half the draws, so
    moments differ by twice the error of all draws.
    """
    first, second = reference.draws.chunk(2)
    apart = function_distances(problem, references.summary(problem, first, {}), second)
    return {
        name: value / 2 if name.partition("/")[0] in _HALVED else value
        for name, value in apart.items()
    }


def _spaced(flat: Tensor, count: int) -> Tensor:
    """At most `count` rows, evenly spaced."""
    index = torch.linspace(0, len(flat) - 1, count).long() if len(flat) > count else slice(None)
    return flat[index]


def _check_size(part: Restricted, chains: int, draws: int, within: float) -> None:
    """Refuse a posterior that is too large, with its price."""
    weights, problem = part.weights, part.problem
    if weights > _LARGEST:
        advice = "take fewer directions"
        if problem.in_jax:
            advice = "put a narrower layer before the last one"
        raise ConfigError(
            f"the posterior has {weights:,} weights, and can be sampled up to {_LARGEST:,}; "
            f"{advice}"
        )
    if _has_closed_form(problem):
        return
    cost = price(part.points, weights, chains, draws)
    if isinstance(problem, SubspaceProblem):
        cost = 20 + _GRADIENTS * (WARMUP + draws) * _seconds_of_gradient(problem, chains)
    if cost > within:
        fewer = max(100, int(part.points * within / cost) // 100 * 100)
        raise ConfigError(
            f"sampling {weights:,} weights on {part.points:,} points takes about {seconds(cost)}; "
            f"allow it with within={cost:.0f}, or take a subset with points={fewer}"
        )


def _seconds_of_gradient(problem: SubspaceProblem, chains: int) -> float:
    """The time of one gradient of all chains, the shortest of three."""
    z = problem.start.expand(chains, -1)
    density, spent = references.Together(problem.log_density, z), []
    for _ in range(3):
        began = time.perf_counter()
        density(z, 0)
        spent.append(time.perf_counter() - began)
    return min(spent)


def laplace(problem: Problem) -> Whitening:
    """Mean and root of the covariance of Laplace's approximation.

    The mean maximises the posterior. The covariance is the inverse of H + P, with the generalised
    Gauss-Newton matrix H of the likelihood and the prior's precisions P.
    """
    there = isinstance(problem, SubspaceProblem)
    sizes = sum(math.prod(shape) for shape in problem.shapes)
    start = problem.start if there else torch.zeros(sizes, dtype=torch.float64)
    flat = start.clone().unsqueeze(0).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [flat], max_iter=500, tolerance_grad=1e-8, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -problem.log_density(flat).sum()
        value.backward()
        return value

    optimizer.step(loss)
    mean = flat.detach()[0]
    curvature = problem.gauss_newton(mean) if there else _of_last_layer(problem, mean)
    widths = torch.from_numpy(references.widths(problem))
    eigenvalues, vectors = torch.linalg.eigh(curvature + widths.pow(-2).diag())
    return mean, vectors * eigenvalues.rsqrt()


def _of_last_layer(problem: Problem, mean: Tensor) -> Tensor:
    """The generalised Gauss-Newton matrix of a last layer at its weights [D, D]."""
    module = problem.build().double()
    with torch.no_grad():
        parts = mean.split([math.prod(shape) for shape in problem.shapes])
        for parameter, part in zip(module.parameters(), parts, strict=True):
            parameter.copy_(part.reshape(parameter.shape))
    y = problem.y.double() if problem.y.is_floating_point() else problem.y
    expansion = last_layer(module, problem.likelihood, Split(problem.x.double(), y), 0.0)
    assert expansion.basis is not None
    return expansion.basis * expansion.curvature @ expansion.basis.mT


def _drawn(whitening: Whitening, random: torch.Generator) -> Tensor:
    mean, root = whitening
    noise = torch.randn(LAPLACE_DRAWS, len(mean), generator=random, dtype=mean.dtype)
    return (mean + noise @ root.mT).float()


def _of_weights(problem: Problem, reference: Reference, flat: Tensor) -> dict[str, float]:
    """Distances in predictions and in weights, which the prior identifies."""
    distances = function_distances(problem, reference, flat)
    flat = _spaced(flat, LAPLACE_DRAWS)
    distances["weights/sliced"] = sliced_wasserstein(flat, reference.draws)
    distances["weights/mmd"] = mmd(flat, reference.draws)
    if len(flat) > 1:
        distances["stein"] = discrepancy(problem, reference, _spaced(flat, 100))
    return distances


def _of_run(part: Restricted, reference: Reference) -> dict[str, float]:
    if part.flat is not None:
        return _of_weights(part.problem, reference, part.flat)
    outputs = {place: outputs.float().cpu() for place, outputs in part.outputs.items()}
    return output_distances(part.problem, reference, outputs)


FILE = "certificate.json"
"""File name in the folder of a run; `fidelity.json` belongs to the study of methods."""


def keep_certificate(run: Any, certificate: Certificate) -> None:
    """Store a certificate with its run."""
    keep_result(run, "fidelity", FILE, certificate)


def load_certificate(folder: Path | str) -> Certificate | None:
    """The certificate in the folder of a run; None without any."""
    value = stored_table(folder, FILE, "fidelity")
    if value is None:
        return None
    try:
        certificate = Certificate(**value)
        rows = {label: _numbers(row) for label, row in certificate.distances.items()}
        return Certificate(**{**asdict(certificate), "distances": rows})
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{Path(folder) / FILE} is not a valid certificate ({error}); "
            f"type: {again('fidelity', folder)}"
        ) from None


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """The row with null (a number that is not finite) as NaN."""
    return {name: math.nan if value is None else float(value) for name, value in row.items()}
