"""Calibration: its numbers in closed form, and runs that carry them."""

import math
from dataclasses import replace

import pytest
import torch
from likelihood_examples import DEFAULTS, drawn, targets, width
from scipy import stats
from small_runs import assert_one_sentence, plain, quick

import shoal
from shoal.core.errors import CheckpointCorrupt, ConfigError
from shoal.evaluation.calibrate import _apart
from shoal.evaluation.evaluate import kept_evaluation
from shoal.evaluation.out_of_fold import fold_predictions
from shoal.models import MLP, Blueprint
from shoal.prediction.decisions.scaling import calibrated
from shoal.training.folder.calibration import CALIBRATION

likelihoods = shoal.likelihoods
NAMES = {"noise_factor", "temperature"}
CALIBRATING = [each for each in DEFAULTS if not each.discrete]


def normal_quantiles(n):
    """The n quantiles of a standard normal variable in the middle of equal shares."""
    return torch.special.ndtri((torch.arange(n).double() + 0.5) / n)


# The numbers


@pytest.mark.parametrize("outlier", [3.0, 1e6])
def test_the_noise_factor_is_that_of_the_errors_and_ignores_outliers(outlier):
    n, stds = 999, torch.tensor([0.5, 4.0]).double()
    y = normal_quantiles(n)[:, None] * stds
    y[-1] = outlier * stds
    known = likelihoods.Gaussian(0.25)
    pred = shoal.Predictive(torch.zeros(1, n, 2).double(), known)
    found = calibrated(pred, y)
    torch.testing.assert_close(found.learned.noise_factor, stds / 0.25, rtol=0.01, atol=0)
    inside = replace(pred, likelihood=found).interval(0.9)
    share = ((y >= inside[0]) & (y <= inside[1])).double().mean(0)
    assert bool(((share >= 0.9) & (share < 0.903)).all())
    again = calibrated(replace(pred, likelihood=found), y)
    assert again == found and known.learned is None


def test_weights_are_repetitions():
    y, weight = 2 * normal_quantiles(200), torch.arange(200) % 3
    pred = shoal.Predictive(torch.zeros(1, 200, 1).double(), likelihoods.Gaussian(1.0))
    rows = torch.arange(200).repeat_interleave(weight)
    wanted = calibrated(pred[rows], y[rows]).learned.noise_factor
    found = calibrated(pred, y, weight.double()).learned.noise_factor
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0)


def test_mixtures_of_few_members_say_what_the_ensemble_needs():
    """Errors of standard deviation 1.5, and members that deviate by 1: what the noise must be."""
    n, M, random = 20_000, 16, torch.Generator().manual_seed(0)
    members = torch.randn(M, n, 1, generator=random).double()
    y = 1.5 * torch.randn(n, generator=random).double()
    known = likelihoods.Gaussian(1.0)
    factor = [
        float(calibrated(shoal.Predictive(members[:m], known), y, apart=a).learned.noise_factor)
        for m, a in ((M, 1.0), (4, _apart(4, M)), (4, 1.0))
    ]
    exact = math.sqrt(1.5**2 + 1 / M - (1 - 1 / M))
    assert factor[0] == pytest.approx(exact, rel=0.03)
    assert factor[1] == pytest.approx(factor[0], rel=0.08) and factor[2] > 1.13 * factor[0]
    assert _apart(1, 8) == 1.0 and _apart(16, 16) == 1.0


def test_the_temperature_is_that_of_the_labels():
    logits = 3 * drawn(1, 4000, 4)
    random = torch.Generator().manual_seed(1)
    y = torch.multinomial((logits[0] / 2).softmax(-1), 1, generator=random).squeeze(-1)
    pred = shoal.Predictive(logits, likelihoods.Categorical())
    found = calibrated(pred, y)
    alone = shoal.decisions.temperature(pred, y)
    assert found.temperature == pytest.approx(alone.value, rel=1e-3)
    assert found.temperature == pytest.approx(2, rel=0.1)
    scaled = replace(pred, likelihood=found)
    assert float(-scaled.log_prob(y).mean()) == pytest.approx(alone.nll, rel=1e-5)
    sure = calibrated(pred, logits[0].argmax(-1))  # all labels are right
    assert 0.01 < sure.temperature < 0.5


