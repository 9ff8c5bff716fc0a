r"""Gaussian priors on the weights and their evidence, by Laplace's method.

For a quadratic log-likelihood and a prior $N(μ, σ_l^2)$ with one scale per layer, the integral over
the weights has a closed form. With $a = θ - μ$, $P = H + σ^{-2}$ and $b = g - σ^{-2} a$,

$$ \log Z = \log L(θ) - \tfrac12 \log|1 + σ^2 H| + \tfrac12 b^T P^{-1} b - \tfrac12 a^T σ^{-2} a, $$

and the posterior is $N(θ + P^{-1} b, P^{-1})$. With a full H the expansion point need not be the
maximum. With a diagonal H it is treated as the maximum, b = 0. The gradient g is that of all data:
scaled from n of N points it would be noise, and its Newton step would gain about d (N/n - 1) / 2
nats at the maximum itself. H may be scaled from n points. It then raises log Z by about
d (d + 1) / 4n nats for d weights that the data determine, and the Newton step has its error too.

The centre of the prior is the member itself, $μ = θ$ (a point mass at scale zero), or zero, the
usual prior of a Bayesian network. The members are the components of a mixture with equal masses, so
$Z = \frac1M \sum_m Z_m$. For the prior at zero, every member is one mode of the same integral: Z is
the mean over modes, at most log M below the sum over modes.

Other libraries expand around the maximum under a prior at zero, one network at a time. Here the
prior can be centred at the members, all members share its scales, and the gradient counts.
MacKay (1992); Daxberger et al. (2021), arXiv 2106.14806.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoal.analysis.evidence.curvature import Expansion
from shoal.core.optional import require
from shoal.core.structure import Inputs

__all__ = ["Centre", "Laplace", "fit_laplace", "log_evidences"]

Centre = Literal["members", "zero"]

_LOG_SCALES = (-14.0, 7.0)


@dataclass(frozen=True)
class Laplace:
    """A mixture of Gaussian posteriors, one around each member.

    Attributes:
        expansions: the likelihood around each member.
        log_scales: log standard deviations of the prior, one per layer [L].
        centre: centre of the prior.
    """

    expansions: Sequence[Expansion]
    log_scales: Tensor
    centre: Centre

    @property
    def log_evidences(self) -> Tensor:
        """log Z of each component [M]."""
        return log_evidences(self.expansions, self.log_scales, self.centre)

    @property
    def scales(self) -> dict[str, float]:
        """Standard deviation of the prior in each layer."""
        return dict(zip(self.expansions[0].layers, self.log_scales.exp().tolist(), strict=True))

    def posteriors(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each component, in its basis, both [M, d]."""
        terms = [_terms(e, self.log_scales, self.centre) for e in self.expansions]
        pairs = list(zip(self.expansions, terms, strict=True))
        means = [e.theta + pull / precision for e, (_, pull, precision) in pairs]
        return torch.stack(means), torch.stack([p.rsqrt() for _, _, p in terms])

    def draws(self, x: Inputs, count: int, generator: torch.Generator) -> Tensor:
        """Linearised outputs of draws from each component [M * count, B, C], member by member."""
        outputs = []
        for expansion, mean, std in zip(self.expansions, *self.posteriors(), strict=True):
            noise = torch.randn((count, len(std)), generator=generator, dtype=std.dtype)
            outputs.append(expansion.outputs(x, mean - expansion.theta + std * noise))
        return torch.cat(outputs)


def log_evidences(expansions: Sequence[Expansion], log_scales: Tensor, centre: Centre) -> Tensor:
    """log Z of each component [M]; differentiable in the scales."""
    components = []
    for expansion in expansions:
        offset, pull, precision = _terms(expansion, log_scales, centre)
        variance = (2 * log_scales)[expansion.layer].exp()
        volume = torch.log1p(variance * expansion.curvature)
        terms = pull.square() / precision - offset.square() / variance - volume
        components.append(expansion.log_likelihood + 0.5 * terms.sum())
    return torch.stack(components)


def fit_laplace(expansions: Sequence[Expansion], centre: Centre) -> Laplace:
    """The prior scales, one per layer, that maximise the evidence of the mixture."""
    optimize = require("scipy.optimize", extra="evidence")

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        logs = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        value = -log_evidences(expansions, logs, centre).logsumexp(0)
        (slope,) = torch.autograd.grad(value, logs)
        return float(value.detach()), slope.numpy()

    starts = (-4.0, -1.0, 0.0) if centre == "members" else (-1.0, 0.0)
    layers = len(expansions[0].layers)
    tried = [
        optimize.minimize(
            loss,
            np.full(layers, start),
            jac=True,
            method="L-BFGS-B",
            bounds=[_LOG_SCALES] * layers,
        )
        for start in starts
    ]
    best = min(tried, key=lambda result: result.fun)
    return Laplace(expansions, torch.from_numpy(np.array(best.x)), centre)


def _terms(
    expansion: Expansion, log_scales: Tensor, centre: Centre
) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and P, all diagonal [d]."""
    inverse = (-2 * log_scales)[expansion.layer].exp()
    theta = expansion.theta
    offset = torch.zeros_like(theta) if centre == "members" else theta
    pull = expansion.gradient - inverse * offset
    pull = torch.zeros_like(pull) if expansion.at_mode else pull
    return offset, pull, expansion.curvature + inverse
