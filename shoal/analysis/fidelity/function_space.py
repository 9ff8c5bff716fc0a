r"""Distances between predictions: what an ensemble says beside what the posterior says.

All are means over inputs. For a regression the predictive distribution at an input is the mixture
of the members' Gaussians, and total variation is an integral over targets.
"""

import math
from statistics import NormalDist

import torch
from torch import Tensor

from shoal.analysis.fidelity.problems import Problem
from shoal.analysis.fidelity.reference import Reference
from shoal.inference.likelihoods import Gaussian

__all__ = ["function_distances", "total_variation_of_mixtures"]

_LEVELS = tuple(step / 10 for step in range(1, 10))


def function_distances(problem: Problem, reference: Reference, flat: Tensor) -> dict[str, float]:
    """Every distance, `NAME/on` at inputs like the data and `NAME/off` at others.

    `tv`: total variation of the predictive distributions. `agreement`: share of inputs with the
    same most probable class, or whose predicted mean lies within the posterior's own standard
    deviation. `mean` and `std`: error of mean and standard deviation over members, as a share of
    the posterior's standard deviation. `frechet`: both together, √(mean² + std²), which is the
    Wasserstein distance of the Gaussians with these moments. `calibration`: mean error of the share
    of the posterior that the members' central intervals hold (regression alone).
    """
    found = {}
    places = {"on": slice(0, len(problem.on)), "off": slice(len(problem.on), None)}
    for place, chosen in places.items():
        inputs = problem.on if place == "on" else problem.off
        outputs = problem.apply(flat, inputs)
        part = Reference(
            reference.draws, reference.mean[chosen], reference.std[chosen],
            None if reference.quantiles is None else reference.quantiles[:, chosen], {},
        )  # fmt: skip
        distances = _moments(problem, part, outputs)
        distances |= _classes(part, outputs) if problem.classes else _curves(problem, part, outputs)
        found |= {f"{name}/{place}": value for name, value in distances.items()}
    return found


def _moments(problem: Problem, reference: Reference, outputs: Tensor) -> dict[str, float]:
    values = outputs.softmax(-1) if problem.classes else outputs
    scale = reference.std.square().mean().sqrt()
    std = values.std(0) if len(values) > 1 else torch.zeros_like(values[0])
    mean = float((values.mean(0) - reference.mean).square().mean().sqrt() / scale)
    spread = float((std - reference.std).square().mean().sqrt() / scale)
    return {"mean": mean, "std": spread, "frechet": math.hypot(mean, spread)}


def _classes(reference: Reference, outputs: Tensor) -> dict[str, float]:
    probs = outputs.softmax(-1).mean(0)
    same = probs.argmax(-1) == reference.mean.argmax(-1)
    distance = (probs - reference.mean).abs().sum(-1) / 2
    return {"tv": float(distance.mean()), "agreement": float(same.float().mean())}


def _curves(problem: Problem, reference: Reference, outputs: Tensor) -> dict[str, float]:
    likelihood, quantiles = problem.likelihood, reference.quantiles
    assert isinstance(likelihood, Gaussian) and quantiles is not None
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
