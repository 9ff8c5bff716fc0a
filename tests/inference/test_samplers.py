"""Samplers: their draws have the moments of known densities."""

import math

import pytest
import torch

from shoal.core.errors import ConfigError
from shoal.inference.samplers import HMC, MCLMC, SGHMC, SGLD, Clock
from shoal.inference.samplers.convergence import effective_draws

VARIANCES = torch.logspace(-1, 1, 8, dtype=torch.float64)


class Normal:
    """Independent normal columns around 1 with the given variances."""

    def __init__(self, chains, variances=VARIANCES, points=1.0):
        self.variances, self.points = variances, points
        self.numbers = torch.full((chains,), len(variances))
        self.used = torch.ones(chains, len(variances), dtype=torch.float64)

    def __call__(self, x, step):
        away = x - 1
        return -0.5 * (away**2 / self.variances).sum(1), -away / self.variances


def sampled(sampler, density, warmup, draws, thin=1, seed=0):
    """Draws [draws, M, D] of chains that begin at 0, and the state of the sampler."""
    steps = warmup + math.ceil(draws * thin / sampler.kept)
    state = sampler.begin(density, torch.zeros_like(density.used), seed)
    kept = []
    for step in range(steps):
        clock = Clock(step, warmup, steps, seed)
        sampler.step(density, state, clock)
        if step >= warmup and sampler.keeps(clock):
            kept.append(state["x"].clone())
    return torch.stack(kept[:: max(thin, 1)]), state


LAWS = {
    "mclmc": (MCLMC(energy_error=1e-3, length=1.0), 400, 600),
    "leapfrog mclmc": (MCLMC(energy_error=1e-3, length=1.0, integrator="leapfrog"), 400, 600),
    "auto mclmc": (MCLMC(energy_error=1e-3, length="auto"), 400, 600),
    "plain mclmc": (MCLMC(energy_error=1e-3, length=1.0, precondition=False), 400, 800),
    "sghmc": (SGHMC(lr=0.02), 400, 1000),
    "sgld": (SGLD(lr=0.02), 1200, 1500),
    "preconditioned": (SGHMC(lr=0.01, precondition=True), 500, 1000),
    "cyclical": (SGHMC(lr=0.03, schedule="cyclical", cycles=2), 400, 1500),
    "decaying": (SGHMC(lr=0.04, schedule="decaying"), 400, 1500),
}


@pytest.mark.parametrize("name", LAWS)
def test_draws_have_the_moments_of_a_normal_density(name):
    sampler, warmup, draws = LAWS[name]
    density = Normal(chains=100)
    x, _ = sampled(sampler, density, warmup, draws)
    flat = x.flatten(0, 1)
    assert ((flat.mean(0) - 1).abs() < 0.15 * VARIANCES.sqrt()).all()
    wide = 0.0 if name.endswith("mclmc") else sampler.lr / (2 * (1 + sampler.momentum))
    ratio = flat.var(0) / VARIANCES * (1 - wide / VARIANCES)
    assert ((ratio - 1).abs() < 0.2).all(), ratio


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_finite_steps_widen_a_normal_density_as_theory_says(momentum):
    # variance = 1 / a / (1 - lr a / (2 (1 + momentum))), with N = 1 and precision a
    a = torch.tensor([1.0, 2.0], dtype=torch.float64)
    lr = 0.5
    density = Normal(2000, 1 / a)
    x, _ = sampled(SGHMC(lr=lr, momentum=momentum), density, 300, 60, thin=5)
    exact = 1 / a / (1 - lr * a / (2 * (1 + momentum)))
    torch.testing.assert_close(x.flatten(0, 1).var(0), exact, rtol=0.03, atol=0)


def test_the_bias_of_mclmc_falls_with_its_energy_error():
    density = Normal(200, torch.ones(30, dtype=torch.float64))
    errors = {}
    for wanted in (2.0, 1e-3):
        x, state = sampled(MCLMC(wanted, length=1.0, precondition=False), density, 600, 600)
        found = MCLMC().diagnostics(state)["energy error"]
        assert 0.3 * wanted < float(found.mean()) < 3 * wanted
        errors[wanted] = float((x.flatten(0, 1).var(0) - 1).abs().mean())
    assert errors[1e-3] < 0.05 < errors[2.0]


