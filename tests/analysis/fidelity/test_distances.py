"""Distances between clouds and between predictions, in closed form."""

import math

import pytest
import torch

from shoal.analysis.fidelity import problems
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.distances import (
    covariance_error,
    function_distances,
    mean_error,
    mmd,
    sliced_wasserstein,
    total_variation_of_mixtures,
)

pytestmark = pytest.mark.usefixtures("double")


def quantiles(count):
    """Points that carry equal shares of N(0, 1) [count, 1]."""
    return torch.special.ndtri((torch.arange(count) + 0.5) / count)[:, None]


def test_wasserstein_of_two_normal_laws():
    """W2² = (m - n)² + (s - t)² in one dimension."""
    x = quantiles(2000)
    found = sliced_wasserstein(x, 1.5 * x + 0.7)
    assert math.isclose(found, math.hypot(0.7, 0.5), rel_tol=0.01)


def test_wasserstein_of_a_shift_sees_its_shadow():
    """A shift a has the shadow (a · axis), whose square is |a|² / d on average."""
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    shift = torch.tensor([1.0, -2.0, 0.5, 0.0])
    found = sliced_wasserstein(x, x + shift, directions=4000)
    assert math.isclose(found, shift.norm() / 2, rel_tol=0.05)
    assert sliced_wasserstein(x, x) == 0


def test_mmd_of_two_normal_laws():
    """In closed form: E k(x, y) = (1 + 2 / h²)^(-1/2) exp(-m² / 2(h² + 2)) for unit variances."""
    y = quantiles(1500)
    x = y + 1.0
    h2 = torch.nn.functional.pdist(y).square().median().item()
    same = (1 + 2 / h2) ** -0.5
    across = same * math.exp(-1 / (2 * (h2 + 2)))
    assert math.isclose(mmd(x, y), math.sqrt(2 * same - 2 * across), rel_tol=0.01)
    assert mmd(y, y) < 1e-6


def test_errors_of_mean_and_covariance():
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    S = torch.diag(torch.tensor([3.0, 1.0]))
    assert math.isclose(mean_error(x, torch.tensor([0.0, 1.0]), S), 0.5)
    # C = 1/2: the error is diag(-2.5, -0.5).
    assert math.isclose(covariance_error(x, S), math.hypot(2.5, 0.5) / math.hypot(3, 1))


def test_total_variation_of_two_normal_laws():
    """2 Φ(m / 2s) - 1."""
    found = total_variation_of_mixtures(torch.zeros(1, 2), torch.tensor([[0.6, 0.0]]), 0.5)
    target = math.erf(0.6 / (2 * 0.5) / math.sqrt(2))
    torch.testing.assert_close(found, torch.tensor([target, 0.0]), rtol=5e-3, atol=1e-6)


def test_mixtures_that_exclude_each_other():
    far = total_variation_of_mixtures(torch.zeros(3, 1), torch.full((2, 1), 50.0), 0.5)
    torch.testing.assert_close(far, torch.ones(1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", list(problems.registry))
def test_many_draws_of_the_reference_are_at_the_reference(name):
    """Distances of 300 stored draws are those of sampling noise alone."""
    torch.set_default_dtype(torch.float32)
    problem = problems.make(name)
    reference = references.load(problem)
    found = function_distances(problem, reference, reference.draws)
    assert found["tv/on"] < 0.04 and found["tv/off"] < 0.06
    assert found["mean/on"] < 0.2 and found["mean/off"] < 0.2
    assert found["std/on"] < 0.25 and found["std/off"] < 0.2
    assert found["agreement/on"] > 0.95
    one = function_distances(problem, reference, torch.zeros_like(reference.draws[:2]))
    assert one["std/on"] > 0.9 and one["tv/on"] > 4 * found["tv/on"]
