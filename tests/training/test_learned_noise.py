"""Regression by default: targets in any unit, noise that is learned, predictions in own units."""

import math

import pytest
import torch
from small_runs import Fuse, quick, shoal_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from triton_ready import needs_gpu

import shoal
from shoal.core.errors import CheckpointCorrupt, DataError
from shoal.data import load
from shoal.data.catalogue import UCI_PATH
from shoal.data.files.store import path_of
from shoal.inference.likelihoods import Gaussian, HeteroscedasticGaussian, HomoscedasticGaussian
from shoal.interaction.methods import METHODS
from shoal.prediction.metrics.regression import in_units


def wave(n=400, seed=0):
    """y = 1000 + 50 sin x + noise of 5, with x standardised."""
    random = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(n, 1, generator=random) - 3
    y = 1000 + 50 * x.sin() + 5 * torch.randn(n, 1, generator=random)
    return x / 3**0.5, y[:, 0]


def network(outputs=1, inputs=1):
    return nn.Sequential(nn.Linear(inputs, 30), nn.Tanh(), nn.Linear(30, outputs))


def trained(data, build=network, **options):
    given = {"steps": 300, "lr": 0.02, "schedule": "cosine", "batch_size": 400, "progress": False}
    return shoal.fit(shoal_of(build), data, **(given | options))


@pytest.fixture(scope="module")
def run():
    return trained(wave())


class TestAFitWithDefaults:
    def test_finds_the_noise(self, run):
        assert isinstance(run.likelihood, HomoscedasticGaussian)
        (noise,) = run.likelihood.noise_std
        assert noise == pytest.approx(5, rel=0.15)

    def test_predicts_in_the_units_of_the_targets(self, run):
        x, y = wave(1000, seed=1)
        pred = shoal.predict(run, x)
        scores = shoal.evaluate(pred, y)
        assert scores["rmse"] < 6
        assert 0.91 <= scores["coverage_95"] <= 0.98
        assert scores["nll"] == pytest.approx(
            math.log(5 * math.sqrt(2 * math.pi * math.e)), abs=0.1
        )
        assert pred.mean.mean() == pytest.approx(1000, abs=20)
        assert run.history[-1]["loss"] == pytest.approx(scores["nll"], abs=0.15)

    @pytest.mark.usefixtures("double")
    def test_does_not_depend_on_the_unit(self):
        """In double precision: in single the rounding of 1000 grows with the steps."""
        x, y = (tensor.double() for tensor in wave())
        one, two = (shoal.predict(trained((x, t), steps=100), x) for t in (y, 0.003 * y - 7))
        near = 1e-4 * 0.003 * float(y.std())
        assert float((two.mean - (0.003 * one.mean - 7)).abs().max()) < near
        assert float((two.stddev - 0.003 * one.stddev).abs().max()) < near

    def test_learns_noise_by_input_in_any_unit_where_there_are_outputs_for_it(self):
        run = trained(wave(), lambda: network(2))
        assert isinstance(run.likelihood, HeteroscedasticGaussian)
        scores = shoal.evaluate(shoal.predict(run, wave(seed=1)[0]), wave(seed=1)[1])
        assert scores["rmse"] < 6 and 0.85 <= scores["coverage_95"] <= 0.99

    def test_has_a_noise_for_every_column(self):
        x, y = wave()
        two = torch.stack([y, 0.01 * y[torch.randperm(len(y))]], 1)
        run = trained((x, two), lambda: network(2), steps=100)
        first, second = run.likelihood.noise_std
        assert first < 25 and second == pytest.approx(float(two[:, 1].std()), rel=0.15)