@pytest.mark.parametrize("likelihood", CALIBRATING, ids=repr)
def test_a_calibrated_likelihood_is_one_of_scaled_noise_or_logits(likelihood):
    outputs = drawn(3, 5, width(likelihood, 2)).double()
    y = targets(likelihood, 5, columns=2)
    if likelihood.about.has_classes:
        same = likelihood.calibrated(torch.tensor(1.0))
        torch.testing.assert_close(same.log_prob(outputs, y), likelihood.log_prob(outputs, y))
        flat = likelihood.calibrated(torch.tensor(1e9)).probs(outputs)
        if "ordinal" not in likelihood.about.kinds:
            torch.testing.assert_close(flat, torch.full_like(flat, 1 / flat.shape[-1]))
        torch.testing.assert_close(flat.sum(-1), torch.ones_like(flat[..., 0]))
        value = torch.tensor([2.5])
    else:
        value = torch.tensor([2.0, 0.5]).double()
        name = "log_moments" if isinstance(likelihood, likelihoods.LogNormal) else "moments"
        mean, variance = getattr(likelihood, name)(outputs)
        scaled = getattr(likelihood.calibrated(value), name)(outputs)
        torch.testing.assert_close(scaled[0], mean)
        if not isinstance(likelihood, likelihoods.MixtureDensity):
            torch.testing.assert_close(scaled[1], value**2 * variance)
    known = likelihood.calibrated(value)
    assert likelihood.restored(known.state) == known and known.state.keys() & NAMES
    assert known != likelihood and known.uncalibrated.log_prob(outputs, y).equal(
        likelihood.log_prob(outputs, y)
    )
    assert not known.initialised_from(y.double() if y.is_floating_point() else y).calibration


@pytest.mark.parametrize("df", [None, 3.0])
def test_the_shape_of_the_noise_is_chosen_by_the_errors(df):
    n, random = 3000, torch.Generator().manual_seed(3)
    level = (torch.randperm(n, generator=random).double() + 0.5) / n
    y = stats.norm.ppf(level) if df is None else stats.t.ppf(level, df)
    pred = shoal.Predictive(torch.zeros(1, n, 2).double(), likelihoods.HeteroscedasticGaussian())
    found = calibrated(pred, y, shape="auto")
    scale = math.sqrt(math.log(2) + 1e-6)  # softplus(0) + 1e-6
    kind = likelihoods.HeteroscedasticGaussian if df is None else likelihoods.StudentT
    assert type(found) is kind and getattr(found, "df", None) == df
    assert float(found.learned.noise_factor) == pytest.approx(1 / scale, rel=0.01)
    assert type(calibrated(pred, y)) is likelihoods.HeteroscedasticGaussian


def test_targets_say_what_they_may_be():
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(500, generator=random)
    counts = torch.poisson(torch.full((500,), 2.0), generator=random)
    assert likelihoods.suggested(counts).name == "negative-binomial"
    assert likelihoods.suggested((1.5 * normal).exp().numpy()).name == "lognormal"
    both = torch.stack([normal.exp(), (normal.exp() + 1e-3)], 1)
    assert "lognormal" in likelihoods.suggested(both).sentence
    ratings = torch.randint(1, 6, (500,), generator=random).float()
    codes = torch.randint(0, 8, (500,), generator=random).float()
    others = [normal, 20 + normal, ratings, codes, counts + 0.5 * normal, torch.ones(9), both - 1]
    for y in (*others, torch.tensor([1.0, math.nan])):
        assert likelihoods.suggested(y) is None


# Runs


def regression(y=lambda y: y, n=48, **options):
    """A run of four members with noise per input, and its data."""
    x = drawn(n, 3)
    y = y(20 + 5 * (x.sum(1) + 0.5 * drawn(n, seed=2)))
    ensemble = shoal.Ensemble.init(Blueprint(MLP((8,)), (3,), 2), 4)
    how = {"method": "ensemble", "likelihood": "heteroscedastic"} | options
    return quick(ensemble, (x, y), **how), x, y


