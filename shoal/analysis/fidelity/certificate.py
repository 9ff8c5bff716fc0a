"""Distances of a run, of the same last layers trained or drawn otherwise, and of Laplace, to the
posterior.

The posterior of the last layer given the trunk comes from the no-U-turn sampler, or in closed form
for known normal noise. The sampler works in coordinates that Laplace's covariance whitens. The
certificate is stored in the folder of the run, or in its `results` without a folder.
"""

import math
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
from shoal.analysis.fidelity.last_layer_problem import LastLayer, last_layer_problem
from shoal.analysis.fidelity.problems import Problem
from shoal.analysis.fidelity.reference import LIMIT, Reference, Whitening
from shoal.analysis.fidelity.study import ALWAYS, Budget, check_label, discrepancy, train
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
LAPLACE_DRAWS, WARMUP = 1000, 300
_HALVED = ("mean", "std", "frechet", "tv", "calibration")
_COMPARED = 300
"""Draws of the posterior whose weights are compared."""

_LARGEST, _EXACT = 4000, 4000


@dataclass(frozen=True)
class Certificate:
    """How close the members of a run are to the posterior of its last layer.

    Attributes:
        members: number of finite members; of a run of draws, the draws of all chains.
        layer: name of the last layer.
        features: number of inputs of the last layer.
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

    @property
    def converged(self) -> bool:
        """Whether the posterior can be trusted: exact, or chains that agree."""
        return self.reference.get("rhat", 1.0) < LIMIT


def price(points: int, weights: int, chains: int, draws: int) -> float:
    """Seconds of sampling on one core, roughly.

    A gradient takes about 6 N D operations for the likelihood and 4 D² for the whitening, and a
    draw about fifteen gradients.
    """
    gradients = 15 * chains * (WARMUP + draws)
    return 5 + gradients * (6 * points * weights + 4 * weights**2) / 3e9


def certify(
    run: Any,
    data: Dataset,
    *,
    methods: Sequence[str] = METHODS,
    points: int | None = None,
    draws: int = 500,
    chains: int = 4,
    within: float = 600.0,
    seed: int = 0,
    budget: Budget | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Certificate:
    """Sample the posterior of the last layer and measure all distances; see `shoal.fidelity`."""
    for label in methods:
        check_label(label)
    layer = last_layer_problem(run, data, points, seed=seed)
    _check_size(layer, chains, draws, within)
    problem = layer.problem
    gaussian = isinstance(problem.likelihood, Gaussian)
    if not gaussian:
        require("numpyro", extra="fidelity")  # before any work
    whitening = laplace(problem)
    if gaussian:
        whole = references.closed_form(problem, _EXACT, kept=_EXACT)
    else:
        count = chains * draws
        whole = references.sampled(problem, WARMUP, draws, chains, seed, whitening, kept=count)
    tell(f"posterior: {whole.diagnostics['method']}")
    reference = replace(whole, draws=_spaced(whole.draws, _COMPARED))
    members = len(layer.outputs["on"])
    exact = min(members, len(whole.draws) // 2)
    sampling = int(run.config.get(DRAWS, {}).get("chains", 0))
    distances = {RUN: _of_run(layer, reference), ITSELF: _own_error(problem, whole)}
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(whole.draws), generator=random)[:exact]
    distances[ALWAYS] = _of_weights(problem, reference, whole.draws[order])
    distances[LAPLACE] = _of_weights(problem, reference, _drawn(whitening, random))
    plan = budget or Budget()
    plan = Budget(sampling or members, plan.steps, plan.lr)
    for label in methods:
        distances[label] = _of_weights(problem, reference, train(problem, label, plan, seed))
        tell(label)
    return Certificate(
        members, layer.layer, problem.x.shape[1], problem.outputs, layer.points, layer.all_points,
        layer.flat is not None, layer.off, reference.diagnostics, distances, step_of(run),
        sampling, exact,
    )  # fmt: skip


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


def _check_size(layer: LastLayer, chains: int, draws: int, within: float) -> None:
    """Refuse a posterior that is too large, with its price."""
    weights = layer.weights
    if weights > _LARGEST:
        raise ConfigError(
            f"the last layer has {weights:,} weights, and its posterior can be sampled up to "
            f"{_LARGEST:,}; put a narrower layer before the last one"
        )
    cost = price(layer.points, weights, chains, draws)
    exact = isinstance(layer.problem.likelihood, Gaussian)
    if cost > within and not exact:
        fewer = max(100, int(layer.points * within / cost) // 100 * 100)
        raise ConfigError(
            f"sampling {weights:,} weights on {layer.points:,} points takes about {seconds(cost)}; "
            f"allow it with within={cost:.0f}, or take a subset with points={fewer}"
        )


def laplace(problem: Problem) -> Whitening:
    """Mean and root of the covariance of Laplace's approximation of a last layer.

    The mean maximises the posterior. The covariance is the inverse of H + P, with the generalised
    Gauss-Newton matrix H of the likelihood and the prior's precisions P.
    """
    module = problem.build().double()
    sizes = sum(math.prod(shape) for shape in problem.shapes)
    flat = torch.zeros(1, sizes, dtype=torch.float64, requires_grad=True)
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
    with torch.no_grad():
        parts = mean.split([math.prod(shape) for shape in problem.shapes])
        for parameter, part in zip(module.parameters(), parts, strict=True):
            parameter.copy_(part.reshape(parameter.shape))
    y = problem.y.double() if problem.y.is_floating_point() else problem.y
    expansion = last_layer(module, problem.likelihood, Split(problem.x.double(), y), 0.0)
    assert expansion.basis is not None
    widths = torch.from_numpy(references.widths(problem))
    precision = expansion.basis * expansion.curvature @ expansion.basis.mT + widths.pow(-2).diag()
    eigenvalues, vectors = torch.linalg.eigh(precision)
    return mean, vectors * eigenvalues.rsqrt()


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


def _of_run(layer: LastLayer, reference: Reference) -> dict[str, float]:
    if layer.flat is not None:
        return _of_weights(layer.problem, reference, layer.flat)
    outputs = {place: outputs.float().cpu() for place, outputs in layer.outputs.items()}
    return output_distances(layer.problem, reference, outputs)


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
