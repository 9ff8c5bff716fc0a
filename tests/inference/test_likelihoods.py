"""Likelihoods against torch.distributions, and as densities that integrate to one."""

import math

import pytest
import torch
from torch import distributions

import shoal
from shoal.core.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("double")

likelihoods = shoal.likelihoods
EVERY = [likelihoods.registry[name]() for name in likelihoods.registry]
EVERY += [likelihoods.Gaussian(0.3)]
REGRESSION = [likelihood for likelihood in EVERY if likelihood.task == "regression"]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def targets(likelihood, points, columns):
    generator = torch.Generator().manual_seed(7)
    if likelihood.task == "classification":
        return torch.randint(columns, (points,), generator=generator)
    return torch.randn(points, columns, generator=generator)


def oracle(likelihood, outputs):
    """The distribution of y, by torch."""
    if isinstance(likelihood, likelihoods.Categorical):
        return distributions.Categorical(logits=outputs)
    if isinstance(likelihood, likelihoods.Gaussian):
        return distributions.Independent(distributions.Normal(outputs, likelihood.noise_std), 1)
    if isinstance(likelihood, likelihoods.HomoscedasticGaussian):
        return distributions.Independent(distributions.Normal(outputs, 1.0), 1)
    columns = outputs.shape[-1] // 2
    variance = torch.log1p(outputs[..., columns:].exp()) + 1e-6
    return distributions.Independent(
        distributions.Normal(outputs[..., :columns], variance.sqrt()), 1
    )


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("likelihood", EVERY, ids=repr)
def test_log_density_is_that_of_torch(likelihood, columns):
    outputs = drawn(4, 6, likelihood.width(columns))
    y = targets(likelihood, 6, columns)
    value = likelihood.log_prob(outputs, y)
    assert value.shape == (4, 6)
    torch.testing.assert_close(value, oracle(likelihood, outputs).log_prob(y))


@pytest.mark.parametrize("likelihood", EVERY, ids=repr)
def test_members_do_not_see_each_other(likelihood):
    outputs = drawn(2, 4, 6, likelihood.width(2))
    y = targets(likelihood, 6, 2)
    together = likelihood.log_prob(outputs, y)
    for i in range(2):
        for j in range(4):
            torch.testing.assert_close(together[i, j], likelihood.log_prob(outputs[i, j], y))


@pytest.mark.parametrize("likelihood", EVERY, ids=repr)
def test_gradient_is_the_finite_difference(likelihood):
    outputs = drawn(3, likelihood.width(2)).requires_grad_()
    y = targets(likelihood, 3, 2)
    assert torch.autograd.gradcheck(lambda f: likelihood.log_prob(f, y), outputs)


@pytest.mark.parametrize("likelihood", EVERY, ids=repr)
def test_total_probability_is_one(likelihood):
    if likelihood.task == "classification":
        outputs = drawn(5, 4)
        total = sum(likelihood.log_prob(outputs, torch.full((5,), c)).exp() for c in range(4))
        torch.testing.assert_close(total, torch.ones(5))
        return
    outputs = drawn(1, likelihood.width(1)).expand(20001, -1)
    y = torch.linspace(-12, 12, 20001)
    density = likelihood.log_prob(outputs, y).exp()
    mean, variance = (moment[0, 0] for moment in likelihood.moments(outputs))
    torch.testing.assert_close(torch.trapezoid(density, y), torch.tensor(1.0))
    torch.testing.assert_close(torch.trapezoid(y * density, y), mean)
    torch.testing.assert_close(torch.trapezoid((y - mean).square() * density, y), variance)


def test_probabilities_are_the_exponentials_of_the_log_densities():
    outputs = drawn(3, 5, 4)
    probs = likelihoods.Categorical().probs(outputs)
    for c in range(4):
        log_prob = likelihoods.Categorical().log_prob(outputs, torch.full((5,), c))
        torch.testing.assert_close(probs[..., c], log_prob.exp())


def test_extreme_logits_stay_finite():
    outputs = torch.tensor([[1e4, -1e4, 0.0]])
    value = likelihoods.Categorical().log_prob(outputs, torch.tensor([1]))
    assert value.item() == -2e4


def test_a_vanishing_learned_variance_is_kept_from_zero():
    outputs = torch.tensor([[0.0, -1e3]])
    value = likelihoods.HeteroscedasticGaussian().log_prob(outputs, torch.tensor([0.0]))
    assert math.isclose(value.item(), -0.5 * math.log(2 * math.pi * 1e-6), rel_tol=1e-12)


@pytest.mark.parametrize("likelihood", REGRESSION, ids=repr)
def test_another_number_of_columns_is_refused(likelihood):
    with pytest.raises(DataError, match="3 columns but the members predict 2"):
        likelihood.log_prob(drawn(5, likelihood.width(2)), drawn(5, 3))


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan])
def test_noise_must_be_positive(std):
    with pytest.raises(ConfigError, match="noise_std must be positive"):
        likelihoods.Gaussian(std)
