"""Draws: chains sample the posterior, survive kills bit for bit, and load as a run."""

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from small_runs import assert_equal_trees, assert_one_sentence, frozen
from torch import nn

import shoal
from shoal.core.errors import ConfigError, ShoalError, StorageError
from shoal.core.structure import Weighted
from shoal.data.batches.sources import ArrayBatches
from shoal.inference.posterior import Posterior
from shoal.inference.samplers import HMC, MCLMC, SGHMC
from shoal.training.draws.density import PosteriorDensity

POINTS, COLUMNS, NOISE = 40, 7, 0.5


def problem(seed=0):
    """Inputs and targets of a linear model."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(POINTS, COLUMNS, generator=generator) * torch.logspace(-0.5, 0.5, COLUMNS)
    y = x.sum(1) + NOISE * torch.randn(POINTS, generator=generator)
    return x, y


def trained(members=20, **options):
    x, y = problem()
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(COLUMNS, 1), members)
    likelihood = shoal.likelihoods.Gaussian(NOISE)
    settings = {"likelihood": likelihood, "method": "ensemble", "steps": 20, "lr": 0.05}
    return shoal.fit(ensemble, (x, y), progress=False, **(settings | options))


def drawn(run, **options):
    return shoal.draw(run, progress=False, **options)


LENGTHS = {"draws": 6, "warmup": 5, "thin": 2}
SAMPLERS = ["mclmc", {"name": "hmc", "leaps": 3}, "sghmc", {"name": "sgld", "schedule": "decaying"}]
WHOLE = {"mclmc": MCLMC, "hmc": HMC}
RECORDS = {"draws": 6, "warmup": 200, "thin": 2}  # steps 140 to 179 set the length of mclmc


class Killed(Exception):
    """The process ended here."""


def kill_at(monkeypatch, step, kind):
    """Let a sampler end the process at a step."""
    genuine = kind.step

    def dying(self, density, state, clock):
        if clock.step == step:
            raise Killed
        genuine(self, density, state, clock)

    monkeypatch.setattr(kind, "step", dying)


class TestFolder:
    @pytest.mark.parametrize(
        ("sampler", "step", "lengths"),
        [(sampler, step, LENGTHS) for sampler in SAMPLERS for step in (2, 9)]
        + [("mclmc", step, RECORDS) for step in (160, 205)],
        ids=str,
    )
    def test_a_killed_sampling_goes_on_bit_for_bit(
        self, sampler, step, lengths, tmp_path, monkeypatch
    ):
        run = trained(members=3)
        name = sampler if isinstance(sampler, str) else sampler["name"]
        batch_size = None if name in WHOLE else 16
        options = {"sampler": sampler, "batch_size": batch_size, **lengths}
        whole = drawn(run, **options)
        if lengths is RECORDS:
            found = torch.tensor(whole.provenance["draws"]["length"])
            assert ((found / math.sqrt(COLUMNS + 1) - 3).abs() > 0.5).all()
        with monkeypatch.context() as patch, pytest.raises(Killed):
            kill_at(patch, step, WHOLE.get(name, SGHMC))
            drawn(run, out=tmp_path / "run", save_every=0, **options)
        with pytest.raises(StorageError, match="have not ended"):
            shoal.load(tmp_path / "run", lambda: nn.Linear(COLUMNS, 1), run.likelihood)
        again = drawn(run, out=tmp_path / "run", resume=True, **options)
        assert_equal_trees(frozen(again.ensemble), frozen(whole.ensemble))
        assert not (tmp_path / "run" / "sampling").exists()
        ready = drawn(run, out=tmp_path / "run", resume=True, **options)
        assert_equal_trees(frozen(ready.ensemble), frozen(whole.ensemble))

    @pytest.mark.parametrize("precision", ["float32", "bfloat16"])
    def test_a_folder_loads_as_the_run_that_was_drawn(self, precision, tmp_path):
        run = trained(members=3)
        draws = drawn(run, out=tmp_path / "run", precision=precision, **LENGTHS)
        loaded = shoal.load(tmp_path / "run", lambda: nn.Linear(COLUMNS, 1), run.likelihood)
        assert_equal_trees(frozen(loaded.ensemble), frozen(draws.ensemble))
        assert loaded.ensemble.dtype == torch.float32
        assert loaded.config["draws"]["chains"] == 3 and loaded.ensemble.members == 18
        x, _ = problem(1)
        assert torch.equal(shoal.predict(loaded, x).mean, shoal.predict(draws, x).mean)

    def test_two_architectures_are_drawn_together(self, tmp_path):
        x, y = problem()
        builds = [
            (lambda: nn.Linear(COLUMNS, 1), 2),
            (lambda: nn.Sequential(nn.Linear(COLUMNS, 3), nn.Tanh(), nn.Linear(3, 1)), 3),
        ]
        ensemble = shoal.Ensemble.init(builds)
        likelihood = shoal.likelihoods.Gaussian(NOISE)
        run = shoal.fit(
            ensemble, (x, y), likelihood=likelihood, method="ensemble", steps=3, progress=False
        )
        draws = drawn(run, out=tmp_path / "run", **LENGTHS)
        loaded = shoal.load(tmp_path / "run", builds, likelihood)
        assert_equal_trees(frozen(loaded.ensemble), frozen(draws.ensemble))
        assert [group.members for group in draws.ensemble.groups] == [12, 18]


def test_draws_of_hmc_are_those_of_the_conjugate_posterior():
    run = trained(members=40)
    x, y = (t.double() for t in problem())
    rows = torch.cat([x, torch.ones(POINTS, 1)], 1)
    precision = rows.mT @ rows / NOISE**2 + torch.eye(COLUMNS + 1)  # a prior with deviation 1
    mean = torch.linalg.solve(precision, rows.mT @ y / NOISE**2)
    draws = drawn(run, sampler={"name": "hmc", "leaps": 6}, draws=20, warmup=100).ensemble
    weight, bias = (draws.weights[n].detach().reshape(20, 40, -1) for n in ("weight", "bias"))
    away = torch.cat([weight, bias], -1).double() - mean
    exact = torch.linalg.inv(precision)
    for found, wanted in ((away, 0.0), (away.square(), exact.diagonal())):
        each = found.mean(0)
        errors = (each.mean(0) - wanted) / (each.std(0) / 40**0.5)
        assert errors.abs().max() < 5, errors


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"sampler": "mclmd"}, "did you mean 'mclmc'"),
            ({"sampler": "mclmc", "batch_size": 8}, "sees all data"),
            ({"sampler": {"name": "sghmc", "momentum": 1.0}}, "momentum"),
            ({"draws": 0}, "draws"),
            ({"temperature": 0.0}, "temperature"),
            ({"prior": "function-space"}, "no density at the weights"),
            ({"draws": 10**12}, "keep fewer"),
        ],
    )
    def test_bad_input_gets_one_sentence(self, options, words, tmp_path):
        run = trained(members=2)
        with pytest.raises(ShoalError) as error:
            drawn(run, out=tmp_path / "run", **options)
        assert_one_sentence(error.value, words)
        assert not (tmp_path / "run").exists()

    def test_draws_are_not_drawn_from_or_grown(self):
        run = drawn(trained(members=2), **LENGTHS)
        for call in (shoal.draw, shoal.grow):
            with pytest.raises(ConfigError, match="draw") as error:
                call(run, progress=False)
            assert_one_sentence(error.value)

    def test_the_trained_run_stays_as_it_was(self):
        run = trained(members=2)
        before = frozen(run.ensemble)
        drawn(run, **LENGTHS)
        assert_equal_trees(frozen(run.ensemble), before)


@pytest.mark.parametrize("pieces", [POINTS, 16])
def test_the_density_is_that_of_autograd(pieces):
    x, y = problem()
    x, y = x.double(), y.double()
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(COLUMNS, 2), 3).to(torch.float64)
    likelihood = shoal.likelihoods.HeteroscedasticGaussian().initialised_from(y)
    posterior = Posterior(likelihood, shoal.priors.Gaussian(0.7), POINTS, temperature=2.0)
    batches = ArrayBatches(x, y, pieces)
    density = PosteriorDensity(ensemble, posterior, batches, True, torch.Size())
    theta = torch.randn(3, density.width, dtype=torch.float64, requires_grad=True)
    value, gradient = density(theta.detach(), 0)
    weight, bias = theta[:, : 2 * COLUMNS].reshape(3, 2, COLUMNS), theta[:, 2 * COLUMNS :]
    outputs = x @ weight.mT + bias.unsqueeze(1)
    exact = likelihood.log_prob(outputs, y).sum(1) / 2.0
    normal = torch.distributions.Normal(0.0, 0.7)
    exact = exact + normal.log_prob(theta).sum(1) / 2.0
    (by_autograd,) = torch.autograd.grad(exact.sum(), theta)
    away = value - exact.detach()
    torch.testing.assert_close(away, away.mean().expand(3), rtol=0, atol=1e-6)  # one constant
    torch.testing.assert_close(gradient, by_autograd, rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize(
    "likelihood", ["heteroscedastic", "homoscedastic", "gaussian", "student-t"]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_at_the_outputs_are_those_of_autograd(likelihood, weighted):
    generator = torch.Generator().manual_seed(0)
    y = 3 + 2 * torch.randn(9, generator=generator, dtype=torch.float64)
    made = shoal.likelihoods.registry.make(likelihood).initialised_from(y)
    posterior = Posterior(made, shoal.priors.Gaussian(), 9)
    shape = 3, 9, made.width(1)
    outputs = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = Weighted.of_pair(y, torch.rand(9, generator=generator)) if weighted else y
    exact = posterior.log_likelihood(outputs, targets)
    (wanted,) = torch.autograd.grad(exact.sum(), outputs)
    value, gradient = posterior.with_gradient(outputs.detach(), targets)
    torch.testing.assert_close(value, exact.detach())
    torch.testing.assert_close(gradient, wanted)


def test_a_likelihood_of_ones_own_inherits_no_formula():
    @dataclass(frozen=True, repr=False)
    class Wider(shoal.likelihoods.Gaussian):
        def log_prob(self, outputs, y):
            return 0.5 * super().log_prob(outputs, y)

    y, outputs = torch.zeros(4), torch.ones(2, 4, 1)
    _, gradient = Posterior(Wider(), shoal.priors.Gaussian(), 4).with_gradient(outputs, y)
    torch.testing.assert_close(gradient, torch.full_like(outputs, -0.125))


def test_chains_of_another_version_are_refused(tmp_path, monkeypatch):
    run = trained(members=2)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 9, MCLMC)
        genuine = MCLMC.begin
        patch.setattr(MCLMC, "begin", lambda *a: genuine(*a) | {"older": torch.zeros(2)})
        drawn(run, out=tmp_path / "run", save_every=0, **LENGTHS)
    with pytest.raises(StorageError) as error:
        drawn(run, out=tmp_path / "run", resume=True, **LENGTHS)
    assert_one_sentence(error.value, "another version")


class Headed(nn.Module):
    """A frozen trunk that all members share, and a head of their own."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.trunk = nn.Linear(COLUMNS, 4)
        with torch.no_grad():
            self.trunk.weight.normal_(generator=generator)
            self.trunk.bias.zero_()
        self.trunk.requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x)))