class TestTheNoise:
    x, y = wave(60)

    def test_is_the_mean_square_residual_of_the_members(self):
        before = shoal_of(network)
        z = (self.y - self.y.mean()) / self.y.std(correction=0)
        residual = z[:, None] - before(self.x)
        run = quick(shoal_of(network), (self.x, self.y), steps=1, batch_size=60)
        noise = self.y.std(correction=0) * residual.square().mean().sqrt()
        assert run.likelihood.noise_std == pytest.approx([noise.item()], rel=1e-5)

    def test_maximises_the_likelihood_of_all_members(self):
        outputs = torch.randn(5, 60, 1, generator=torch.Generator().manual_seed(0))
        found = HomoscedasticGaussian().initialised_from(self.y)
        alive = torch.ones(5, dtype=torch.bool)
        found.learn(found.statistics(outputs, self.y, alive), 60, 60)
        variance = found.state["variance"].requires_grad_()
        found.restored(found.state).log_prob(outputs.double(), self.y).sum().backward()
        assert float(variance.grad) == pytest.approx(0, abs=1e-3)

    def test_is_averaged_over_about_an_epoch(self):
        found = HomoscedasticGaussian().initialised_from(self.y)
        for _ in range(6):
            found.learn(torch.tensor([0.25]), 10, 60)
        expected = 0.25 + 0.75 * (1 - 10 / 60) ** 6
        torch.testing.assert_close(found.state["variance"], torch.tensor([expected]).double())

    def test_forgets_members_that_are_not_finite(self):
        found = HomoscedasticGaussian().initialised_from(self.y)
        outputs = torch.zeros(3, 60, 1)
        outputs[1], outputs[2] = torch.nan, 1e30
        alive = torch.tensor([True, True, False])
        torch.testing.assert_close(
            found.statistics(outputs, self.y, alive), torch.ones(1), atol=1e-4, rtol=0
        )
        found.learn(found.statistics(outputs, self.y, torch.zeros(3, dtype=torch.bool)), 60, 60)
        assert found.state["variance"].tolist() == [1.0]

    def test_never_reaches_zero(self):
        run = quick(lambda: nn.Linear(1, 1), (self.x, torch.full((60,), 3.0)), steps=200, lr=0.1)
        assert run.likelihood.noise_std[0] >= 1e-3

    @pytest.mark.parametrize("method", METHODS)
    def test_is_learned_by_every_method_and_engine(self, method):
        engines = ("vmap", "loop", "chunk:2")
        runs = [
            quick(network, (self.x, self.y), method=method, steps=4, engine=engine)
            for engine in engines
        ]
        noises = [run.likelihood.noise_std[0] for run in runs]
        assert noises[0] != float(self.y.std(correction=0))
        assert noises[1:] == pytest.approx([noises[0]] * 2, rel=1e-3)

    @needs_gpu
    @pytest.mark.parametrize("method", ["ensemble", "kde", "f-kde", "f-svgd", "forde"])
    def test_is_learned_in_captured_steps(self, method):
        given = {"method": method, "steps": 40, "device": "cuda"}
        runs = [quick(network, (self.x, self.y), engine=e, **given) for e in ("auto", "auto+eager")]
        noises = [run.likelihood.noise_std for run in runs]
        assert noises[0] == pytest.approx(noises[1], rel=1e-3)
        assert noises[0] != [float(self.y.std(correction=0))]

    def test_is_learned_from_both_parts_of_a_batch(self):
        whole, part = (
            quick(network, (self.x, self.y), method={"name": "forde", "fraction": f}, steps=1,
                  batch_size=60).likelihood.noise_std
            for f in (1.0, 0.25)
        )  # fmt: skip
        assert part == pytest.approx(whole, rel=1e-5)

    def test_is_learned_from_a_loader_in_the_unit_of_its_first_batch(self):
        x, y = wave(200)
        run = trained(DataLoader(TensorDataset(x, y), 100, shuffle=True))
        assert run.likelihood.noise_std == pytest.approx([5], rel=0.3)
        assert shoal.evaluate(shoal.predict(run, x), y)["rmse"] < 10

    def test_is_a_statistic_of_forces(self):
        likelihood = HomoscedasticGaussian().initialised_from(self.y)
        posterior = shoal.Posterior(likelihood, shoal.priors.Gaussian(1.0), 60)
        ensemble = shoal_of(network)
        _, info = shoal.forces(ensemble, posterior, METHODS["f-kde"].repulsion, (self.x, self.y))
        assert info.statistics.shape == (1,)
        assert likelihood.state["variance"].tolist() == [1.0]


