import math

import pytest
import torch
from scipy import integrate, stats

from shoal.core.errors import ConfigError
from shoal.core.tree import spaced
from shoal.inference.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from shoal.prediction import Predictive
from shoal.prediction.metrics import affinity, effective_functions, pairwise_disagreement
from shoal.prediction.metrics.similarity import compared_members, effective_number


def certain(labels):
    """Members that are sure of these labels [M, B]."""
    logits = 2000.0 * torch.nn.functional.one_hot(torch.tensor(labels), 4).double()
    return Predictive(logits, Categorical())


def test_pairwise_disagreement_counts_labels_that_differ():
    found = pairwise_disagreement(certain([[0, 1, 2, 3], [0, 1, 2, 0], [1, 1, 0, 0]]))
    expected = torch.tensor([[0, 1, 3], [1, 0, 2], [3, 2, 0]]) / 4
    torch.testing.assert_close(found, expected.double())


def test_regression_members_have_no_labels():
    with pytest.raises(ConfigError, match="no class probabilities"):
        pairwise_disagreement(Predictive(torch.zeros(2, 3, 1), Gaussian()))


@pytest.mark.parametrize("members", [1, 2, 5])
def test_equal_members_are_one_function(members):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(1, 20, 4, generator=generator, dtype=torch.float64)
    for likelihood in (Categorical(), Gaussian(), HeteroscedasticGaussian()):
        pred = Predictive(outputs.expand(members, -1, -1), likelihood)
        assert effective_functions(pred) == pytest.approx(1.0, abs=1e-10)


def test_members_that_exclude_each_other_are_all_different():
    assert effective_functions(certain([[0, 1], [1, 2], [2, 3]])) == pytest.approx(3.0)
    apart = Predictive(torch.tensor([[[0.0]], [[100.0]], [[200.0]]]).double(), Gaussian())
    assert effective_functions(apart) == pytest.approx(3.0)


def test_two_pairs_are_two_functions_and_weights_count():
    labels = [[0, 1], [0, 1], [1, 0], [1, 0]]
    assert effective_functions(certain(labels)) == pytest.approx(2.0)
    weights = torch.tensor([0.9, 0.1], dtype=torch.float64)
    pred = Predictive(certain([[0, 1], [1, 0]]).members, Categorical(), weights)
    expected = math.exp(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    assert effective_functions(pred) == pytest.approx(expected)


def test_two_members_in_closed_form():
    """Affinity s has eigenvalues (1 ± s) / 2."""
    pred = certain([[0, 1, 2, 3], [0, 1, 2, 0]])
    s = 0.75
    assert affinity(pred)[0, 1] == pytest.approx(s)
    values = [(1 + s) / 2, (1 - s) / 2]
    expected = math.exp(-sum(v * math.log(v) for v in values))
    assert effective_functions(pred) == pytest.approx(expected)


def test_gaussian_affinity_is_the_integral():
    outputs = torch.tensor([[[0.3, 1.0]], [[1.5, -0.5]]], dtype=torch.float64)
    pred = Predictive(outputs, HeteroscedasticGaussian())
    mean, variance = pred.moments()
    a, b = (stats.norm(float(m), math.sqrt(v)) for m, v in zip(mean, variance, strict=True))
    area = integrate.quad(lambda t: math.sqrt(a.pdf(t) * b.pdf(t)), -15, 15)[0]
    assert float(affinity(pred)[0, 1]) == pytest.approx(area, rel=1e-8)
    double = Predictive(outputs.repeat_interleave(2, -1), HeteroscedasticGaussian())
    assert float(affinity(double)[0, 1]) == pytest.approx(area**2, rel=1e-8)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), HeteroscedasticGaussian()])
def test_affinity_is_a_positive_semidefinite_matrix_with_unit_diagonal(likelihood):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(8, 3, 4, generator=generator, dtype=torch.float64)
    S = affinity(Predictive(outputs, likelihood))
    torch.testing.assert_close(S, S.T)
    torch.testing.assert_close(S.diagonal(), torch.ones(8, dtype=torch.float64))
    assert float(torch.linalg.eigvalsh(S).min()) > -1e-12
    assert 1 < effective_functions(Predictive(outputs, likelihood)) < 8


def test_many_members_are_compared_by_evenly_spaced_ones():
    pred = certain([[k % 4, k // 4 % 4] for k in range(320)])  # sixteen functions
    whole = effective_number(affinity(pred))
    assert effective_functions(pred) == pytest.approx(whole, rel=0.02)
    few = compared_members(pred)
    assert few.size == 64 and affinity(pred).shape == (320, 320)
    weights = torch.zeros(320).double()
    weights[[3, 200]] = torch.tensor([0.75, 0.25]).double()
    few = compared_members(Predictive(pred.members, Categorical(), weights))
    assert few.weights is None and few.size == 64
    kept = (few.members == pred.members[3]).flatten(1).all(1).double().mean()
    assert float(kept) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(("chains", "draws"), [(5, 1000), (5, 1280), (8, 800), (3, 40)])
def test_spaced_draws_come_from_all_chains_alike(chains, draws):
    counts = torch.tensor(spaced(chains * draws, 64)).remainder(chains).bincount()
    assert len(counts) == chains and int(counts.max() - counts.min()) <= 8
