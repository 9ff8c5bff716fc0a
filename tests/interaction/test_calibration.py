"""Calibrated repulsion: the size of the push, its equivariance, and Gaussian posteriors."""

import itertools
import math

import pytest
import torch

import shoal
from shoal.core.errors import ConfigError
from shoal.interaction.calibration import Whitening
from shoal.interaction.repulsion import interact

pytestmark = pytest.mark.usefixtures("double")

WEIGHT_METHODS = ["kde", "sge", "ssge", "svgd"]


def cloud(members, dimensions, seed=0):
    return torch.randn(members, dimensions, generator=torch.Generator().manual_seed(seed))


def everyone(members):
    return torch.ones(members, dtype=torch.bool)


def score(name, x, alive=None):
    repulsion = shoal.methods.get(name, calibrated=True).repulsion
    alive = everyone(len(x)) if alive is None else alive
    found = interact(repulsion, [x.unsqueeze(1)], alive)
    return found.B[0] @ x, found


@pytest.mark.parametrize(("members", "dimensions"), [(30, 3), (6, 40)])
def test_whitened_members_have_unit_covariance(members, dimensions):
    """Up to the ridge, in the directions that they span."""
    x = cloud(members, dimensions)
    x = x - x.mean(0)
    whitening = Whitening.of((x @ x.mT)[None], everyone(members))
    rank = min(members - 1, dimensions)
    eigenvalues = torch.linalg.eigvalsh(whitening.gram[0]).flip(0) / members
    torch.testing.assert_close(eigenvalues[:rank], torch.ones(rank), rtol=0.02, atol=0)
    assert eigenvalues[rank:].abs().max() < 1e-9
    assert whitening.inverse.sum(-1).abs().max() < 1e-9 * whitening.inverse.abs().max()


@pytest.mark.parametrize("name", ["kde", "sge", "ssge"])
@pytest.mark.parametrize(("members", "dimensions"), [(12, 3), (20, 500)])
def test_the_estimate_satisfies_steins_identity(name, members, dimensions):
    """E[score · (x - mean)] = -d, in the directions that the members span."""
    x = cloud(members, dimensions)
    push, _ = score(name, x)
    identity = -(push * (x - x.mean(0))).sum(-1).mean()
    assert math.isclose(identity, min(dimensions, members - 1), rel_tol=0.02)


@pytest.mark.parametrize("name", ["kde", "sge", "ssge"])
def test_few_members_have_the_score_of_the_gaussian_with_their_moments(name):
    """For M up to d + 1 every estimator is -(x - mean) C^+."""
    x = cloud(8, 60)
    centred = x - x.mean(0)
    C = centred.mT @ centred / 8
    push, _ = score(name, x)
    torch.testing.assert_close(
        push, -centred @ torch.linalg.pinv(C, rtol=1e-9), rtol=0.01, atol=1e-3
    )