def test_a_run_with_folds_is_calibrated_by_its_out_of_fold_predictions(tmp_path):
    run, x, y = regression(folds=2, out=tmp_path / "run")
    shoal.evaluate(run, (x, y))
    before, uncalibrated = run.likelihood, shoal.predict(run, x)
    done = shoal.calibrate(tmp_path / "run", data=(x, y))
    wanted = calibrated(shoal.out_of_fold(run), y, apart=_apart(2, 4))
    assert done.likelihood == wanted and run.likelihood == before
    loaded = shoal.load(tmp_path / "run")
    assert loaded.likelihood == wanted and "calibrated" in loaded.notes[-1]
    assert shoal.calibrate(run).likelihood == wanted == shoal.calibrate(done, (x, y)).likelihood
    pred, factor = shoal.predict(loaded, x), float(wanted.learned.noise_factor)
    assert torch.equal(pred.mean, uncalibrated.mean) and torch.equal(
        pred.members, uncalibrated.members
    )
    noise = [each.likelihood.variance(each.members) for each in (pred, uncalibrated)]
    torch.testing.assert_close(noise[0], factor**2 * noise[1])
    assert kept_evaluation(loaded) is None
    again = shoal.evaluate(loaded, (x, y))
    assert again.test["nll"] == pytest.approx(shoal.evaluate(pred, y)["nll"])
    assert loaded.trained.likelihood == before
    grown = shoal.grow(loaded, 2, data=(x, y), epochs=1, progress=False)
    assert not grown.likelihood.calibration


def test_out_of_fold_predictions_come_with_their_targets_and_weights():
    weight = 0.5 + drawn(47).abs()
    run, _, y = regression(n=47, folds=3, sample_weight=weight)
    pred, targets, weights, *_ = fold_predictions(run, batch_size=5)
    torch.testing.assert_close(pred.members, shoal.out_of_fold(run).members)
    torch.testing.assert_close(targets.flatten().float(), y)
    torch.testing.assert_close(weights.flatten().float(), weight)
    factor = shoal.calibrate(run).likelihood.learned.noise_factor
    torch.testing.assert_close(calibrated(pred, y, weight).learned.noise_factor, factor)


def test_a_run_may_change_the_shape_of_its_noise(tmp_path):
    tails = lambda y: 20 + (y - 20).pow(3)  # noqa: E731
    run, x, y = regression(y=tails, out=tmp_path / "run", n=300, batch_size=100)
    done = shoal.calibrate(run, (x, y), shape="auto")
    assert isinstance(done.likelihood, likelihoods.StudentT)
    loaded = shoal.load(tmp_path / "run")
    assert loaded.likelihood == done.likelihood and loaded.trained.likelihood == run.likelihood
    assert shoal.evaluate(shoal.predict(loaded, x), y)["crps"] > 0
    with pytest.raises(ConfigError) as caught:
        shoal.calibrate(quick(folds=3, method="ensemble"), shape="auto")
    assert_one_sentence(caught.value, "noise per input")


def test_members_that_train_on_lose_their_calibration(tmp_path):
    run, x, y = regression(out=tmp_path / "run", epochs=1)
    assert shoal.calibrate(run, (x, y)).likelihood.calibration
    more, *_ = regression(out=tmp_path / "run", epochs=2, resume=True)
    assert not more.likelihood.calibration
    assert not shoal.load(tmp_path / "run").likelihood.calibration


def test_labels_of_a_run_get_a_temperature(tmp_path):
    run = quick(folds=3, out=tmp_path / "run", method="ensemble")
    done = shoal.calibrate(run)
    assert shoal.load(tmp_path / "run", plain).likelihood == done.likelihood
    pred = shoal.predict(done, drawn(5, 3))
    probs = (pred.members / done.likelihood.temperature).softmax(-1).mean(0)
    torch.testing.assert_close(pred.probs, probs)
    pred.save(tmp_path / "pred.safetensors")
    loaded = shoal.Predictive.load(tmp_path / "pred.safetensors")
    assert loaded.likelihood == done.likelihood and torch.equal(loaded.probs, pred.probs)


def test_what_cannot_be_calibrated(tmp_path):
    run, x, y = regression(out=tmp_path / "run")
    for data, words in ((None, "folds=8"), (x, "targets")):
        with pytest.raises(ConfigError) as caught:
            shoal.calibrate(run, data)
        assert_one_sentence(caught.value, words)
    counts, x, y = regression(likelihood="negative-binomial", y=lambda y: y.round().clamp(min=0))
    with pytest.raises(ConfigError) as caught:
        shoal.calibrate(counts, (x, y))
    assert_one_sentence(caught.value, "calibrate")
    assert not (tmp_path / "run" / CALIBRATION).exists()
    shoal.calibrate(run, (x, y))
    path = tmp_path / "run" / CALIBRATION
    path.write_text(path.read_text().replace("heteroscedastic", "heteroscedastik"))
    with pytest.raises(CheckpointCorrupt):
        shoal.load(tmp_path / "run")