class Turned(Normal):
    """A normal density around 0, whose axes are not the coordinates."""

    def __init__(self, chains, columns, condition):
        end = 0.5 * math.log10(condition)
        super().__init__(chains, torch.logspace(-end, end, columns, dtype=torch.float64))
        generator = torch.Generator().manual_seed(0)
        square = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
        self.axes = torch.linalg.qr(square).Q * self.variances.sqrt()

    def normal(self, x):
        """Coordinates whose density is standard normal."""
        return x @ (self.axes / self.variances)

    def __call__(self, x, step):
        z = self.normal(x)
        return -0.5 * z.square().sum(1), -z @ (self.axes / self.variances).T


@pytest.mark.parametrize(("columns", "condition"), [(10, 100), (30, 10), (100, 1)])
def test_the_length_that_mclmc_finds_costs_at_most_a_quarter_more_steps_than_the_best(
    columns, condition
):
    density, costs = Turned(20, columns, condition), {}
    for length in (0.3, 1.0, 3.0, 10.0, "auto"):
        x, state = sampled(MCLMC(energy_error=1e-3, length=length), density, 1000, 800)
        z = density.normal(x)
        both = torch.stack([z, z.square()])  # for means and for variances
        effective = effective_draws(both.transpose(0, 1).flatten(2)[None]).view(2, -1)
        costs[length] = float((len(z) / effective).mean(1).max())
    found = costs.pop("auto")
    assert found < 1.25 * min(costs.values()), (found, costs)
    flat = z.flatten(0, 1)
    assert flat.mean(0).abs().max() < 0.1
    identity = torch.eye(columns, dtype=torch.float64)
    assert (flat.T.cov() - identity).abs().max() < 0.2
    lengths = state["length"] / math.sqrt(columns)
    assert 0.3 < float(lengths.min()) and float(lengths.max()) < 10


def test_chains_that_do_not_mix_keep_the_length_of_networks_bit_for_bit():
    density = Normal(3, torch.logspace(-6, 6, 30, dtype=torch.float64))
    known = {"precondition": False}
    x, state = sampled(MCLMC(length="auto", **known), density, 400, 50)
    wanted, _ = sampled(MCLMC(length=3.0, **known), density, 400, 50)
    assert (state["record"][:80].var(0) > 0).all()
    assert torch.equal(x, wanted)


def test_a_long_record_is_thinned_and_a_short_one_is_left_out():
    sampler = MCLMC(length="auto")
    for warmup, rows in ((10, 0), (40, 0), (100, 20), (5000, 1000), (5004, 501), (60_000, 1000)):
        phases = [sampler.phase(Clock(step, warmup, warmup)) for step in range(warmup)]
        assert phases.count("records") + phases.count(None) == rows
        assert phases.count(None) == (rows > 0)


@pytest.mark.parametrize("length", [0, -1.0, "long", math.inf])
def test_a_length_that_is_none_gets_a_sentence(length):
    with pytest.raises(ConfigError, match="length"):
        MCLMC(length=length)


@pytest.mark.parametrize("wanted", [0.65, 0.9])
def test_hmc_finds_the_wanted_acceptance_and_the_widths_and_is_exact(wanted):
    density = Normal(chains=400)
    x, state = sampled(HMC(leaps=6, acceptance=wanted), density, 200, 50)
    found = HMC().diagnostics(state)
    assert abs(float(found["acceptance"].mean()) - wanted) < 0.05
    assert (found["refused"] == 0).all()
    widths = state["unit"].log().mean(0).exp() / VARIANCES.sqrt()
    assert ((widths - 1).abs() < 0.15).all(), widths
    for power, exact in ((1, 0.0), (2, 1.0)):  # standard errors over independent chains
        each = ((x - 1) / VARIANCES.sqrt()).pow(power).mean(0)
        errors = (each.mean(0) - exact) / (each.std(0) / math.sqrt(len(each)))
        assert errors.abs().max() < 4, errors


