"""Samplers around a solution have the moments they claim; averages are averages."""

import math

import pytest
import torch
from small_runs import assert_one_sentence, dropped, normed, plain, points, shoal_of
from torch import nn

from shoal.analysis.landscape import subspace
from shoal.analysis.landscape.averaging import averaged, combine, ema, mc_dropout, multiswag, swa
from shoal.analysis.landscape.points import chosen, with_weights
from shoal.analysis.landscape.subspace import Mode, draw, sample_mode
from shoal.core.errors import ConfigError
from shoal.inference.likelihoods import Categorical
from shoal.prediction.metrics import accuracy, nll
from shoal.prediction.predictive import Predictive

X, Y = points(40)
MANY = 4000


@pytest.fixture(scope="module")
def mode():
    """Three weights and five snapshots of them, so that every covariance is known."""
    ensemble = shoal_of(lambda: nn.Linear(3, 1, bias=False), members=1)
    path = torch.tensor(
        [[1.0, 2, 3], [1.5, 1, 3], [0.5, 2, 2], [1, 3, 5], [2, 2, 2]], dtype=torch.float32
    )
    return Mode(ensemble, with_weights(ensemble, {"weight": path[:, None]}))


def drawn(name, mode, **settings):
    sampler = subspace.registry.make({"name": name, **settings})
    return draw(sampler, mode, torch.ones(MANY)).weights["weight"][:, 0].double()


def moments(mode):
    path = mode.path.weights["weight"][:, 0].detach().double()
    centred = path - path.mean(0)
    return path.mean(0), centred.T @ centred / len(path)


def assert_covariance(samples, expected, mean):
    noise = 6 * float(expected.diagonal().max()) / math.sqrt(MANY)
    torch.testing.assert_close(
        samples.mean(0), mean, rtol=0, atol=6 * math.sqrt(float(expected.diagonal().max()) / MANY)
    )
    torch.testing.assert_close(samples.T.cov(), expected, rtol=0, atol=noise)


def test_diagonal_gaussian(mode):
    mean, covariance = moments(mode)
    expected = 4 * torch.diag(covariance.diagonal())
    assert_covariance(drawn("diagonal", mode, scale=2.0), expected, mean)


def test_low_rank_with_all_components_scaled_is_the_covariance_itself(mode):
    mean, covariance = moments(mode)
    assert_covariance(drawn("low-rank-scaled", mode, rank=3, scale=1.0), covariance, mean)


def test_low_rank_with_unit_components_is_a_projector(mode):
    mean, covariance = moments(mode)
    vectors = torch.linalg.eigh(covariance).eigenvectors[:, -2:]
    assert_covariance(drawn("low-rank", mode, rank=2, scale=0.5), vectors @ vectors.T / 4, mean)


def test_swag(mode):
    mean, covariance = moments(mode)
    # Half the diagonal with n, half the covariance with n - 1.
    expected = torch.diag(covariance.diagonal()) / 2 + covariance * 5 / 4 / 2
    assert_covariance(drawn("swag", mode), expected, mean)


def test_random_directions_have_the_length_they_claim(mode):
    samples = drawn("random", mode, radius=0.3)
    centre = mode.solution.weights["weight"][0, 0].detach().double()
    lengths = (samples - centre).norm(dim=1)
    torch.testing.assert_close(lengths, (0.3 * centre.norm()).expand(MANY), rtol=1e-5, atol=1e-6)
    assert float((samples - centre).mean(0).norm()) < 0.3 * float(centre.norm()) * 4 / math.sqrt(
        MANY
    )


