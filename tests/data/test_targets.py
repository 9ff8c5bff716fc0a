"""Targets against torch.distributions, and their samples against their moments."""

import pytest
import torch
from torch import distributions as dist
from torch.func import grad, vmap

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.data.targets import Funnel, Gaussian2D, Mixture, StandardGaussian, registry

DOUBLE = torch.float64


def double(values):
    return torch.tensor(values, dtype=DOUBLE)


def gaussian_oracle(target):
    return dist.MultivariateNormal(double(target.mean), double(target.covariance)).log_prob


def mixture_oracle(target):
    hills = dist.MultivariateNormal(double(target.means), double(target.covariances))
    return dist.MixtureSameFamily(dist.Categorical(double(target.weights)), hills).log_prob


def funnel_oracle(target):
    def log_prob(x):
        v = x[..., -1]
        scale = (v / 2).exp().unsqueeze(-1).expand_as(x[..., :-1])
        given_v = dist.Independent(dist.Normal(torch.zeros_like(scale), scale), 1)
        return dist.Normal(0.0, target.std).log_prob(v) + given_v.log_prob(x[..., :-1])

    return log_prob


def standard_oracle(target):
    return dist.MultivariateNormal(
        torch.zeros(target.dimension, dtype=DOUBLE),
        target.std**2 * torch.eye(target.dimension, dtype=DOUBLE),
    ).log_prob


CASES = [
    (Gaussian2D(), gaussian_oracle),
    (Gaussian2D(mean=(3.0, -1.0), covariance=((2.0, -0.9), (-0.9, 0.5))), gaussian_oracle),
    (Mixture(), mixture_oracle),
    (Mixture((1.0,), ((0.0, 1.0),), (((1.0, 0.0), (0.0, 2.0)),)), mixture_oracle),
    (Funnel(), funnel_oracle),
    (Funnel(dimension=5, std=1.5), funnel_oracle),
    (StandardGaussian(), standard_oracle),
    (StandardGaussian(dimension=7, std=0.3), standard_oracle),
]
EVERY = [registry.make(name) for name in registry.names()]


def points(target, n=64):
    return 2 * torch.randn(n, target.dimension, generator=generator(0, "points"), dtype=DOUBLE)


@pytest.mark.parametrize(
    ("target", "oracle"), CASES, ids=[repr(target)[:40] for target, _ in CASES]
)
def test_log_density_and_score(target, oracle):
    x = points(target)
    log_prob = oracle(target)
    torch.testing.assert_close(vmap(target.log_density)(x), log_prob(x))
    x.requires_grad_()
    (score,) = torch.autograd.grad(log_prob(x).sum(), x)
    torch.testing.assert_close(vmap(grad(target.log_density))(x.detach()), score)


@pytest.mark.parametrize("target", EVERY, ids=registry.names())
def test_every_target_keeps_type_shape_and_seed(target):
    draws = target.draw(10, generator(1))
    assert draws.shape == (10, target.dimension)
    assert torch.equal(draws, target.draw(10, generator(1)))
    assert target.log_density(draws[0]).shape == ()
    assert target.log_density(draws[0].double()).dtype == DOUBLE


@pytest.mark.parametrize("target", EVERY, ids=registry.names())
def test_every_target_shows_most_of_its_mass(target):
    low, high = torch.tensor(target.bounds).T
    draws = target.draw(4000, generator(2))
    inside = ((draws >= low) & (draws <= high)).all(1)
    assert inside.float().mean() > 0.85


@pytest.mark.parametrize("target", EVERY, ids=registry.names())
def test_every_target_has_samples_with_zero_mean_score(target):
    """E[grad log p] = 0 and E[x . grad log p] = -D, by parts; the funnel's tail is too heavy."""
    if isinstance(target, Funnel):
        target = Funnel(std=0.7)
    x = target.draw(100_000, generator(3)).double()
    score = vmap(grad(target.log_density))(x)
    assert (score.mean(0).abs() < 5 * score.std(0) / len(x) ** 0.5).all()
    virial = (x * score).sum(1)
    assert abs(virial.mean() + target.dimension) < 5 * virial.std() / len(x) ** 0.5


def test_published_gaussian():
    x = Gaussian2D().draw(200_000, generator(0)).double()
    expected = 5 * double([[0.22, 0.16], [0.16, 0.67]])
    assert (x.mean(0) - double([-0.68, 0.80])).abs().max() < 0.02
    assert (torch.cov(x.T) - expected).abs().max() < 0.05


def test_mixture_moments():
    target = Mixture()
    x = target.draw(200_000, generator(0)).double()
    weights, means = double(target.weights), double(target.means)
    mean = weights @ means
    second = double(target.covariances) + means.unsqueeze(-1) * means.unsqueeze(-2)
    covariance = (weights[:, None, None] * second).sum(0) - torch.outer(mean, mean)
    assert (x.mean(0) - mean).abs().max() < 0.03
    assert (torch.cov(x.T) - covariance).abs().max() < 0.06


def test_funnel_draws():
    x = Funnel().draw(100_000, generator(0)).double()
    v = x[:, 1]
    assert abs(v.std() - 3) < 5 * 3 / (2 * len(v)) ** 0.5
    standard = x[:, 0] * (-v / 2).exp()
    assert abs(standard.var() - 1) < 5 * (2 / len(v)) ** 0.5
    assert abs(torch.corrcoef(torch.stack([standard.square(), v]))[0, 1]) < 5 / len(v) ** 0.5


def test_a_table_of_lists_makes_a_target():
    made = registry.make({"name": "gaussian", "mean": [1.0, 2.0]})
    assert made == Gaussian2D(mean=(1.0, 2.0))
    assert registry.make(registry.spec(Mixture())) == Mixture()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: StandardGaussian(0), "dimension must be at least 1, not 0"),
        (lambda: StandardGaussian(std=0.0), "std must be positive, not 0.0"),
        (lambda: Funnel(dimension=1), "a funnel needs at least 2 dimensions, not 1"),
        (lambda: Funnel(std=-1.0), "std must be positive, not -1.0"),
        (lambda: Gaussian2D(covariance=((1.0, 2.0), (2.0, 1.0))), "symmetric positive definite"),
        (lambda: Gaussian2D(covariance=((1.0, 0.1), (0.2, 1.0))), "symmetric positive definite"),
        (lambda: Gaussian2D(mean=(1.0, 2.0, 3.0)), "mean must be a list of 2 numbers"),
        (lambda: Mixture(weights=(0.5, 0.6, 0.2)), "weights must be positive and sum to one"),
        (lambda: Mixture(weights=(0.5, 0.5)), "as many weights as means"),
    ],
)
def test_refuses_impossible_settings(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()
