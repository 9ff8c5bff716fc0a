"""Laplace's evidence and the flow's bound beside the exact integral.

A linear regression has a Gaussian integral. For a logistic regression with two inputs, importance
sampling from wide Student distributions gives the integral with a small, known error.
"""

import math

import torch
from torch import Tensor, nn

import shoal
from shoal.analysis.evidence.curvature import Expansion, last_layer
from shoal.analysis.evidence.laplace import fit_laplace
from shoal.core.random import generator
from shoal.data.dataset import Split
from shoal.inference.likelihoods import Likelihood

__all__ = ["differences"]

NOISE, DEGREES, DRAWS = 0.5, 5.0, 50_000


def differences(name: str, seed: int) -> dict[str, float]:
    """Log evidence minus the exact one, for Gaussians at the member and at zero."""
    kind, points = name.removeprefix("exact ").split(", N = ")
    random = generator(seed, "exact", kind, int(points))
    x = torch.randn(int(points), 2, generator=random, dtype=torch.float64)
    layer = nn.Linear(2, 1 if kind == "linear" else 2).double()
    signal = x @ torch.tensor([1.0, -2.0], dtype=torch.float64) + 0.3
    if kind == "linear":
        noise = torch.randn(len(x), generator=random, dtype=torch.float64)
        y, likelihood = signal + NOISE * noise, shoal.likelihoods.Gaussian(NOISE)
    else:
        draws = torch.rand(len(x), generator=random, dtype=torch.float64)
        y, likelihood = (draws < signal.sigmoid()).long(), shoal.likelihoods.Categorical()
    _maximise(layer, likelihood, x, y)
    own = float(likelihood.log_prob(layer(x)[None], y).sum().detach())
    expansion = last_layer(layer, likelihood, Split(x, y), own)
    found = {}
    for centre in ("members", "zero"):
        fitted = fit_laplace([expansion], centre)
        laplace = float(fitted.log_evidences)
        width = float(fitted.log_scales.exp())
        middle = torch.zeros_like(expansion.theta) if centre == "zero" else expansion.theta
        if kind == "linear":
            exact, error = _gaussian_integral(expansion, x, y, middle, width), 0.0
        else:
            exact, error = _sampled_integral(expansion, likelihood, x, y, middle, width, random)
        found |= {
            f"{centre}/exact": exact, f"{centre}/laplace minus exact": laplace - exact,
            f"{centre}/sampling error": error, f"{centre}/width": width,
        }  # fmt: skip
    return found | {"log likelihood": own}


def _maximise(layer: nn.Linear, likelihood: Likelihood, x: Tensor, y: Tensor) -> None:
    """A member as training leaves it: near the maximum of the penalised likelihood."""
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in layer.parameters()) / 2
        value = penalty - likelihood.log_prob(layer(x)[None], y).sum()
        value.backward()
        return value

    optimizer.step(loss)


def _gaussian_integral(e: Expansion, x: Tensor, y: Tensor, middle: Tensor, width: float) -> float:
    """log N(y | Φ μ, σ² + s² Φ Φᵀ)."""
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    assert e.basis is not None
    covariance = NOISE**2 * torch.eye(len(x), dtype=x.dtype) + width**2 * design @ design.mT
    centre = design @ (e.basis @ middle)
    return float(torch.distributions.MultivariateNormal(centre, covariance).log_prob(y))


def _sampled_integral(
    e: Expansion,
    likelihood: Likelihood,
    x: Tensor,
    y: Tensor,
    middle: Tensor,
    width: float,
    random: torch.Generator,
) -> tuple[float, float]:
    """Log of the integral and its standard error, by importance sampling."""
    assert e.basis is not None
    precision = e.curvature + width**-2
    mean = e.theta + (e.gradient - (e.theta - middle) / width**2) / precision
    scale = 1.3 * precision.rsqrt()
    shape = (DRAWS, len(mean))
    normal = torch.randn(shape, generator=random, dtype=torch.float64)
    chi = torch.distributions.Chi2(torch.tensor(DEGREES, dtype=torch.float64))
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=random)))
        stretch = (DEGREES / chi.sample((DRAWS, 1))).sqrt()
    c = mean + scale * normal * stretch
    d = len(mean)
    z2 = ((c - mean) / scale).square().sum(1)
    log_q = (
        math.lgamma((DEGREES + d) / 2) - math.lgamma(DEGREES / 2)
        - d / 2 * math.log(DEGREES * math.pi) - scale.log().sum()
        - (DEGREES + d) / 2 * torch.log1p(z2 / DEGREES)
    )  # fmt: skip
    weights = c @ e.basis.mT
    outputs = x @ weights[:, :4].reshape(-1, 2, 2).mT + weights[:, None, 4:]
    log_p = likelihood.log_prob(outputs, y).sum(-1)
    prior = -((c - middle) / width).square().sum(1) / 2 - d * math.log(
        width * math.sqrt(2 * math.pi)
    )
    terms = log_p + prior - log_q
    total = terms.logsumexp(0)
    share = (terms - total).exp()
    return float(total - math.log(DRAWS)), float((share.square().sum() - 1 / DRAWS).sqrt())
