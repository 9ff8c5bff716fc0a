"""R-hat and effective draws, against autoregressions whose values are known."""

import pytest
import torch

from shoal.inference.samplers.convergence import autocorrelation, effective_draws, split_rhat


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_chains_that_agree_have_an_rhat_of_one():
    assert (split_rhat(noise(4, 500, 5)) < 1.01).all()


def test_equal_draws_do_not_look_like_chains_that_disagree():
    """Probabilities that round to 1 are ties; a constant has an R-hat of 1."""
    saturated = noise(4, 500, 5).clamp(max=-0.5)
    assert (split_rhat(saturated) < 1.02).all()
    assert (split_rhat(torch.ones(4, 100, 2)) == 1).all()


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda x: x + torch.tensor([0.0, 0.0, 0.0, 1.0])[:, None, None],
        lambda x: x * torch.tensor([1.0, 1.0, 1.0, 3.0])[:, None, None],
        lambda x: x + torch.linspace(0, 2, 500)[:, None],
    ],
    ids=["elsewhere", "wider", "drifting"],
)
def test_chains_that_disagree_have_a_large_rhat(spoilt):
    assert (split_rhat(spoilt(noise(4, 500, 3))) > 1.05).all()


def test_independent_draws_count_in_full_and_correlated_ones_less():
    """An autoregression with coefficient a has (1 - a) / (1 + a) of its draws."""
    draws = noise(4, 2000, 3)
    torch.testing.assert_close(effective_draws(draws), torch.full((3,), 8000.0), rtol=0.15, atol=0,
                               check_dtype=False)  # fmt: skip
    slow = draws.clone()
    for t in range(1, 2000):
        slow[:, t] = 0.6 * slow[:, t - 1] + 0.8 * draws[:, t]
    torch.testing.assert_close(effective_draws(slow), torch.full((3,), 2000.0), rtol=0.2, atol=0,
                               check_dtype=False)  # fmt: skip


def autoregression(coefficient, *shape):
    """x_t = a x_(t-1) + sqrt(1 - a²) noise, stationary from the first draw."""
    draws = noise(*shape)
    for t in range(1, shape[1]):
        draws[:, t] = coefficient * draws[:, t - 1] + (1 - coefficient**2) ** 0.5 * draws[:, t]
    return draws


def test_rhat_of_halves_counts_effective_draws():
    """R-hat² - 1 of one chain is 2 / n on average, n its effective draws: here 1000 / 19 = 53."""
    chains = autoregression(0.9, 30, 1000, 6)
    excess = torch.stack([split_rhat(chain[None]) ** 2 - 1 for chain in chains]).mean()
    assert 1 / 53 < excess < 4 / 53
    shifted = autoregression(0.0, 2, 4000, 1) + torch.tensor([0.0, 2.0])[:, None, None]
    # Normal means 0 and 2 with variance 1: B / W of raw values is 4 / 3 of a variance of 1.
    assert split_rhat(shifted) == pytest.approx((1 + 4 / 3) ** 0.5, rel=0.1)


def test_the_autocorrelation_is_that_of_the_autoregression():
    found = autocorrelation(autoregression(0.8, 4, 4000, 2), 5).mean((0, 2))
    assert found.tolist() == pytest.approx([0.8**k for k in range(5)], abs=0.05)


def test_constant_draws_count_in_full_and_alternating_ones_have_a_limit():
    assert effective_draws(torch.ones(3, 50, 2)).tolist() == [150.0, 150.0]
    alternating = torch.tensor([1.0, -1.0]).repeat(50).reshape(1, 100, 1)
    assert float(effective_draws(alternating)) == pytest.approx(200.0)