@pytest.mark.parametrize("sampler", ["mclmc", "sghmc"])
def test_cached_features_change_no_draw_of_a_head(sampler):
    x, y = problem()
    likelihood = shoal.likelihoods.Gaussian(NOISE)
    settings = {"likelihood": likelihood, "method": "ensemble", "steps": 3, "progress": False}
    run = shoal.fit(shoal.Ensemble.init(Headed, 3), (x, y), **settings)
    plain, cached = (drawn(run, sampler=sampler, cache=each, **LENGTHS) for each in (False, True))
    assert set(plain.ensemble.weights) == {"head.weight", "head.bias"}
    for name, tensor in plain.ensemble.weights.items():
        torch.testing.assert_close(cached.ensemble.weights[name], tensor, rtol=1e-4, atol=1e-5)


def two_layers():
    return nn.Sequential(nn.Linear(COLUMNS, 4), nn.Tanh(), nn.Linear(4, 1))


class TestOf:
    """Chains move the weights that `of` names, and the others stay those of their member."""

    @pytest.fixture
    def run(self):
        settings = {"likelihood": shoal.likelihoods.Gaussian(NOISE), "method": "ensemble"}
        ensemble = shoal.Ensemble.init(two_layers, 2)
        return shoal.fit(ensemble, problem(), steps=3, progress=False, **settings)

    @pytest.mark.parametrize("of", ["2", ["2.weight", "2.b*"]])
    def test_other_weights_stay(self, run, of, tmp_path):
        made = drawn(run, of=of, sampler="sghmc", out=tmp_path / "drawn", **LENGTHS)
        trained = run.ensemble.weights
        for ensemble in (made.ensemble, shoal.load(tmp_path / "drawn", two_layers).ensemble):
            for name, tensor in ensemble.weights.items():
                each = tensor.detach().unflatten(0, (LENGTHS["draws"], 2))
                stays = torch.equal(each, trained[name].detach().expand_as(each))
                assert stays == name.startswith("0."), name
                assert tensor.requires_grad
        assert made.config["draws"]["of"] == ([of] if isinstance(of, str) else of)

    def test_gradients_are_those_of_all_weights_at_these_columns(self, run):
        ensemble = copy.deepcopy(run.ensemble)
        posterior = Posterior(run.likelihood, shoal.priors.Gaussian(0.7), POINTS)
        batches = ArrayBatches(*problem(), POINTS)

        def gradient():
            density = PosteriorDensity(ensemble, posterior, batches, True, torch.Size())
            return density(density.read(), 0)[1]

        whole = gradient()
        for name in ("0.weight", "0.bias"):
            ensemble.weights[name].requires_grad_(False)
        torch.testing.assert_close(gradient(), whole[:, -5:])

    def test_a_name_that_fits_nothing_is_refused(self, run):
        with pytest.raises(ConfigError) as refused:
            drawn(run, of="3", **LENGTHS)
        assert_one_sentence(refused.value, "nothing called '3'")
        mixed = shoal.Ensemble.init([(two_layers, 1), (lambda: nn.Linear(COLUMNS, 1), 1)])
        mixed = shoal.fit(mixed, problem(), steps=1, progress=False)
        with pytest.raises(ConfigError) as refused:
            drawn(mixed, of="group0.2", **LENGTHS)
        assert_one_sentence(refused.value, "group1.bias")


