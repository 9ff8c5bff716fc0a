"""The flow's bound on a conjugate model: never above the evidence, and close to it."""

import math

import pytest
import torch
from torch.distributions import MultivariateNormal

from shoal.analysis.evidence.flow import fit_flow
from shoal.core.errors import ConfigError

NOISE, SCALE, D = 0.5, 0.8, 3


def conjugate(seed=0):
    """Two regressions with the same weights' prior, their evidences, and their log likelihood."""
    g = torch.Generator().manual_seed(seed)
    Φ = torch.randn(2, 9, D, generator=g, dtype=torch.float64)
    y = torch.randn(2, 9, generator=g, dtype=torch.float64)

    def log_likelihood(c, step):
        residual = y - torch.einsum("mnd,smd->smn", Φ, c)
        constant = math.log(NOISE * math.sqrt(2 * math.pi))
        return (-0.5 * (residual / NOISE).square() - constant).sum(-1)

    covariance = NOISE**2 * torch.eye(9) + SCALE**2 * Φ @ Φ.mT
    evidence = MultivariateNormal(torch.zeros(9, dtype=torch.float64), covariance).log_prob(y)
    return log_likelihood, evidence, Φ, y


def prior_start():
    return torch.zeros(2, D, dtype=torch.float64), torch.full((2, D), SCALE, dtype=torch.float64)


@pytest.fixture(scope="module")
def fitted():
    pytest.importorskip("zuko", reason="the flow is made of zuko's couplings")
    log_likelihood, evidence, Φ, y = conjugate()
    found = fit_flow(
        log_likelihood, *prior_start(), SCALE, learn_prior=False, steps=500, draws=16, lr=1e-2,
        final_draws=2048, couplings=4,
    )  # fmt: skip
    return found, evidence, Φ, y


def test_the_bound_is_never_above_the_evidence_and_close_to_it(fitted):
    found, evidence, *_ = fitted
    assert bool((found.elbo <= evidence + 3 * found.error).all())
    assert bool((found.elbo >= evidence - 0.1).all())
    assert float(found.error.max()) < 0.02


def test_draws_are_as_near_the_posterior_as_the_bound_says(fitted):
    """Talagrand: the Wasserstein distance to a Gaussian is at most std sqrt(2 KL), KL the gap.

    Means and standard deviations are no further apart than that.
    """
    found, evidence, Φ, y = fitted
    draws = found.draw(20_000)
    for member in range(2):
        S = torch.linalg.inv(Φ[member].T @ Φ[member] / NOISE**2 + torch.eye(D) / SCALE**2)
        mean = S @ Φ[member].T @ y[member] / NOISE**2
        gap = float(evidence[member] - found.elbo[member] + 3 * found.error[member])
        reach = math.sqrt(2 * gap * float(torch.linalg.eigvalsh(S)[-1])) + 0.01
        assert float((draws[:, member].mean(0) - mean).norm()) < reach
        spread = draws[:, member].std(0) - S.diagonal().sqrt()
        assert float(spread.abs().max()) < reach


def test_the_seed_alone_decides_the_bound_and_the_draws():
    pytest.importorskip("zuko", reason="the flow is made of zuko's couplings")
    log_likelihood, *_ = conjugate()
    one, two, other = (
        fit_flow(log_likelihood, *prior_start(), SCALE, steps=3, seed=seed) for seed in (0, 0, 1)
    )
    torch.manual_seed(1)
    draws = one.draw(5)
    torch.manual_seed(2)
    assert torch.equal(two.elbo, one.elbo) and torch.equal(two.draw(5), draws)
    assert not torch.equal(other.draw(5), draws)


def test_before_the_first_step_the_bound_is_that_of_the_gaussian_it_begins_at():
    """With q at the exact posterior the bound is the evidence itself, draw by draw."""
    pytest.importorskip("zuko", reason="the flow is made of zuko's couplings")
    log_likelihood, _, Φ, y = conjugate()
    log_likelihood = one_at_a_time(y)
    precision = 1 / NOISE**2 + 1 / SCALE**2
    loc = y[:, :D] / NOISE**2 / precision
    scale = torch.full_like(loc, precision**-0.5)
    found = fit_flow(log_likelihood, loc, scale, SCALE, steps=0)
    total = math.sqrt(NOISE**2 + SCALE**2)
    evidence = torch.distributions.Normal(0.0, total).log_prob(y[:, :D]).sum(-1)
    torch.testing.assert_close(found.elbo, evidence)
    assert float(found.error.max()) < 1e-9


def one_at_a_time(y):
    def log_likelihood(c, step):
        return torch.distributions.Normal(c, NOISE).log_prob(y[:, :D]).sum(-1)

    return log_likelihood


def test_a_learned_prior_goes_towards_the_maximum_of_the_likelihood_and_not_beyond():
    """T2: the bound ascends from the evidence of the Gaussian prior towards log L*."""
    pytest.importorskip("zuko", reason="the flow is made of zuko's couplings")
    log_likelihood, evidence, Φ, y = conjugate()
    best = torch.linalg.lstsq(Φ, y.unsqueeze(-1)).solution[..., 0]
    top = log_likelihood(best[None], None)[0]
    found = fit_flow(log_likelihood, *prior_start(), SCALE, steps=200, draws=8, lr=1e-2)
    assert bool((found.elbo > evidence + 0.5).all())
    assert bool((found.elbo <= top + 3 * found.error).all())


def test_without_the_library_it_says_what_to_type(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zuko.flows", None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[evidence\]'"):
        fit_flow(conjugate()[0], *prior_start(), SCALE)