class Banana(Normal):
    """x0 ~ N(0, 1.5²) and x1 | x0 ~ N(x0² / 2, 1)."""

    def __call__(self, x, step):
        off = x[:, 1] - x[:, 0] ** 2 / 2
        gradient = torch.stack([-x[:, 0] / 2.25 + x[:, 0] * off, -off], 1)
        return -(x[:, 0] ** 2) / 4.5 - off**2 / 2, gradient


def test_trajectories_of_hmc_leave_a_density_as_it_is():
    generator, chains = torch.Generator().manual_seed(0), 20_000
    first, second = torch.randn(2, chains, generator=generator, dtype=torch.float64)
    first = 1.5 * first
    density = Banana(chains, torch.ones(2, dtype=torch.float64))
    sampler = HMC(leaps=5)
    state = sampler.begin(density, torch.stack([first, second + first**2 / 2], 1), 0)
    state["size"] = torch.full_like(state["size"], 0.9)  # many are refused
    for step in range(15):
        sampler.step(density, state, Clock(step, 0, 15))
    assert 0.3 < float(sampler.diagnostics(state)["acceptance"].mean()) < 0.9
    x, y = state["x"].T
    exact = {x: 0.0, x**2: 2.25, y: 1.125, (y - 1.125) ** 2: 1 + 2.25**2 / 2, x * y: 0.0}
    for found, wanted in exact.items():
        assert abs(float(found.mean()) - wanted) < 4 * float(found.std()) / math.sqrt(chains)
    assert not torch.equal(x, first)


def test_hmc_stays_inside_a_domain():
    class Half(Normal):
        def __call__(self, x, step):
            value, gradient = super().__call__(x, step)
            return torch.where(x[:, 0] > 0.05, -torch.inf, value), gradient

    x, _ = sampled(HMC(leaps=5), Half(20), 100, 100)
    assert x.isfinite().all() and (x[..., 0] <= 0.05).all()
    assert len(x[..., 0].unique()) > 500


@pytest.mark.parametrize("sampler", [MCLMC(), HMC(leaps=3)], ids=["mclmc", "hmc"])
def test_a_shorter_chain_uses_its_own_columns_only(sampler):
    class Padded(Normal):
        def __call__(self, x, step):
            away = (x - 1) * self.used
            return -0.5 * (away**2).sum(1), -away

    padded = Padded(2, torch.ones(6, dtype=torch.float64))
    padded.numbers = torch.tensor([6, 4])
    padded.used[1, 4:] = 0
    x, _ = sampled(sampler, padded, 60, 10)
    assert (x[:, 1, 4:] == 0).all() and (x[:, 1, :4] != 0).all()


def test_a_jump_of_energy_is_refused_and_the_chain_turns_round():
    class Cliff(Normal):
        def __call__(self, x, step):
            value, gradient = super().__call__(x, step)
            return torch.where(x[:, 0] > 0.05, -1e9, value), gradient

    density = Cliff(5)
    x, state = sampled(MCLMC(), density, 100, 400)
    assert (x[..., 0] <= 0.05).all()
    assert (MCLMC().diagnostics(state)["refused"] > 0).all()


def test_the_first_direction_is_not_the_noise_of_the_first_step():
    density = Normal(3)
    sampler = MCLMC()
    first = sampler.begin(density, torch.zeros_like(density.used), 0)["u"]
    noise = Clock(0, 10, 20, seed=0).normal("direction", first)
    cosine = torch.nn.functional.cosine_similarity(first, noise)
    assert (cosine < 0.99).all(), cosine


def test_uniform_numbers_are_uniform_and_fixed_by_step_and_seed():
    like = torch.zeros(4000)
    u = Clock(3, 0, 9, seed=1).uniform("accept", like)
    assert torch.equal(Clock(3, 0, 9, seed=1).uniform("accept", like), u)
    assert not torch.equal(Clock(4, 0, 9, seed=1).uniform("accept", like), u)
    away = u.sort().values - torch.linspace(0, 1, 4000)
    assert float(away.abs().max()) < 1.63 / math.sqrt(4000)  # Kolmogorov, at one per cent