@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_the_covariance_of_a_gaussian_posterior_grows_with_the_temperature(temperature):
    """p^(1/T) of a normal density is normal with the same mean and T times the covariance."""
    run = trained(members=40)
    x, y = (t.double() for t in problem())
    rows = torch.cat([x, torch.ones(POINTS, 1)], 1)
    precision = rows.mT @ rows / NOISE**2 + torch.eye(COLUMNS + 1)
    mean = torch.linalg.solve(precision, rows.mT @ y / NOISE**2)
    how = {"sampler": {"name": "hmc", "leaps": 6}, "draws": 20, "warmup": 100}
    found = drawn(run, temperature=temperature, **how)
    assert found.config["temperature"] == found.config["draws"]["temperature"] == temperature
    weights = found.ensemble.weights
    parts = [weights[n].detach().reshape(20, 40, -1) for n in ("weight", "bias")]
    away = torch.cat(parts, -1).double() - mean
    exact = temperature * torch.linalg.inv(precision)
    squares = away.unsqueeze(-1) * away.unsqueeze(-2)
    for values, wanted in ((away, torch.zeros_like(mean)), (squares, exact)):
        each = values.mean(0)
        errors = (each.mean(0) - wanted) / (each.std(0) / 40**0.5)
        assert errors.abs().max() < 5, errors
