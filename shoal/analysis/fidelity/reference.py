"""The true posterior of each problem: its predictions, and some of its draws.

The posterior of the linear problem has a closed form. For the other problems it comes from several
Markov chains. It is refused if the chains disagree: if R-hat of any predicted value reaches 1.01.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.analysis.fidelity.problems import Problem
from shoal.core.errors import DataError, StorageError
from shoal.core.optional import require
from shoal.core.storage.files import read_json, read_tensors, write_json, write_tensors
from shoal.inference.likelihoods import Gaussian, HeteroscedasticGaussian
from shoal.inference.likelihoods.real_targets import LEAST
from shoal.inference.priors import FanIn
from shoal.inference.priors import Gaussian as GaussianPrior
from shoal.inference.samplers import NUTS, Plan
from shoal.inference.samplers.convergence import effective_draws, split_rhat
from shoal.training.draws.moves import drawn

__all__ = [
    "Chains",
    "Reference",
    "Together",
    "Whitening",
    "closed_form",
    "home",
    "load",
    "make",
    "moments",
    "potential",
    "read",
    "sample_chains",
    "sampled",
    "save",
    "summary",
    "widths",
]


@dataclass(frozen=True)
class Chains:
    """Result of the sampler.

    Attributes:
        draws: flat weights [chains, draws, D].
        divergences: number of divergent trajectories.
        sampler: name and version.
    """

    draws: Tensor
    divergences: int
    sampler: str


Whitening = tuple[Tensor, Tensor]
"""A mean m [D] and a root A [D, D] of a covariance; the sampler moves z in θ = m + A z."""


def sample_chains(
    problem: Problem,
    warmup: int,
    draws: int,
    chains: int,
    seed: int = 0,
    around: Whitening | None = None,
) -> Chains:
    """Run the chains from overdispersed initial weights.

    They are drawn from the prior, or with twice the standard deviations of a whitening. A good
    whitening makes trajectories short, and changes no density: θ is linear in z.
    """
    if not problem.in_jax:
        return _called_back(problem, warmup, draws, chains, seed, around)
    jax, numpyro = require("jax", "fidelity"), require("numpyro", "fidelity")
    infer = require("numpyro.infer", "fidelity")
    with jax.enable_x64(True):
        each = widths(problem)
        random = np.random.default_rng(seed)
        start = random.normal(size=(chains, len(each))) * (each if around is None else 2.0)
        density = potential(problem) if around is None else _whitened(problem, around)
        kernel = infer.NUTS(potential_fn=density, max_tree_depth=8)
        settings = {"num_chains": chains, "chain_method": "vectorized", "progress_bar": False}
        run = infer.MCMC(kernel, num_warmup=warmup, num_samples=draws, **settings)
        start = jax.numpy.asarray(start)
        run.run(jax.random.PRNGKey(seed), init_params=start, extra_fields=("diverging",))
        samples = np.array(run.get_samples(group_by_chain=True))
        divergences = int(run.get_extra_fields()["diverging"].sum())
    if around is not None:
        mean, root = (tensor.double().numpy() for tensor in around)
        samples = mean + samples @ root.T
    sampler = f"NUTS, numpyro {numpyro.__version__}"
    return Chains(torch.from_numpy(samples).float(), divergences, sampler)


def _called_back(
    problem: Problem, warmup: int, draws: int, chains: int, seed: int, around: Whitening | None
) -> Chains:
    """The chains of a density that torch alone has: the sampler `nuts`, in whitened coordinates."""
    each = widths(problem)
    mean, root = (0.0, torch.from_numpy(each).diag()) if around is None else around
    random = torch.Generator().manual_seed(seed)
    start = torch.randn(chains, len(each), generator=random, dtype=torch.float64)
    start = start if around is None else 2 * start
    density = Together(lambda z: problem.log_density(mean + z @ root.mT), start)
    z, state = drawn(density, start, Plan(NUTS(depth=8), draws, warmup, 1, seed))
    sampler = f"NUTS, numpyro {require('numpyro', 'fidelity').__version__}"
    weights = (mean + z @ root.mT).transpose(0, 1).float()
    return Chains(weights, int(state["diverged"].sum()), sampler)


class Together:
    """A log density of many particles [M, D] at once, as samplers take it."""

    points = 1.0

    def __init__(self, log_density: Callable[[Tensor], Tensor], start: Tensor) -> None:
        self.log_density = log_density
        self.numbers = torch.full((len(start),), start.shape[1])
        self.used = torch.ones_like(start[:1, :1])

    def __call__(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """See `samplers.Density`."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            values = self.log_density(x)
            (gradient,) = torch.autograd.grad(values.sum(), x)
        return values.detach(), gradient


