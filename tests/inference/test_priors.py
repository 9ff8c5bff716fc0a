"""Priors: densities, scores and draws, and the functional prior in the limit of many draws."""

import math

import pytest
import reference
import torch
from torch import nn
from torch.distributions import Normal

import shoal
from shoal.core.errors import ConfigError
from shoal.core.random import key
from shoal.interaction.bandwidths import Median

pytestmark = pytest.mark.usefixtures("double")

priors = shoal.priors
EVERY = [priors.registry[name]() for name in priors.registry]
ON_WEIGHTS = [prior for prior in EVERY if isinstance(prior, priors.WeightPrior)]
ON_WEIGHTS += [priors.Gaussian(0.3), priors.FanIn(1.7)]
PROPER = [prior for prior in ON_WEIGHTS if not isinstance(prior, priors.Flat)]
SHAPES = {"conv": (3, 4, 2, 3, 3), "weight": (3, 5, 4), "bias": (3, 5), "scale": (3,)}


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def widths(prior):
    """Standard deviations by the definition: fan-in of a convolution is channels x kernel."""
    if isinstance(prior, priors.Gaussian):
        return dict.fromkeys(SHAPES, prior.std)
    scale = prior.scale
    return {
        "conv": scale / math.sqrt(18),
        "weight": scale / math.sqrt(4),
        "bias": scale,
        "scale": scale,
    }


@pytest.mark.parametrize("prior", ON_WEIGHTS, ids=repr)
def test_score_is_the_gradient_of_the_log_density(prior):
    theta = {name: tensor.requires_grad_() for name, tensor in weights().items()}
    value = prior.log_prob(theta)
    assert value.shape == (3,)
    score = prior.score(theta)
    if value.requires_grad:
        gradients = torch.autograd.grad(value.sum(), list(theta.values()))
    else:
        gradients = [torch.zeros_like(tensor) for tensor in theta.values()]
    for (name, tensor), gradient in zip(score.items(), gradients, strict=True):
        torch.testing.assert_close(tensor, gradient, msg=name)


@pytest.mark.parametrize("prior", PROPER, ids=repr)
def test_log_density_is_that_of_torch(prior):
    theta = weights()
    std = widths(prior)
    target = sum(
        Normal(0.0, std[name]).log_prob(tensor).reshape(3, -1).sum(1)
        for name, tensor in theta.items()
    )
    torch.testing.assert_close(prior.log_prob(theta), target)


@pytest.mark.parametrize("prior", PROPER, ids=repr)
def test_draws_have_the_width_of_the_prior(prior):
    count = 4000
    draws = prior.draw(weights(), count, key(0, "test", 0))
    for name, std in widths(prior).items():
        tensor = draws[name]
        assert tensor.shape == (count, *SHAPES[name][1:])
        error = 5 / math.sqrt(tensor.numel())  # five standard errors
        assert abs(tensor.mean()) < error * std
        assert abs(tensor.std() / std - 1) < error


@pytest.mark.parametrize("prior", PROPER, ids=repr)
def test_draws_are_decided_by_the_key(prior):
    before = torch.get_rng_state()
    one, two = (prior.draw(weights(), 2, key(5, "test", 3)) for _ in range(2))
    other = prior.draw(weights(), 2, key(5, "test", 4))
    assert torch.equal(before, torch.get_rng_state())
    for name in one:
        assert torch.equal(one[name], two[name])
        assert not torch.equal(one[name], other[name])


def test_draws_are_normal_and_independent():
    """Kolmogorov-Smirnov against the normal law, and correlations between what should differ."""
    count = 20_000
    draws = priors.Gaussian().draw(
        {"a": torch.zeros(1, 2), "b": torch.zeros(1, 2)}, count, key(0, "t", 0)
    )
    later = priors.Gaussian().draw({"a": torch.zeros(1, 2)}, count, key(0, "t", 1))
    rows = torch.stack([*draws["a"].mT, *draws["b"].mT, *later["a"].mT])
    uniform = torch.special.ndtr(rows).sort(1).values
    steps = torch.arange(1, count + 1) / count
    assert (uniform - steps).abs().max() < 2 / math.sqrt(count)
    assert (torch.corrcoef(rows) - torch.eye(len(rows))).abs().max() < 5 / math.sqrt(count)
    squares = torch.corrcoef(rows.square()) - torch.eye(len(rows))
    assert squares.abs().max() < 5 / math.sqrt(count)


def test_draws_in_single_precision_are_those_in_double():
    """Tails included: a number near the end of the uniform law must not become another one."""
    shape = (1, 500_000)
    wide = priors.Gaussian().draw({"a": torch.zeros(shape)}, 2, key(0, "t", 0))["a"]
    narrow = priors.Gaussian().draw({"a": torch.zeros(shape).float()}, 2, key(0, "t", 0))["a"]
    assert (wide - narrow.double()).abs().max() < 1e-5


def test_nothing_can_be_drawn_from_a_flat_prior():
    with pytest.raises(ConfigError, match="has no draws"):
        priors.Flat().draw(weights(), 2, key(0, "test", 0))


