"""Distances to the true posterior: in predictions, in weights, and by Stein's identity."""

import math
from collections.abc import Mapping
from statistics import NormalDist

import torch
from torch import Tensor

from shoal.analysis.fidelity.problems import Problem
from shoal.analysis.fidelity.reference import Reference
from shoal.core.errors import DataError
from shoal.core.tree import rows
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Gaussian
from shoal.inference.posterior import Posterior
from shoal.training.forces import forces
from shoal.training.step.drive import Batch

__all__ = [
    "covariance_error",
    "function_distances",
    "ksd2",
    "ksd2_of_ensemble",
    "mean_error",
    "mmd",
    "output_distances",
    "sliced_wasserstein",
    "squared_width",
    "stein_kernel",
    "total_variation_of_mixtures",
]

_LEVELS = tuple(step / 10 for step in range(1, 10))


def function_distances(problem: Problem, reference: Reference, flat: Tensor) -> dict[str, float]:
    """Every distance: `NAME/on` at inputs like the training data, `NAME/off` at other inputs.

    `tv`: total variation of the predictive distributions. `agreement`: share of inputs with the
    same most probable class, or whose predicted mean lies within the posterior's own standard
    deviation. `mean` and `std`: error of mean and standard deviation over members, as a share of
    the posterior's standard deviation. `frechet`: √(mean² + std²), the Wasserstein distance of the
    Gaussians with these moments. `coverage`: share of the members' values inside the posterior's
    central 90 % intervals, 0.9 for draws from the posterior. `calibration`: mean error of
    the posterior's share inside the members' central intervals (regression only).
    """
    inputs = {"on": problem.on, "off": problem.off}
    applied = {place: problem.apply(flat, x) for place, x in inputs.items() if len(x)}
    return output_distances(problem, reference, applied)


def output_distances(
    problem: Problem, reference: Reference, applied: Mapping[str, Tensor]
) -> dict[str, float]:
    """The distances of `function_distances` from outputs [M, B, C] at the inputs on and off."""
    by_place = {}
    places = {"on": slice(0, len(problem.on)), "off": slice(len(problem.on), None)}
    for place, outputs in applied.items():
        chosen = places[place]
        part = Reference(
            reference.draws, reference.mean[chosen], reference.std[chosen],
            None if reference.quantiles is None else reference.quantiles[:, chosen], {},
        )  # fmt: skip
        distances = _moments(problem, part, outputs)
        distances |= _classes(part, outputs) if problem.classes else _curves(problem, part, outputs)
        by_place |= {f"{name}/{place}": value for name, value in distances.items()}
    return by_place


def _moments(problem: Problem, reference: Reference, outputs: Tensor) -> dict[str, float]:
    values = outputs.softmax(-1) if problem.classes else outputs
    scale = reference.std.square().mean().sqrt()
    std = values.std(0) if len(values) > 1 else torch.zeros_like(values[0])
    mean = float((values.mean(0) - reference.mean).square().mean().sqrt() / scale)
    spread = float((std - reference.std).square().mean().sqrt() / scale)
    distances = {"mean": mean, "std": spread, "frechet": math.hypot(mean, spread)}
    if reference.quantiles is not None:
        low, high = (_quantile(reference.quantiles, level) for level in (0.05, 0.95))
        distances["coverage"] = float(((values >= low) & (values <= high)).double().mean())
    return distances


def _quantile(quantiles: Tensor, level: float) -> Tensor:
    """The quantile of a level, between the nearest two of the levels (i + ½) / Q."""
    place = min(max(level * len(quantiles) - 0.5, 0.0), len(quantiles) - 1.0)
    lower = min(int(place), len(quantiles) - 2)
    return torch.lerp(quantiles[lower], quantiles[lower + 1], place - lower)


def _classes(reference: Reference, outputs: Tensor) -> dict[str, float]:
    probs = outputs.softmax(-1).mean(0)
    same = probs.argmax(-1) == reference.mean.argmax(-1)
    distance = (probs - reference.mean).abs().sum(-1) / 2
    return {"tv": float(distance.mean()), "agreement": float(same.float().mean())}


def _curves(problem: Problem, reference: Reference, outputs: Tensor) -> dict[str, float]:
    likelihood, quantiles = problem.likelihood, reference.quantiles
    if not isinstance(likelihood, Gaussian):  # learned noise is an output of its own
        return {}
    assert quantiles is not None
    f, g = outputs.squeeze(-1), quantiles.squeeze(-1)
    apart = (f.mean(0) - reference.mean.squeeze(-1)).abs()
    near = apart < reference.std.squeeze(-1)
    return {
        "tv": float(total_variation_of_mixtures(f, g, likelihood.noise_std).mean()),
        "agreement": float(near.float().mean()),
        "calibration": _miscalibration(f, g),
    }


def total_variation_of_mixtures(f: Tensor, g: Tensor, noise: float) -> Tensor:
    """½ ∫ |p - q| of mixtures of Gaussians centred at f [M, B] and at g [Q, B], to [B]."""
    low, high = min(f.min(), g.min()) - 5 * noise, max(f.max(), g.max()) + 5 * noise
    count = int((high - low) / (noise / 5)) + 2
    y = torch.linspace(float(low), float(high), count)

    def density(centres: Tensor) -> Tensor:
        scaled = (y[:, None, None] - centres) / noise
        return torch.exp(-scaled.square() / 2).mean(1) / (noise * math.sqrt(2 * math.pi))

    return (density(f) - density(g)).abs().sum(0) * float(y[1] - y[0]) / 2