def _whitened(problem: Problem, around: Whitening) -> Callable[[Any], Any]:
    jnp = require("jax", "fidelity").numpy
    mean, root = (jnp.asarray(tensor.double().numpy()) for tensor in around)
    density = potential(problem)
    return lambda z: density(mean + root @ z)


def potential(problem: Problem) -> Callable[[Any], Any]:
    """-log p(y | x, θ) - log p(θ) of one flat vector, up to a constant, as a function of JAX."""
    jax = require("jax", "fidelity")
    jnp = jax.numpy
    x, y = jnp.asarray(problem.x.double().numpy()), jnp.asarray(problem.y.numpy())
    shapes, stds = problem.shapes, jnp.asarray(widths(problem))
    cuts = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    likelihood = problem.likelihood

    def outputs(theta: Any) -> Any:
        pieces = zip(jnp.split(theta, cuts), shapes, strict=True)
        parts = [piece.reshape(shape) for piece, shape in pieces]
        h = x
        for layer in range(0, len(parts), 2):
            h = h if layer == 0 else jnp.tanh(h)
            h = h @ parts[layer].T + parts[layer + 1]
        return h

    def log_likelihood(f: Any) -> Any:
        if isinstance(likelihood, HeteroscedasticGaussian):
            variance = jax.nn.softplus(f[:, 1]) + LEAST
            return -0.5 * ((y - f[:, 0]) ** 2 / variance + jnp.log(variance)).sum()
        if isinstance(likelihood, Gaussian):
            return -0.5 * (((y - f[:, 0]) / likelihood.noise_std) ** 2).sum()
        return jnp.take_along_axis(jax.nn.log_softmax(f, -1), y[:, None], 1).sum()

    return lambda theta: 0.5 * ((theta / stds) ** 2).sum() - log_likelihood(outputs(theta))


def widths(problem: Problem) -> np.ndarray:
    """Standard deviation of every weight under the prior [D]."""
    prior = problem.prior
    assert isinstance(prior, FanIn | GaussianPrior)
    return np.concatenate(
        [np.full(math.prod(shape), prior.width(torch.empty(1, *shape))) for shape in problem.shapes]
    )


LIMIT = 1.01
"""Limit of R-hat of a predicted value; chains must stay below it."""

_QUANTILES, _KEPT = 64, 300


@dataclass(frozen=True)
class Reference:
    """The posterior of one problem.

    Attributes:
        draws: some draws of the flat weights [R, D].
        mean: mean outputs, or probabilities, at the inputs on and off the data [A + B, C].
        std: standard deviation of the outputs, or probabilities, over the posterior [A + B, C].
        quantiles: evenly spaced quantiles of the outputs, or probabilities [Q, A + B, C]; None in
            stored references of classes.
        diagnostics: method and quality of the reference.
    """

    draws: Tensor
    mean: Tensor
    std: Tensor
    quantiles: Tensor | None
    diagnostics: dict[str, Any]


def moments(problem: Problem) -> tuple[Tensor, Tensor]:
    """Mean [D] and covariance [D, D] of a linear problem's Gaussian posterior.

    S = (ΦᵀΦ / σ² + P)^-1 and m = S Φᵀ y / σ², with the prior's precisions P on the diagonal.
    """
    likelihood, prior = problem.likelihood, problem.prior
    assert isinstance(likelihood, Gaussian) and isinstance(prior, FanIn | GaussianPrior)
    ones = torch.ones(len(problem.x), 1)
    design = torch.cat([problem.x, ones], 1).double()
    stds = [prior.width(torch.empty(1, *shape)) for shape in problem.shapes]
    precision = torch.tensor([*[stds[0] ** -2] * problem.x.shape[1], stds[1] ** -2])
    noise = likelihood.noise_std**2
    covariance = torch.linalg.inv(design.mT @ design / noise + precision.double().diag())
    return covariance @ design.mT @ problem.y.double() / noise, covariance