@pytest.mark.parametrize("name", WEIGHT_METHODS)
def test_other_units_change_the_units_of_the_score_alone(name):
    """s(A x) = A^-T s(x): wide and narrow directions are weighed alike, up to the ridge."""
    x = cloud(30, 2)
    A = torch.tensor([[2.0, 0.5], [0.0, 0.7]])
    push, _ = score(name, x)
    other, _ = score(name, x @ A.mT)
    torch.testing.assert_close(other, push @ torch.linalg.inv(A), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", WEIGHT_METHODS)
def test_forces_cancel_and_the_dead_do_not_count(name):
    x = cloud(7, 4)
    alive = torch.tensor([True, True, False, True, True, True, True])
    push, found = score(name, x, alive)
    assert found.B.sum(-1).abs().max() < 1e-9 * found.B.abs().max()
    alone, _ = score(name, x[alive])
    torch.testing.assert_close(push[alive], alone)
    assert push[~alive].abs().max() < 1e-12


@pytest.mark.parametrize("name", WEIGHT_METHODS)
@pytest.mark.parametrize("x", [torch.ones(1, 3), torch.ones(4, 3)], ids=["one", "coincident"])
def test_members_that_are_one_exert_no_force(name, x):
    push, _ = score(name, x.double())
    assert push.abs().max() < 1e-12


# Posteriors of linear models.


def orthogonal_model(dimension, noise_std=0.7, prior_std=1.3):
    """Orthogonal inputs: the posterior of every weight is N(mean, variance), independent."""
    variance = 1 / (1 / noise_std**2 + 1 / prior_std**2)
    y = torch.linspace(-1, 1, dimension)
    mean = variance * y / noise_std**2

    def log_density(w):
        return -(w - y).square().sum() / (2 * noise_std**2) - w.square().sum() / (2 * prior_std**2)

    return log_density, mean, variance


def correlated_model(dimension=3):
    """Bayesian linear regression with its closed form N(m, S), S = (X^T X / s² + 1)^-1."""
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(12, dimension, generator=generator) @ torch.tensor(
        [[1.0, 0.6, 0.0], [0.0, 1.0, -0.4], [0.0, 0.0, 0.8]]
    )
    y = X.sum(1) + 0.5 * torch.randn(12, generator=generator)
    S = torch.linalg.inv(X.mT @ X / 0.25 + torch.eye(dimension))
    mean = S @ X.mT @ y / 0.25

    def log_density(w):
        return -(X @ w - y).square().sum() / 0.5 - w.square().sum() / 2

    return log_density, mean, S


@pytest.mark.parametrize(("name", "pace"), [("kde", 0.4), ("sge", 0.4), ("svgd", 3.0)])
def test_calibrated_members_have_the_moments_of_the_linear_posterior(name, pace):
    """Mean and covariance within 5 % at M = 100."""
    log_density, mean, S = correlated_model()
    start = mean + cloud(100, 3) @ torch.linalg.cholesky(S).mT * 0.5
    method = shoal.methods.get(name, calibrated=True)
    lr = pace * float(torch.linalg.eigvalsh(S)[0])
    x = shoal.sample(log_density, start, method=method, lr=lr, steps=300)
    spread = S.trace().sqrt()
    assert (x.mean(0) - mean).norm() < 0.05 * spread
    C = torch.cov(x.mT, correction=0)
    assert (C - S).norm() < 0.05 * S.norm()


def test_published_members_are_too_close_by_the_factor_that_the_law_predicts():
    """With M <= d + 1 they form a simplex of D² = s² ln(M + 1), where the posterior has 2 d s²."""
    members, dimension = 20, 60
    log_density, mean, variance = orthogonal_model(dimension)
    start = mean + math.sqrt(variance) * cloud(members, dimension)
    published = shoal.methods.get("kde", legacy=True)
    x = shoal.sample(log_density, start, method=published, lr=0.5 * variance, steps=80)
    d2 = torch.stack([(a - b).square().sum() for a, b in itertools.combinations(x, 2)])
    factor = 2 * dimension / math.log(members + 1)
    assert math.isclose(2 * dimension * variance / d2.mean(), factor, rel_tol=0.01)


def test_calibrated_members_have_the_exact_variance_of_the_directions_they_span():
    members, dimension = 8, 30
    log_density, mean, variance = orthogonal_model(dimension)
    start = mean + 0.3 * cloud(members, dimension)
    method = shoal.methods.get("kde", calibrated=True)
    x = shoal.sample(log_density, start, method=method, lr=0.3 * variance, steps=150)
    eigenvalues = torch.linalg.eigvalsh(torch.cov(x.mT, correction=0)).flip(0)
    torch.testing.assert_close(
        eigenvalues[: members - 1], torch.full((members - 1,), variance), rtol=0.01, atol=0
    )


# The forms of a method.


@pytest.mark.parametrize("name", list(shoal.methods.METHODS))
def test_calibrated_form(name):
    method = shoal.methods.get(name, calibrated=True)
    assert method.calibrated and not method.legacy
    if method.repulsion is not None:
        assert method.repulsion.calibrated
        assert method.functional_prior == name.startswith("f-")


def test_a_method_has_one_form():
    with pytest.raises(ConfigError, match="give legacy or calibrated"):
        shoal.methods.get("kde", legacy=True, calibrated=True)


def test_the_linear_kernel_is_exact_already():
    with pytest.raises(ConfigError, match="needs no calibration"):
        shoal.Repulsion(
            shoal.spaces.Weights(), shoal.kernels.LinearKernel(), flow=shoal.flows.Stein(),
            calibrated=True,
        )  # fmt: skip