def _miscalibration(f: Tensor, g: Tensor) -> float:
    """Mean over levels of |share of the posterior in the members' interval - level|."""
    mean, std = f.mean(0), f.std(0) if len(f) > 1 else torch.zeros_like(f[0])
    errors = []
    for level in _LEVELS:
        reach = NormalDist().inv_cdf(0.5 + level / 2) * std
        held = ((g - mean).abs() <= reach).float().mean()
        errors.append(abs(float(held) - level))
    return sum(errors) / len(errors)


def mean_error(x: Tensor, mean: Tensor, covariance: Tensor) -> float:
    """Norm of the error of the mean, in units of the posterior's standard deviation, √tr S."""
    return float((x.mean(0) - mean.to(x)).norm() / covariance.to(x).trace().sqrt())


def covariance_error(x: Tensor, covariance: Tensor) -> float:
    """|C - S| / |S| by the Frobenius norm."""
    target = covariance.to(x)
    return float((torch.cov(x.mT, correction=0) - target).norm() / target.norm())


def sliced_wasserstein(x: Tensor, y: Tensor, directions: int = 200, seed: int = 0) -> float:
    r"""Root mean square, over random directions, of the Wasserstein-2 distance of the projections.

    In one dimension $W_2² = ∫ (F^{-1} - G^{-1})²$, by the quantiles of both.
    """
    random = torch.Generator().manual_seed(seed)
    axes = torch.randn(x.shape[1], directions, generator=random).to(x)
    axes = axes / axes.norm(dim=0)
    levels = (torch.arange(512, dtype=x.dtype) + 0.5) / 512
    # The quantile function of M points is a step function with steps of 1 / M.
    stairs = [_staircase(z @ axes, levels) for z in (x, y.to(x))]
    return float((stairs[0] - stairs[1]).square().mean().sqrt())


def _staircase(values: Tensor, levels: Tensor) -> Tensor:
    index = (levels * len(values)).long().clamp(max=len(values) - 1)
    return values.sort(0).values[index]


def mmd(x: Tensor, y: Tensor) -> float:
    """Maximum mean discrepancy with a Gaussian kernel as wide as the median distance in y."""
    y = y.to(x)
    h2 = torch.nn.functional.pdist(y).square().median()

    def mean_kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).square() / (2 * h2)).mean()

    square = mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y)
    return float(square.clamp(min=0).sqrt())


def stein_kernel(x: Tensor, scores: Tensor, h2: float) -> Tensor:
    """u(x_i, x_j) [M, M] of particles [M, D] with scores [M, D]."""
    centred = x - x.mean(0)
    gram, cross = centred @ centred.mT, scores @ centred.mT
    squares = gram.diagonal()
    d2 = (squares[:, None] + squares - 2 * gram).clamp(min=0)
    u = 1 + d2 / h2
    # (s_i - s_j)·(x_i - x_j), from inner products alone.
    self_products = cross.diagonal()
    along = self_products[:, None] + self_products - cross - cross.mT
    trace = x.shape[1] * u.pow(-1.5) / h2 - 3 * u.pow(-2.5) * d2 / h2**2
    return scores @ scores.mT * u.rsqrt() + along * u.pow(-1.5) / h2 + trace


def squared_width(x: Tensor) -> float:
    """The median of the squared distances between points [M, D]: a squared width of a kernel."""
    return float(torch.nn.functional.pdist(x.double()).square().median().clamp(min=1e-300))


def ksd2(x: Tensor, scores: Tensor, h2: float | None = None) -> float:
    r"""The squared kernel Stein discrepancy, unbiased: its mean is 0 for exact draws.

    $$ \frac{1}{M (M - 1)} \sum_{i \neq j} u(x_i, x_j) $$

    The value can be negative. With the diagonal, the mean over all pairs would rank exact draws
    behind members at modes, where scores are small (Liu, Lee & Jordan, 2016, arXiv 1602.03253).

    Args:
        x: particles [M, D].
        scores: gradients of the log density at the particles [M, D].
        h2: squared width of the kernel, the same for all clouds that are compared; by default the
            `squared_width` of these particles.
    """
    if len(x) < 2 or x.shape != scores.shape:
        raise DataError(
            f"a Stein discrepancy needs at least two particles, each with a score, not shapes "
            f"{tuple(x.shape)} and {tuple(scores.shape)}"
        )
    x, scores = x.double(), scores.double()
    u = stein_kernel(x, scores, squared_width(x) if h2 is None else h2)
    return float((u.sum() - u.trace()) / (len(x) * (len(x) - 1)))


def ksd2_of_ensemble(
    ensemble: Ensemble, posterior: Posterior, batch: Batch, h2: float | None = None
) -> float:
    """`ksd2` of a trained ensemble, with all data in one batch."""
    velocity, _ = forces(ensemble, posterior, None, batch)
    weights = [rows(tensor.detach()) for tensor in ensemble.weights.values()]
    scores = [posterior.n * rows(velocity[name]) for name in ensemble.weights]
    return ksd2(torch.cat(weights, 1), torch.cat(scores, 1), h2)