def closed_form(problem: Problem, draws: int = 20000, kept: int = _KEPT) -> Reference:
    """The linear problem's posterior, from independent exact draws, of which some are kept."""
    mean, covariance = moments(problem)
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(draws, len(mean), generator=random, dtype=torch.float64)
    flat = (mean + noise @ torch.linalg.cholesky(covariance).mT).float()
    return summary(problem, flat, {"method": "closed form", "draws": draws}, kept)


def make(
    problem: Problem, warmup: int = 600, draws: int = 1500, chains: int = 4, seed: int = 0
) -> Reference:
    """The posterior in closed form if there is one, otherwise from Markov chains that agree."""
    if not problem.network.hidden:
        return closed_form(problem)
    reference = sampled(problem, warmup, draws, chains, seed)
    rhat = reference.diagnostics["rhat"]
    if not rhat < LIMIT:
        raise DataError(
            f"the chains on '{problem.name}' disagree: R-hat is {rhat:.3f} and must be below "
            f"{LIMIT}; use more than {draws} draws in each of the {chains} chains"
        )
    return reference


def sampled(
    problem: Problem,
    warmup: int,
    draws: int,
    chains: int,
    seed: int = 0,
    around: Whitening | None = None,
    kept: int = _KEPT,
) -> Reference:
    """The posterior from Markov chains; `diagnostics` say how well the chains agree."""
    result = sample_chains(problem, warmup, draws, chains, seed, around)
    values = _values(problem, result.draws.flatten(0, 1)).flatten(1)
    grouped = values.reshape(chains, draws, -1)
    rhat, effective = float(split_rhat(grouped).max()), float(effective_draws(grouped).min())
    diagnostics = {
        "method": result.sampler, "chains": chains, "warmup": warmup, "draws": draws,
        "rhat": rhat, "effective": effective, "divergences": result.divergences, "seed": seed,
    }  # fmt: skip
    return summary(problem, result.draws.flatten(0, 1), diagnostics, kept)


def _values(problem: Problem, flat: Tensor) -> Tensor:
    """Outputs, or probabilities, at all inputs [R, A + B, C]."""
    outputs = problem.apply(flat, torch.cat([problem.on, problem.off]))
    return outputs.softmax(-1) if problem.classes else outputs


def summary(
    problem: Problem, flat: Tensor, diagnostics: dict[str, Any], kept: int = _KEPT
) -> Reference:
    """The posterior from draws of the flat weights [R, D], of which some are kept."""
    values = _values(problem, flat)
    levels = (torch.arange(_QUANTILES) + 0.5) / _QUANTILES
    quantiles = torch.cat([part.quantile(levels, dim=0) for part in values.split(16, 1)], 1)
    some = flat[torch.linspace(0, len(flat) - 1, kept).long()]
    return Reference(some, values.mean(0), values.std(0), quantiles, diagnostics)


def save(reference: Reference, path: Path) -> None:
    """Write two files, tensors and diagnostics; draws of the weights are in half precision."""
    tensors = {"draws": reference.draws.half(), "mean": reference.mean, "std": reference.std}
    if reference.quantiles is not None:
        tensors["quantiles"] = reference.quantiles
    write_tensors(path, tensors)
    write_json(path.with_suffix(".json"), reference.diagnostics)


def home() -> Path:
    """The folder of the references in the package."""
    return Path(str(resources.files("shoal.analysis.fidelity") / "references"))


def load(problem: Problem) -> Reference:
    """The reference in the package; the linear problem's reference is computed."""
    if not problem.network.hidden:
        return closed_form(problem)
    path = home() / f"{problem.name}.safetensors"
    if not path.is_file():
        raise StorageError(
            f"there is no reference for '{problem.name}' at {path}; "
            f"type: shoal fidelity --reference"
        )
    return read(path)


def read(path: Path) -> Reference:
    """Read the files that `save` wrote."""
    tensors, diagnostics = read_tensors(path), read_json(path.with_suffix(".json"))
    draws = tensors["draws"].float()
    return Reference(draws, tensors["mean"], tensors["std"], tensors.get("quantiles"), diagnostics)
