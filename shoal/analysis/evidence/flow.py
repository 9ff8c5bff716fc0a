r"""A normalising flow as prior on the last layer, learned by the evidence lower bound.

For each member, with fixed features and weights c of the last layer,

$$ \log p(D | π) \ge E_{q(c)} [ \log L(c) + \log π(c) - \log q(c) ], $$

and both π and q are flows that maximise this bound. They start at the Gaussian prior and the
Laplace posterior of a Bayesian last layer. At convergence π is a point mass at the maximum of the
likelihood, the ensemble, which has the largest bound. After a finite number of steps π lies between
the two. The flows are affine couplings (Dinh, Sohl-Dickstein & Bengio 2017) of the library zuko,
conditioned on the member. Villecroze et al. (2025), arXiv 2505.15888.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.analysis.evidence.curvature import Expansion, features_of
from shoal.core.optional import require
from shoal.core.random import derive, generator, seeded
from shoal.data.dataset import Split
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import as_points

__all__ = ["FlowFit", "LastLayerLikelihood", "fit_flow"]


@dataclass(frozen=True)
class LastLayerLikelihood:
    """log L of weights of the last layer, in the eigenbasis of each member.

    Attributes:
        features: inputs of the last layer [M, N, F].
        y: targets.
        bases: eigenvectors [M, d, d].
        likelihood: likelihood of the outputs.
        outputs: C.
        batch: data points per training step, scaled to all data.
        seed: seed of the batches.
    """

    features: Tensor
    y: Tensor
    bases: Tensor
    likelihood: Likelihood
    outputs: int
    batch: int
    seed: int

    @classmethod
    def of(
        cls, expansions: Sequence[Expansion], likelihood: Likelihood, data: Split, seed: int
    ) -> "LastLayerLikelihood":
        """The likelihood in single precision; features of every member are computed once."""
        pairs = [features_of(e.module, data.x) for e in expansions]
        bases = torch.stack([e.basis for e in expansions if e.basis is not None])
        features = torch.stack([phi for phi, _ in pairs]).float()
        assert data.y is not None, "there is no likelihood of data without targets"
        # features and outputs [N, ..., F] of every site, without ignored targets
        features, y = as_points(likelihood, features, data.y)
        C = pairs[0][1].shape[-1]
        y = y.float() if y.is_floating_point() else y
        return cls(features, y, bases.float(), likelihood, C, 256, seed)

    def __call__(self, c: Tensor, step: int | None) -> Tensor:
        N = len(self.y)
        index = torch.arange(N) if step is None or N <= self.batch else self._some(step)
        weights = torch.einsum("mde,sme->smd", self.bases, c)
        F = self.features.shape[-1]
        W = weights[..., : self.outputs * F].unflatten(-1, (self.outputs, F))
        f = torch.einsum("mbf,smcf->smbc", self.features[:, index], W)
        bias = weights[..., None, self.outputs * F :]
        f = f + bias if bias.shape[-1] else f
        return self.likelihood.log_prob(f, self.y[index]).sum(-1) * (N / len(index))

    def _some(self, step: int) -> Tensor:
        source = generator(self.seed, "flow batches", step)
        return torch.randint(len(self.y), (self.batch,), generator=source)


LogLikelihood = Callable[[Tensor, int | None], Tensor]
"""From weights [S, M, d] and a step (None for all data) to log-likelihoods [S, M]."""

HIDDEN = 32
"""Hidden units of a coupling."""


@dataclass(frozen=True)
class FlowFit:
    """The posterior of the last layer of each member, and its bound.

    Attributes:
        elbo: bound on the log evidence of each member [M], mean over draws.
        error: standard error of the bound [M].
        draw: draws of the weights from q [count, M, d], the same on every call.
    """

    elbo: Tensor
    error: Tensor
    draw: Callable[[int], Tensor]


@dataclass(frozen=True)
class _Affine:
    """A flow of standardised numbers, with location and scale per member."""

    flow: Any
    loc: Tensor
    scale: Tensor
    who: Tensor

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        u, log_q = self.flow(self.who).rsample_and_log_prob((count,))
        return self.loc + self.scale * u, log_q - self.scale.log().sum(-1)

    def log_prob(self, c: Tensor) -> Tensor:
        return self.flow(self.who).log_prob((c - self.loc) / self.scale) - self.scale.log().sum(-1)


def fit_flow(
    log_likelihood: LogLikelihood,
    loc: Tensor,
    scale: Tensor,
    prior_scale: float,
    *,
    learn_prior: bool = True,
    steps: int = 200,
    draws: int = 2,
    lr: float = 2e-3,
    final_draws: int = 64,
    couplings: int = 2,
    seed: int = 0,
) -> FlowFit:
    """Maximise the bound over the posterior flow and, by default, the prior flow.

    Args:
        log_likelihood: log-likelihood of the last layer's weights [S, M, d]; see `LogLikelihood`.
        loc: initial mean of q [M, d].
        scale: initial standard deviation of q [M, d].
        prior_scale: initial standard deviation of π.
        learn_prior: also train π.
        steps: number of Adam steps.
        draws: draws from q per step.
        lr: learning rate.
        final_draws: draws for the final value of the bound.
        couplings: couplings per flow.
        seed: fixes all randomness.
    """
    with seeded(derive(seed, "flow")):
        at_zero = torch.zeros_like(loc), torch.full_like(loc, prior_scale)
        q, prior = _made(loc, scale, couplings), _made(*at_zero, couplings)
        learned = [*q.flow.parameters(), *(prior.flow.parameters() if learn_prior else [])]
        optimizer = torch.optim.Adam(learned, lr=lr)
        for step in range(steps):
            optimizer.zero_grad()
            (-_bound(log_likelihood, q, prior, draws, step).mean(0).sum()).backward()
            torch.nn.utils.clip_grad_norm_(learned, 100.0 * len(loc))
            optimizer.step()
        with torch.no_grad():
            parts = [_bound(log_likelihood, q, prior, 8, None) for _ in range(-(-final_draws // 8))]
    bound = torch.cat(parts).double()
    error = bound.std(0) / math.sqrt(len(bound))

    def draw(count: int) -> Tensor:
        with seeded(derive(seed, "flow draws")), torch.no_grad():
            return q.draw(count)[0]

    return FlowFit(bound.mean(0), error, draw)


def _bound(
    log_likelihood: LogLikelihood, q: _Affine, prior: _Affine, draws: int, step: int | None
) -> Tensor:
    """One term of the bound per draw and member [draws, M]."""
    c, log_q = q.draw(draws)
    return log_likelihood(c, step) + prior.log_prob(c) - log_q


def _made(loc: Tensor, scale: Tensor, couplings: int) -> _Affine:
    """A flow that is initially the identity."""
    members, size = loc.shape
    flows = require("zuko.flows", extra="evidence")
    flow = flows.NICE(size, members, transforms=couplings, hidden_features=(HIDDEN,)).to(loc)
    for coupling in flow.transform.transforms:
        torch.nn.init.zeros_(coupling.hyper[-1].weight)
        torch.nn.init.zeros_(coupling.hyper[-1].bias)
    return _Affine(flow, loc, scale, torch.eye(members).to(loc))