def test_dropout_keeps_the_mean(mode):
    samples = drawn("dropout", mode, rate=0.25)
    centre = mode.solution.weights["weight"][0, 0].detach().double()
    assert float((samples == 0).double().mean()) == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(samples.mean(0), centre, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("name", subspace.registry.names())
def test_no_reach_is_the_centre_and_the_number_of_samples_changes_none(name, mode):
    sampler = subspace.registry.make(name)
    centre = mode.solution if name in ("random", "dropout") else swa(mode.path)
    still = draw(sampler, mode, torch.zeros(2)).weights["weight"]
    torch.testing.assert_close(still, centre.weights["weight"].detach().expand_as(still))
    many = draw(sampler, mode, torch.ones(5)).weights["weight"]
    torch.testing.assert_close(
        many[3:], draw(sampler, mode, torch.ones(2), first=3).weights["weight"]
    )
    assert len(draw(sampler, mode, torch.ones(30)).weights["weight"].unique(dim=0)) > 1


@pytest.mark.parametrize("build", [plain, normed])
def test_samples_predict_like_any_ensemble(build, monkeypatch):
    ensemble = shoal_of(build, members=4)
    mode = Mode(chosen(ensemble, [0]), ensemble)
    train = X if build is normed else None
    sampler = subspace.SWAG()
    pred = sample_mode(sampler, mode, torch.ones(6), X, train=train)
    assert isinstance(pred, Predictive) and pred.size == 6
    monkeypatch.setattr(subspace, "chunk_size", lambda *_: 2)
    again = sample_mode(sampler, mode, torch.ones(6), X, train=train)
    torch.testing.assert_close(pred.members, again.members, rtol=1e-4, atol=1e-5)


def test_samplers_of_the_path_say_what_they_need():
    with pytest.raises(ConfigError) as caught:
        draw(subspace.SWAG(), Mode(shoal_of(plain, members=1)), torch.ones(1))
    assert_one_sentence(caught.value, "keep_every=1")


def test_averages(mode):
    path = mode.path.weights["weight"].detach()
    torch.testing.assert_close(swa(mode.path).weights["weight"][0], path.mean(0))
    moving = path[0]
    for snapshot in path[1:]:
        moving = 0.7 * moving + 0.3 * snapshot
    torch.testing.assert_close(ema(mode.path, 0.7).weights["weight"][0], moving)
    assert averaged([mode.path, mode.path]).members == 2
    with pytest.raises(ConfigError, match="decay"):
        ema(mode.path, 1.0)


def test_multiswag_is_swag_in_every_mode():
    ensemble = shoal_of(plain, members=4)
    modes = [Mode(chosen(ensemble, [i]), ensemble) for i in (0, 1)]
    pred = multiswag(modes, X, samples=3)
    assert pred.size == 6
    alone = sample_mode(subspace.SWAG(), modes[0], torch.ones(3), X)
    torch.testing.assert_close(pred.members[:3], alone.members)
    assert not torch.allclose(pred.members[:3], pred.members[3:])


def test_mc_dropout_leaves_the_masks_on_and_everything_else_off():
    ensemble = shoal_of(dropped, members=2)
    pred = mc_dropout(ensemble, X, samples=3)
    assert pred.size == 6
    assert not torch.equal(pred.members[0], pred.members[1])
    before = ensemble(X)
    torch.testing.assert_close(ensemble(X), before)
    mean = mc_dropout(ensemble, X[:4], samples=1000).members.unflatten(0, (2, -1)).mean(1)
    # The layer after the mask is linear, so that the mean over masks is the network without them.
    torch.testing.assert_close(mean, ensemble(X[:4]).detach(), rtol=0, atol=0.08)
    with pytest.raises(ConfigError) as caught:
        mc_dropout(shoal_of(plain), X)
    assert_one_sentence(caught.value, "dropout")


def test_combinations_are_means_over_all_subsets():
    outputs = torch.randn(3, 2, 40, 4, generator=torch.Generator().manual_seed(0))
    (found,) = combine({"swag x 2": outputs}, Y, Categorical())
    assert found.modes == [1, 2, 3]
    alone = [Predictive(mode, Categorical()) for mode in outputs]
    assert found.nll[0] == pytest.approx(sum(nll(p, Y) for p in alone) / 3, rel=1e-5)
    whole = Predictive(outputs.flatten(0, 1), Categorical())
    assert found.nll[2] == pytest.approx(nll(whole, Y), rel=1e-5)
    assert found.accuracy[2] == pytest.approx(accuracy(whole, Y))
