"""The no-U-turn sampler: NumPyro's trees with densities of torch."""

import gc
import math
import sys
import weakref

import pytest
import torch
from small_runs import assert_equal_trees, assert_one_sentence, frozen
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.inference.samplers import NUTS, Clock

CHAINS = 40
REASON = "the sampler is that of an optional library"


@pytest.fixture
def numpyro():
    return pytest.importorskip("numpyro", reason=REASON)


def errors_of(draws, mean, covariance):
    """Errors of means and covariances, in standard errors over independent chains."""
    away = draws.double() - mean
    squares = away.unsqueeze(-1) * away.unsqueeze(-2)
    parts = ((away, torch.zeros_like(mean)), (squares, covariance))
    errors = []
    for found, exact in parts:
        each = found.mean(0)
        errors.append(((each.mean(0) - exact) / (each.std(0) / math.sqrt(len(each)))).flatten())
    return torch.cat(errors)


POINTS, COLUMNS, NOISE = 40, 3, 0.5


def trained(members, **options):
    """A linear model, and mean and covariance of its posterior at a temperature."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(POINTS, COLUMNS, generator=generator) * torch.logspace(-0.5, 0.5, COLUMNS)
    y = x.sum(1) + NOISE * torch.randn(POINTS, generator=generator)
    run = shoal.fit(
        shoal.Ensemble.init(lambda: nn.Linear(COLUMNS, 1), members), (x, y), steps=20, lr=0.05,
        likelihood=shoal.likelihoods.Gaussian(NOISE), progress=False, **options,
    )  # fmt: skip
    rows = torch.cat([x, torch.ones(POINTS, 1)], 1).double()
    precision = rows.mT @ rows / NOISE**2 + torch.eye(COLUMNS + 1)
    covariance = torch.linalg.inv(precision)
    return run, covariance @ (rows.mT @ y.double()) / NOISE**2, covariance


def rows_of(drawn, draws):
    parts = [drawn.ensemble.weights[n].detach() for n in ("weight", "bias")]
    return torch.cat([part.reshape(draws, -1, part[0].numel()) for part in parts], -1)


@pytest.mark.parametrize("dense", [False, True])
def test_draws_are_those_of_the_conjugate_posterior(numpyro, dense):
    run, mean, covariance = trained(CHAINS)
    sampler = {"name": "nuts", "dense": dense}
    drawn = shoal.draw(run, sampler=sampler, draws=60, warmup=100, progress=False)
    errors = errors_of(rows_of(drawn, 60), mean, covariance)
    assert errors.abs().max() < 5, errors
    known = drawn.provenance["draws"]
    assert max(known["refused"]) == 0 and 0.6 < min(known["acceptance"])
    assert drawn.chains((torch.randn(20, COLUMNS), torch.randn(20))).accepted.shape == (CHAINS,)


def test_draws_of_a_density_have_its_moments(numpyro):
    def banana(x):
        return -(x[0] ** 2) / 2 - (x[1] - (x[0] ** 2 - 1) / 2) ** 2 / 2

    start = torch.zeros(CHAINS, 2, dtype=torch.float64)
    draws = shoal.sample(banana, start, sampler="nuts", draws=150, warmup=100)
    exact = torch.tensor([[1.0, 0.0], [0.0, 1.5]], dtype=torch.float64)
    errors = errors_of(draws, torch.zeros(2), exact)
    assert draws.shape == (150, CHAINS, 2) and errors.abs().max() < 5, errors


def test_a_killed_drawing_goes_on_bit_for_bit(numpyro, tmp_path, monkeypatch):
    run, _, _ = trained(2)
    options = {"sampler": "nuts", "draws": 6, "warmup": 5, "progress": False}
    whole = shoal.draw(run, **options)
    genuine = NUTS.step

    def dying(self, density, state, clock):
        if clock.step == 7:
            raise InterruptedError
        genuine(self, density, state, clock)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(NUTS, "step", dying)
        shoal.draw(run, out=tmp_path / "run", save_every=0, **options)
    again = shoal.draw(run, out=tmp_path / "run", resume=True, **options)
    assert_equal_trees(frozen(again.ensemble), frozen(whole.ensemble))


def test_chains_of_different_length_use_their_own_columns(numpyro):
    class Padded:
        """Normal densities of four and of two columns, in single precision."""

        numbers, points = torch.tensor([4, 2] * 30), 1.0
        used = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]]).repeat(30, 1)

        def __call__(self, x, step):
            away = (x - 1) * self.used
            return -0.5 * away.square().sum(1), -away

    density, sampler = Padded(), NUTS()
    state, draws = sampler.begin(density, torch.zeros(60, 4), 0), []
    for step in range(200):
        sampler.step(density, state, Clock(step, 60, 200))
        draws.append(state["x"])
    x = torch.stack(draws[60:])
    assert x.dtype == torch.float32 and (x[:, 1::2, 2:] == 0).all()
    for chains, width in ((x[:, ::2], 4), (x[:, 1::2, :2], 2)):
        errors = errors_of(chains, torch.ones(width), torch.eye(width))
        assert errors.abs().max() < 5, errors
    gone = weakref.ref(density)
    del density
    gc.collect()
    assert gone() is None  # compiled trees keep no density and no data alive


def test_an_error_in_the_density_is_raised_as_it_is(numpyro):
    calls = []

    def breaks(x):
        calls.append(0)
        if len(calls) > 3:
            raise ZeroDivisionError("one over nothing")
        return -x.square().sum()

    with pytest.raises(ZeroDivisionError, match="one over nothing"):
        shoal.sample(breaks, torch.zeros(2, 2), sampler="nuts", draws=3, warmup=3)


def test_many_weights_get_a_sentence(numpyro):
    class Wide:
        numbers, points, used = torch.tensor([6000]), 1.0, torch.ones(1, 1)

        def __call__(self, x, step):
            return -0.5 * x.square().sum(1), -x

    with pytest.warns(shoal.ShoalWarning, match=r"6,000 weights.*'mclmc'.* fewer weights"):
        NUTS().begin(Wide(), torch.zeros(1, 6000), 0)


@pytest.mark.parametrize("options", [{"depth": 0}, {"acceptance": 1.0}])
def test_bad_settings_get_one_sentence(options):
    with pytest.raises(ConfigError) as error:
        shoal.sample(sum, torch.zeros(2, 2), sampler={"name": "nuts", **options})
    assert_one_sentence(error.value, next(iter(options)))


def test_without_its_library_the_sampler_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpyro", None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[fidelity\]'"):
        shoal.sample(lambda x: -x.square().sum(), torch.zeros(2, 2), sampler="nuts")