class TestWhatIsKept:
    data = wave(60)

    def test_comes_back_with_the_run(self, tmp_path):
        run = quick(network, self.data, out=tmp_path)
        loaded = shoal.load(tmp_path, network)
        assert loaded.likelihood == run.likelihood
        one, two = (shoal.predict(r, self.data[0]) for r in (run, loaded))
        assert torch.equal(one.mean, two.mean) and torch.equal(one.stddev, two.stddev)
        assert run.config["likelihood"] == {"name": "homoscedastic"}

    @pytest.mark.parametrize("build", [network, lambda: network(2)], ids=["one", "by-input"])
    def test_is_resumed_to_the_last_bit(self, tmp_path, build):
        whole = quick(build, self.data, out=tmp_path / "a", schedule=Fuse(), epochs=3)
        with pytest.raises(Fuse.Blown):
            quick(build, self.data, out=tmp_path / "b", schedule=Fuse(8), epochs=3, save_every=0.0)
        rest = quick(build, self.data, out=tmp_path / "b", schedule=Fuse(), epochs=3, resume=True)
        assert rest.likelihood == whole.likelihood
        for name, tensor in whole.ensemble.weights.items():
            assert torch.equal(tensor, rest.ensemble.weights[name])

    def test_grows_with_the_ensemble(self, tmp_path):
        run = quick(network, self.data, out=tmp_path)
        before = run.likelihood.noise_std
        grown = shoal.grow(shoal.load(tmp_path, network), 2, data=self.data, progress=False)
        assert torch.equal(grown.likelihood.state["scale"], run.likelihood.state["scale"])
        assert run.likelihood.noise_std == before != grown.likelihood.noise_std
        old = shoal.predict(run, self.data[0]).members
        assert torch.equal(shoal.predict(grown, self.data[0]).members[:3], old)

    def test_is_absent_from_old_runs(self):
        assert HeteroscedasticGaussian().restored({}) == HeteroscedasticGaussian()

    @pytest.mark.parametrize(
        "state",
        [
            {"location": torch.zeros(1)},
            {name: torch.zeros(1) for name in ("location", "scale", "variance")},
            {name: torch.ones(1, 2) for name in ("location", "scale", "variance")},
            {
                "location": torch.tensor([math.nan]),
                "scale": torch.ones(1),
                "variance": torch.ones(1),
            },
        ],
    )
    def test_is_refused_when_it_makes_no_sense(self, state):
        with pytest.raises(CheckpointCorrupt):
            HomoscedasticGaussian().restored(state)


class TestWhatIsAskedFor:
    def test_known_noise_stays_as_it_is_given(self):
        x, y = wave(60)
        run = quick(network, (x, y / 1000), likelihood=Gaussian(0.3))
        assert run.likelihood == Gaussian(0.3)

    def test_standardised_targets_stay_as_they_are(self):
        x, y = wave(60)
        y = ((y - y.mean()) / y.std(correction=0)).double()
        likelihood = HeteroscedasticGaussian().initialised_from(
            (y - y.mean()) / y.std(correction=0)
        )
        assert likelihood.state["location"].item() == 0 and likelihood.state["scale"].item() == 1

    def test_whole_numbers_are_refused(self):
        x, y = wave(60)
        with pytest.raises(DataError, match="real targets"):
            quick(network, (x, y.long()), likelihood="homoscedastic")


UCI = pytest.mark.skipif(path_of(UCI_PATH) is None, reason="the UCI data are not here")


def concrete(seed, raw):
    data = load({"name": "uci", "problem": "concrete", "split": seed})
    assert data.scaling is not None
    scaling, target = data.scaling, data.scaling.original(data.test.y)
    given = scaling.original(data.train.y) if raw else data.train.y
    ensemble = shoal.Ensemble.init(lambda: network(1, 8), members=5, seed=seed)
    run = shoal.fit(ensemble, (data.train.x, given), seed=seed, progress=False)
    pred = shoal.predict(run, data.test.x)
    return shoal.evaluate(pred if raw else in_units(pred, scaling), target)


@UCI
def test_concrete_in_raw_units_with_nothing_but_defaults():
    raw, scaled = concrete(0, raw=True), concrete(0, raw=False)
    assert 0.88 <= raw["coverage_95"] <= 0.99
    assert abs(raw["nll"] - scaled["nll"]) < 0.05


@UCI
def test_data_that_come_standardised_train_as_they_did_before():
    y = load({"name": "uci", "problem": "concrete"}).train.y
    assert HeteroscedasticGaussian().initialised_from(y).state["location"].tolist() == [0.0]
    assert HeteroscedasticGaussian().initialised_from(y).state["scale"].tolist() == [1.0]
