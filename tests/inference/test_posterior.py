"""The posterior of linear models, known in closed form, reached by the members."""

import math

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.interaction.bandwidths import Fixed

pytestmark = pytest.mark.usefixtures("double")

NOISE, PRIOR = 0.5, 1.2


class Regression:
    """Conjugate Bayesian linear regression: w ~ N(0, PRIOR²), y = Phi w + N(0, NOISE²)."""

    def __init__(self, points=20, dimensions=3, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.Phi = torch.randn(points, dimensions, generator=generator)
        self.y = torch.randn(points, 1, generator=generator)
        self.precision = self.Phi.mT @ self.Phi / NOISE**2 + torch.eye(dimensions) / PRIOR**2
        self.S = torch.linalg.inv(self.precision)
        self.mean = (self.S @ self.Phi.mT @ self.y / NOISE**2).flatten()
        self.n = points

    def posterior(self, temperature=1.0, n=None):
        likelihood, prior = shoal.likelihoods.Gaussian(NOISE), shoal.priors.Gaussian(PRIOR)
        return shoal.Posterior(likelihood, prior, n or self.n, temperature)

    def ensemble(self, members, seed=0):
        width = self.Phi.shape[1]
        return shoal.Ensemble.init(lambda: nn.Linear(width, 1, bias=False), members, seed)

    def settle(self, ensemble, repulsion, steps, temperature=1.0, pace=0.9):
        """Gradient flow preconditioned by the posterior covariance: every mode at one pace."""
        target = self.posterior(temperature)
        for _ in range(steps):
            velocity, _ = shoal.forces(ensemble, target, repulsion, (self.Phi, self.y))
            with torch.no_grad():
                ensemble.weights["weight"] += pace * self.n * velocity["weight"] @ self.S
        return ensemble.weights["weight"].detach().squeeze(1)


def test_temperature_zero_is_ridge_regression():
    problem = Regression()
    penalty = NOISE**2 / PRIOR**2
    Phi, y = problem.Phi, problem.y
    ridge = torch.linalg.solve(Phi.mT @ Phi + penalty * torch.eye(3), Phi.mT @ y).flatten()
    for name in ("kde", "f-kde", "ensemble"):
        repulsion = shoal.methods.get(name).repulsion
        w = problem.settle(problem.ensemble(4), repulsion, 30, temperature=0.0)
        torch.testing.assert_close(w, ridge.expand(4, 3), rtol=0, atol=1e-8)


def test_temperature_zero_is_ridge_regression_by_plain_gradient_steps():
    problem = Regression()
    ensemble = problem.ensemble(3)
    curvature = torch.linalg.eigvalsh(problem.precision) / problem.n
    lr = 2 / (curvature[0] + curvature[-1])
    for _ in range(80):
        velocity, _ = shoal.forces(ensemble, problem.posterior(0.0), None, (problem.Phi, problem.y))
        with torch.no_grad():
            ensemble.weights["weight"] += lr * velocity["weight"]
    w = ensemble.weights["weight"].detach().squeeze(1)
    torch.testing.assert_close(w, problem.mean.expand(3, 3), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["kde", "sge", "svgd", "f-kde"])
def test_the_mean_of_the_members_is_the_posterior_mean(name):
    problem = Regression()
    repulsion = shoal.methods.get(name).repulsion
    pace = 0.9 if name != "svgd" else 1.2
    w = problem.settle(problem.ensemble(2), repulsion, 150, pace=pace * 0.5)
    torch.testing.assert_close(w.mean(0), problem.mean, rtol=0, atol=1e-3)
    assert (w[0] - w[1]).norm() > 0.1 * problem.S.trace().sqrt()


@pytest.mark.parametrize("h2", [0.25, 0.5, 0.9])
def test_in_whitened_coordinates_the_posterior_is_a_spring(h2):
    """z = S^-1/2 w has a unit normal posterior, so two members settle at a known distance."""
    problem = Regression()
    eigenvalues, U = torch.linalg.eigh(problem.S)
    root = U @ torch.diag(eigenvalues.rsqrt()) @ U.mT
    space = shoal.spaces.Rotated(shoal.spaces.Weights(), root)
    repulsion = shoal.Repulsion(space, shoal.kernels.RBF(), Fixed(h2))
    w = problem.settle(problem.ensemble(2), repulsion, 300, pace=0.5)
    z = (w - problem.mean) @ root
    a2 = h2 / 2 * math.log(2 / h2 - 1)
    torch.testing.assert_close(z[0], -z[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(z.square().sum(1), torch.full((2,), a2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["ensemble", "kde", "sge", "ssge", "svgd"])
def test_data_given_twice_are_twice_as_many_data(name):
    problem = Regression()
    ensemble = problem.ensemble(3)
    repulsion = shoal.methods.get(name).repulsion
    twice = torch.cat([problem.Phi] * 2), torch.cat([problem.y] * 2)
    target = problem.posterior(n=2 * problem.n)
    one, _ = shoal.forces(ensemble, target, repulsion, (problem.Phi, problem.y))
    two, _ = shoal.forces(ensemble, target, repulsion, twice)
    torch.testing.assert_close(one["weight"], two["weight"], rtol=1e-12, atol=1e-13)


def test_the_posterior_of_doubled_data():
    """N -> 2N moves a cold ensemble to the ridge solution with half the penalty."""
    problem = Regression()
    ensemble = problem.ensemble(1)
    precision = 2 * problem.Phi.mT @ problem.Phi / NOISE**2 + torch.eye(3) / PRIOR**2
    mean = torch.linalg.solve(precision, 2 * problem.Phi.mT @ problem.y / NOISE**2)
    with torch.no_grad():
        ensemble.weights["weight"].copy_(mean.reshape(1, 1, 3))
    target = problem.posterior(n=2 * problem.n)
    velocity, _ = shoal.forces(ensemble, target, None, (problem.Phi, problem.y))
    torch.testing.assert_close(velocity["weight"], torch.zeros(1, 1, 3), rtol=0, atol=1e-12)


def test_the_drive_is_the_score_of_the_posterior():
    problem = Regression()
    ensemble = problem.ensemble(5)
    velocity, _ = shoal.forces(ensemble, problem.posterior(), None, (problem.Phi, problem.y))
    w = ensemble.weights["weight"].detach().squeeze(1)
    score = -(w - problem.mean) @ problem.precision
    torch.testing.assert_close(problem.n * velocity["weight"].squeeze(1), score)


@pytest.mark.parametrize("h2", [0.06, 0.12])
def test_many_functions_have_the_posterior_law_less_the_kernel(h2):
    """One weight, one datum: outputs repelled by a fixed kernel settle as N(m_f, S_f - h²)."""
    members, phi, y = 120, 1.7, 0.6
    S = 1 / (phi**2 / NOISE**2 + 1 / PRIOR**2)
    mean, variance = phi * S * phi * y / NOISE**2, phi**2 * S
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(1, 1, bias=False), members)
    quantiles = (torch.arange(members) + 0.5) / members
    start = torch.special.ndtri(quantiles) * 0.3 + 0.1
    with torch.no_grad():
        ensemble.weights["weight"].copy_(start.reshape(members, 1, 1))
    repulsion = shoal.Repulsion(shoal.spaces.Outputs(), shoal.kernels.RBF(), Fixed(h2))
    posterior = shoal.Posterior(
        shoal.likelihoods.Gaussian(NOISE), shoal.priors.Gaussian(PRIOR), n=1
    )
    batch = torch.tensor([[phi]]), torch.tensor([[y]])
    for _ in range(150):
        velocity, _ = shoal.forces(ensemble, posterior, repulsion, batch)
        with torch.no_grad():
            ensemble.weights["weight"] += 0.3 * S * velocity["weight"]
    f = phi * ensemble.weights["weight"].detach().flatten()
    assert abs(f.mean() - mean) < 1e-3
    assert abs(f.var(correction=0) / (variance - h2) - 1) < 0.02


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n": 0}, "n must be positive"),
        ({"n": 5, "temperature": -1.0}, "temperature must be (zero or positive|a finite)"),
        ({"n": 5, "temperature": math.nan}, "temperature must be (zero or positive|a finite)"),
    ],
)
def test_senseless_posteriors_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Flat(), **options)