@pytest.mark.parametrize(
    "make",
    [lambda: priors.Gaussian(0.0), lambda: priors.FanIn(-1.0), lambda: priors.Gaussian(math.nan)],
)
def test_widths_must_be_positive(make):
    with pytest.raises(ConfigError, match="must be (positive|a number)"):
        make()


def test_one_draw_is_no_functional_prior():
    with pytest.raises(ConfigError, match="at least two draws"):
        priors.FunctionSpace(draws=1)


# The functional prior.


def normal_draws(covariance, count, seed=0):
    noise = torch.randn(count, len(covariance), generator=torch.Generator().manual_seed(seed))
    return noise @ torch.linalg.cholesky(covariance).mT


def test_functional_score_of_many_draws_is_that_of_their_law():
    """Draws from N(0, C): the score at f is -C^-1 f."""
    C = torch.tensor([[1.5, 0.6], [0.6, 0.8]])
    draws = normal_draws(C, 800)
    f = normal_draws(C, 200, seed=1)
    prior = priors.FunctionSpace(estimator=shoal.estimators.SSGE(share=0.995))
    score = prior.score_outputs(f.reshape(200, 2, 1), draws.reshape(800, 2, 1)).reshape(200, 2)
    target = -f @ torch.linalg.inv(C)
    assert (score - target).norm() / target.norm() < 0.35
    scale = (score * target).sum() / target.square().sum()
    assert 0.8 < scale < 1.2


def test_published_functional_score_at_the_draws_is_their_spectral_estimate():
    F = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    prior = priors.FunctionSpace(
        estimator=shoal.estimators.SSGE(share=1.0, eta=0.01),
        bandwidth=Median(legacy=True),
        legacy=True,
    )
    score = prior.score_outputs(F.reshape(5, 3, 2), F.reshape(5, 3, 2)).reshape(5, 6)
    torch.testing.assert_close(score, reference.interaction("ssge", True, F)[1])


def test_published_functional_score_away_from_the_draws():
    F = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    f = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)) + 0.5
    prior = priors.FunctionSpace(
        estimator=shoal.estimators.SSGE(share=1.0, eta=0.01),
        bandwidth=Median(legacy=True),
        legacy=True,
    )
    score = prior.score_outputs(f.reshape(3, 3, 2), F.reshape(5, 3, 2)).reshape(3, 6)
    torch.testing.assert_close(score, reference.functional_prior(f, F))


def test_functional_score_does_not_depend_on_the_origin_of_the_outputs():
    F = torch.randn(6, 2, 2, generator=torch.Generator().manual_seed(0))
    f = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1))
    prior = priors.FunctionSpace()
    moved = prior.score_outputs(f + 50, F + 50)
    torch.testing.assert_close(moved, prior.score_outputs(f, F), rtol=1e-8, atol=1e-9)


def test_functional_prior_of_a_linear_model_is_its_weight_prior():
    """f = Phi w with Phi square: Phi^T score_f = score_w = -w / std², whatever Phi is."""
    members, std, n = 40, 0.7, 5
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(2, 1, bias=False), members)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        ensemble.weights["weight"].copy_(std * torch.randn(members, 1, 2, generator=generator))
    Phi = torch.tensor([[1.0, 0.4], [-0.3, 0.9]])
    batch = Phi, torch.zeros(2, 1)
    prior = priors.FunctionSpace(
        weights=priors.Gaussian(std), draws=800, estimator=shoal.estimators.SSGE(share=0.995)
    )
    noise = shoal.likelihoods.Gaussian(1.0)
    with_prior, _ = shoal.forces(ensemble, shoal.Posterior(noise, prior, n), None, batch)
    without, _ = shoal.forces(ensemble, shoal.Posterior(noise, priors.Flat(), n), None, batch)
    score = n * (with_prior["weight"] - without["weight"])
    target = -ensemble.weights["weight"].detach() / std**2
    assert (score - target).norm() / target.norm() < 0.35
    assert 0.8 < (score * target).sum() / target.square().sum() < 1.2


def test_drawn_networks_have_the_frozen_weights_of_the_ensemble(tmp_path):
    """Also after loading, where the factory has made other ones."""

    def build():
        module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        module[0].requires_grad_(False)
        return module

    ensemble = shoal.Ensemble.init(build, 4, seed=3)
    ensemble.save(tmp_path / "members.safetensors")
    loaded = shoal.Ensemble.load(tmp_path / "members.safetensors", build)
    batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(5).long()
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), priors.FunctionSpace(), 10)
    one, two = (shoal.forces(each, posterior, None, batch)[0] for each in (ensemble, loaded))
    for name in one:
        torch.testing.assert_close(one[name], two[name])


@pytest.mark.parametrize("draws", [2, 7])
def test_number_of_draws_is_independent_of_the_members(draws):
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(3, 2), 4)
    prior = priors.FunctionSpace(draws=draws)
    batch = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(5).long()
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), prior, 10)
    velocity, _ = shoal.forces(ensemble, posterior, shoal.methods.get("f-kde").repulsion, batch)
    assert all(tensor.isfinite().all() for tensor in velocity.values())
