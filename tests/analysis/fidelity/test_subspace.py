"""A network on a subspace of its weights: its density, its closed form, and its certificate."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

import shoal
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.certificate import ITSELF, RUN, certify, laplace
from shoal.analysis.fidelity.reference import Chains
from shoal.analysis.fidelity.study import ALWAYS, Budget
from shoal.analysis.fidelity.subspace_problem import subspace_problem
from shoal.core.errors import ConfigError
from shoal.data.dataset import Dataset, Split
from shoal.inference.samplers.convergence import effective_draws
from shoal.page.fidelity import certificate_sentences

NOISE = 0.5


def data_of(points=40):
    x = torch.randn(points + 20, 6, generator=torch.Generator().manual_seed(0))
    y = x[:, 0] - x[:, 1] + NOISE * torch.randn(len(x), generator=torch.Generator().manual_seed(1))
    return Dataset("own", Split(x[:points], y[:points]), test=Split(x[points:], y[points:]))


def trained(build, data, **options):
    how = {"likelihood": shoal.likelihoods.Gaussian(NOISE), "prior": shoal.priors.Gaussian(0.7)}
    ensemble = shoal.Ensemble.init(build, members=3)
    return shoal.fit(ensemble, data, steps=20, lr=0.05, progress=False, **(how | options))


def linear():
    return nn.Linear(6, 1)


def perceptron():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


@pytest.mark.parametrize("prior", [shoal.priors.Gaussian(0.7), shoal.priors.FanIn(2.0)])
def test_the_density_is_that_of_the_whole_network(prior):
    data = data_of()
    run = trained(perceptron, data, prior=prior)
    problem = subspace_problem(run, data, 4).problem
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    z = torch.cat([z, problem.start[None]])
    module, found = perceptron().double(), []
    for weights in problem.centre + z @ problem.directions.mT:
        sizes = [p.numel() for p in module.parameters()]
        parts = zip(module.named_parameters(), weights.split(sizes), strict=True)
        tree = {name: part.view(p.shape) for (name, p), part in parts}
        outputs = functional_call(module, tree, data.train.x.double())
        value = run.likelihood.log_prob(outputs[None], data.train.y.double()).sum()
        found.append(value + prior.log_prob({n: t[None] for n, t in tree.items()})[0])
    ours, theirs = problem.log_density(z), torch.stack(found)
    torch.testing.assert_close(ours - ours[0], theirs - theirs[0], rtol=1e-6, atol=1e-5)
    with torch.no_grad():  # the last row is the member
        expected = run.ensemble.member(0)(data.test.x)
    torch.testing.assert_close(problem.apply(z, data.test.x)[-1].float(), expected)


def closed_form(problem, data):
    """Mean and covariance of z for a linear network."""
    design = torch.cat([data.train.x, torch.ones(len(data.train), 1)], 1).double()
    along = design @ problem.directions / NOISE
    covariance = torch.linalg.inv(along.mT @ along + torch.eye(along.shape[1]))
    rest = (data.train.y.double() - design @ problem.centre) / NOISE
    return covariance @ along.mT @ rest, covariance


def test_laplace_of_a_linear_network_is_exact():
    data = data_of()
    problem = subspace_problem(trained(linear, data), data, 3).problem
    mean, covariance = closed_form(problem, data)
    found, root = laplace(problem)
    torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(root @ root.mT, covariance, rtol=1e-4, atol=1e-6)


def test_nuts_finds_the_closed_form_of_a_linear_network():
    pytest.importorskip("numpyro", reason="the sampler is an optional library")
    data = data_of()
    problem = subspace_problem(trained(linear, data), data, 3).problem
    mean, covariance = closed_form(problem, data)
    around = mean + 0.5 * covariance.diagonal().sqrt(), 2 * torch.linalg.cholesky(covariance)
    chains = references.sample_chains(problem, 150, 300, 4, 0, around)
    draws = chains.draws.flatten(0, 1).double()
    effective = float(effective_draws(chains.draws.double()).min())
    errors = (draws.mean(0) - mean) / (covariance.diagonal() / effective).sqrt()
    assert effective > 300 and chains.divergences == 0 and errors.abs().max() < 5
    apart = (torch.cov(draws.mT) - covariance).norm() / covariance.norm()
    assert apart < 6 / math.sqrt(effective)


@pytest.fixture
def pretended(monkeypatch):
    """The sampler without its library: independent draws of Laplace's approximation."""

    def sample(problem, warmup, draws, chains, seed, around):
        mean, root = around
        random = torch.Generator().manual_seed(seed)
        noise = torch.randn(chains, draws, len(mean), generator=random, dtype=mean.dtype)
        return Chains((mean + noise @ root.mT).float(), 0, "NUTS, pretended")

    monkeypatch.setattr(references, "sample_chains", sample)
    monkeypatch.setattr("shoal.analysis.fidelity.certificate.require", lambda *_, **__: None)


def test_members_and_draws_are_certified_in_the_same_directions(pretended, monkeypatch):
    monkeypatch.setattr("shoal.analysis.fidelity.study._USUAL", (300, 4))
    data = data_of()
    run = trained(linear, data)
    drawn = shoal.draw(run, draws=20, warmup=50, progress=False)
    quick = Budget(5, 60, 0.1)
    methods = ("ensemble", "mclmc")
    for each, words in ((run, "random directions"), (drawn, "principal components")):
        found = certify(each, data, subspace=4, methods=methods, draws=500, budget=quick)
        assert (found.subspace, found.all_weights, found.converged) == (4, 7, True)
        rows = {RUN, ITSELF, ALWAYS, "Laplace in the subspace", *methods}
        assert found.distances.keys() == rows
        distances = {label: row["frechet/on"] for label, row in found.distances.items()}
        assert distances["mclmc"] < 0.4 < distances["ensemble"]
        text = " ".join(certificate_sentences(found))
        assert f"all 7 weights in 4 directions through one member ({words}" in text
        assert "differ in all weights" in text


@pytest.mark.parametrize(("size", "words"), [(8, "1 to 7 directions, not 8")])
def test_too_many_directions_get_one_sentence(size, words):
    data = data_of()
    run = trained(linear, data)
    with pytest.raises(ConfigError, match=words):
        certify(run, data, subspace=size)
    drawn = shoal.draw(run, draws=5, warmup=5, progress=False)
    with pytest.raises(ConfigError, match="more than 6 draws of a chain"):
        certify(drawn, data, subspace=6)
    with pytest.raises(ConfigError, match="allow it with within="):
        certify(run, data, subspace=2, within=1.0)
