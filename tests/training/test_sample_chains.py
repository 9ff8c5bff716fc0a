"""`sample` with a sampler: draws of chains have the moments of known densities."""

import math

import pytest
import torch
from small_runs import assert_one_sentence

import shoal
from shoal.core.errors import ConfigError, ShoalError

CHAINS = 500
HMC = shoal.samplers.HMC(leaps=5)


def normal(x):
    """Two coordinates with standard deviation 1 and 3, and correlation 0.6, around (1, -2)."""
    a, b = x[0] - 1, (x[1] + 2) / 3
    return -(a * a - 1.2 * a * b + b * b) / (2 * (1 - 0.36))


def banana(x):
    """x0 ~ N(0, 1) and x1 | x0 ~ N((x0² - 1) / 2, 1)."""
    return -(x[0] ** 2) / 2 - (x[1] - (x[0] ** 2 - 1) / 2) ** 2 / 2


def mixture(x):
    """0.3 N(-1, 1) + 0.7 N(1, 1), the centre in all three coordinates."""
    apart = [math.log(w) - (x - c).square().sum() / 2 for w, c in ((0.3, -1.0), (0.7, 1.0))]
    return torch.logsumexp(torch.stack(apart), 0)


MOMENTS = {
    "normal": (normal, [1.0, -2.0], [1.0, 9.0], (0, 1, 1.8)),
    "banana": (banana, [0.0, 0.0], [1.0, 1.5], (0, 1, 0.0)),
    "mixture": (mixture, [0.4] * 3, [1 + 0.84] * 3, (0, 2, 0.84)),
}


def deviations(x, mean, variance, pair):
    """Errors of means, variances and a covariance, in standard errors over independent chains."""
    away = x - torch.tensor(mean)
    i, j, covariance = pair
    found = torch.cat([away, away.square(), (away[..., i] * away[..., j]).unsqueeze(-1)], -1)
    exact = torch.cat([torch.zeros(len(mean)), torch.tensor([*variance, covariance])])
    each = found.mean(0)  # [M, statistics]
    return (each.mean(0) - exact) / (each.std(0) / math.sqrt(len(each))), each.mean(0) - exact


def begun(dimensions):
    return torch.zeros(CHAINS, dimensions, dtype=torch.float64)


@pytest.mark.parametrize("name", MOMENTS)
def test_draws_of_hmc_have_exact_moments(name):
    density, *known = MOMENTS[name]
    x = shoal.sample(density, begun(len(known[0])), sampler=HMC, draws=50, warmup=80)
    assert x.shape == (50, CHAINS, len(known[0]))
    errors, _ = deviations(x, *known)
    assert errors.abs().max() < 4, errors


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("banana", {"name": "mclmc", "energy_error": 1e-3}),
        ("mixture", {"name": "mclmc", "energy_error": 1e-3}),
        ("mixture", {"name": "sghmc", "lr": 0.02}),
        ("normal", {"name": "sgld", "lr": 0.2}),
    ],
    ids=["mclmc", "mclmc in three dimensions", "sghmc", "sgld"],
)
def test_draws_of_other_samplers_are_near(name, sampler):
    density, *known = MOMENTS[name]
    x = shoal.sample(density, begun(len(known[0])), sampler=sampler, draws=50, warmup=300, thin=4)
    _, errors = deviations(x, *known)
    widths = torch.tensor([*map(math.sqrt, known[1]), *known[1], max(known[1])])
    assert (errors.abs() / widths).max() < 0.15, errors / widths


def test_one_coordinate_and_single_precision():
    start = torch.zeros(CHAINS, 1)
    x = shoal.sample(lambda x: (x - x.exp()).sum(), start, sampler=HMC, draws=20, warmup=60)
    assert x.dtype == torch.float32
    assert abs(float(x.exp().mean()) - 1) < 0.05  # the exponential of x has the law Exp(1)


def test_a_seed_fixes_the_draws_and_the_start_is_left_alone():
    start = begun(2)[:3]
    same = [
        shoal.sample(normal, start, sampler="hmc", draws=3, warmup=5, seed=seed)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(same[0], same[1]) and not torch.equal(same[0], same[2])
    assert (start == 0).all()


def test_a_density_with_choices_in_it():
    def halves(x):
        return -x.square().sum() / 2 if x.sum() > 0 else -x.square().sum() / 8

    with pytest.warns(shoal.ShoalWarning, match="one after another"):
        x = shoal.sample(halves, torch.tensor([[-1.0], [1.0]]), sampler="hmc", draws=3, warmup=3)
    assert x.isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": "hmc", "lr": 0.2}, "leave out"),
        ({"draws": 5}, "sampler='mclmc'"),
        ({"sampler": {"name": "hmc", "leaps": 0}}, "leaps"),
        ({"sampler": {"name": "hmc", "acceptance": 1.0}}, "acceptance"),
        ({"sampler": "mclmc", "start": torch.zeros(2, 1)}, "two coordinates"),
        ({"sampler": "hmc", "log_density": lambda x: -x.square()}, "returns its log density"),
        ({"sampler": "hmc", "thin": 0}, "thin"),
    ],
)
def test_mistakes_get_one_sentence(options, words):
    given = {"log_density": normal, "start": torch.zeros(2, 2)} | options
    with pytest.raises(ShoalError) as error:
        shoal.sample(given.pop("log_density"), given.pop("start"), **given)
    assert isinstance(error.value, ConfigError)
    assert_one_sentence(error.value, words)
