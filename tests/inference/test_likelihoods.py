"""Likelihoods against torch.distributions, scipy and `cross_entropy`, and their errors."""

import math

import pytest
import torch
from likelihood_examples import DEFAULTS, drawn, targets, width
from scipy import special
from small_runs import assert_trained_alone, quick, shoal_of
from torch import distributions, nn
from torch.nn import functional as F

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.inference.likelihoods.incomplete_beta import (
    incomplete_beta,
    student_cdf,
    student_quadrature,
)
from shoal.prediction import Predictive

pytestmark = pytest.mark.usefixtures("double")

likelihoods = shoal.likelihoods
REGRESSION = [likelihood for likelihood in DEFAULTS if likelihood.task == "regression"]


def softplus(raw):
    return torch.log1p(raw.exp()) + 1e-6


def mixture(outputs, columns):
    logits, means, raw = outputs.view(*outputs.shape[:-1], 3, columns, 3).unbind(-3)
    parts = distributions.Normal(means, softplus(raw).sqrt())
    return distributions.MixtureSameFamily(distributions.Categorical(logits=logits), parts)


def negative_binomial(outputs, columns):
    mean, r = outputs[..., :columns].exp(), 1 / softplus(outputs[..., columns:])
    return distributions.NegativeBinomial(r, probs=mean / (r + mean))


def student(outputs, columns):
    scale = softplus(outputs[..., columns:]).sqrt()
    return distributions.StudentT(4.0, outputs[..., :columns], scale)


ORACLES = {
    likelihoods.Gaussian(0.3): lambda f, K: distributions.Normal(f, 0.3),
    likelihoods.HomoscedasticGaussian(): lambda f, K: distributions.Normal(f, 1.0),
    likelihoods.HeteroscedasticGaussian(): lambda f, K: distributions.Normal(
        f[..., :K], softplus(f[..., K:]).sqrt()
    ),
    likelihoods.StudentT(): student,
    likelihoods.LogNormal(): lambda f, K: distributions.LogNormal(
        f[..., :K], softplus(f[..., K:]).sqrt()
    ),
    likelihoods.MixtureDensity(): mixture,
    likelihoods.Bernoulli(): lambda f, K: distributions.Bernoulli(logits=f),
    likelihoods.Poisson(): lambda f, K: distributions.Poisson(f.exp()),
    likelihoods.NegativeBinomial(): negative_binomial,
}


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("likelihood", ORACLES, ids=repr)
def test_density_and_moments_are_those_of_torch(likelihood, columns):
    outputs = drawn(4, 6, likelihood.width(columns))
    y = targets(likelihood, 6, columns=columns)
    oracle = ORACLES[likelihood](outputs, columns)
    value = likelihood.log_prob(outputs, y)
    assert value.shape == (4, 6)
    torch.testing.assert_close(value, oracle.log_prob(y.double()).sum(-1))
    torch.testing.assert_close(likelihood.mean(outputs), oracle.mean)
    torch.testing.assert_close(likelihood.variance(outputs), oracle.variance)


def test_categorical_is_that_of_torch():
    outputs, y = drawn(4, 6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    oracle = distributions.Categorical(logits=outputs)
    torch.testing.assert_close(likelihoods.Categorical().log_prob(outputs, y), oracle.log_prob(y))
    torch.testing.assert_close(likelihoods.Categorical().probs(outputs), oracle.probs)


def test_ordinal_probabilities_are_differences_of_sigmoids():
    outputs = drawn(5, 3)
    steps = F.softplus(outputs[:, 1:])
    thresholds = torch.stack([outputs[:, 0], outputs[:, 0] + steps[:, 0],
                              outputs[:, 0] + steps.sum(-1)], -1)  # fmt: skip
    below = F.pad(F.pad(thresholds.sigmoid(), (0, 1), value=1.0), (1, 0))
    torch.testing.assert_close(likelihoods.Ordinal().probs(outputs), below.diff(dim=-1))


@pytest.mark.parametrize("a", [0.01, 0.5, 2.0, 40.0, 1e6])
@pytest.mark.parametrize("b", [0.5, 1.0, 7.0, 1e3])
def test_incomplete_beta_is_that_of_scipy(a, b):
    mean = a / (a + b)
    x = torch.tensor([0.0, 1e-9, mean / 3, mean, (1 + mean) / 2, 1 - 1e-9, 1.0])
    found = incomplete_beta(torch.tensor(a), torch.tensor(b), x)
    expected = torch.from_numpy(special.betainc(a, b, x.numpy()))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("df", [2.5, 3.0, 4.0, 5.0, 6.5, 10.0, 30.0, 1e3, 1e6])
def test_the_distribution_of_student_is_that_of_scipy(df):
    t = torch.cat([torch.linspace(-50, 50, 301), torch.logspace(2, 6, 20)])
    wanted = torch.from_numpy(special.stdtr(df, t.numpy()))
    limit = 1e-12 if 3 <= df < 1e4 else 1e-8
    for computed in (student_cdf(t, df), student_quadrature(t, df)):
        torch.testing.assert_close(computed, wanted, rtol=0, atol=limit)


def test_a_large_count_parameter_keeps_its_digits_in_single_precision():
    """Near the Poisson limit, where the difference of two lgamma has none left."""
    outputs, y = torch.tensor([[2.0, -40.0]]), torch.tensor([[9]])
    poisson = likelihoods.Poisson().log_prob(outputs[:, :1], y)
    single = likelihoods.NegativeBinomial().log_prob(outputs.float(), y)
    torch.testing.assert_close(single.double(), poisson, atol=1e-4, rtol=0)


# Training with class weights, smoothing and ignored labels


def trained(likelihood, outputs, y):
    """The mean that the posterior maximises."""
    value, weight = likelihood.objective(outputs, y), likelihood.weight(y)
    return value.mean() if weight is None else (weight * value).sum() / weight.sum()


WEIGHTS = (0.3, 2.0, 1.0, 0.7)


@pytest.mark.parametrize("sites", [(), (3,), (2, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("ignored", [None, 2, -100])
def test_training_is_that_of_cross_entropy(sites, smoothing, weights, ignored):
    likelihood = likelihoods.Categorical(smoothing, weights, ignored)
    outputs = drawn(12, *sites, 4).requires_grad_()
    y = torch.randint(4, (12, *sites), generator=torch.Generator().manual_seed(3))
    if ignored is not None:
        y.view(12, -1)[::4] = ignored
    likelihood.check(y, 4, len(sites))
    settings = {"ignore_index": ignored} if ignored is not None else {}
    expected = F.cross_entropy(
        outputs.movedim(-1, 1), y, label_smoothing=smoothing,
        weight=None if weights is None else torch.tensor(weights), **settings,
    )  # fmt: skip
    for used in (likelihood, likelihood.initialised_from(y)):
        found = -trained(used, outputs, y)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        gradients = (torch.autograd.grad(value, outputs, retain_graph=True)[0]
                     for value in (found, expected))  # fmt: skip
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.15])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_training_on_soft_labels_is_that_of_cross_entropy(smoothing, weights):
    likelihood = likelihoods.Categorical(smoothing, weights)
    outputs, y = drawn(12, 4), drawn(12, 4, seed=1).softmax(-1)
    likelihood.check(y, 4)
    expected = F.cross_entropy(
        outputs, y, label_smoothing=smoothing,
        weight=None if weights is None else torch.tensor(weights),
    )  # fmt: skip
    torch.testing.assert_close(-trained(likelihood, outputs, y), expected, rtol=1e-12, atol=0)


def test_evaluation_knows_neither_smoothing_nor_class_weights():
    outputs, y = drawn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    plain, other = likelihoods.Categorical(), likelihoods.Categorical(0.2, (1, 2, 3, 0.5))
    assert torch.equal(other.log_prob(outputs, y), plain.log_prob(outputs, y))
    assert other.counted(y) is None


# Targets that are probabilities


def test_soft_labels_give_the_cross_entropy_of_the_mixture():
    outputs, y = drawn(3, 6, 4), drawn(6, 4, seed=1).softmax(-1)
    for weights in (None, torch.tensor([0.2, 0.3, 0.5])):
        pred = Predictive(outputs, likelihoods.Categorical(), weights)
        torch.testing.assert_close(pred.log_prob(y), (y * pred.probs.log()).sum(-1))
        scores = shoal.evaluate(pred, y)
        square = (pred.probs - y).square().sum(-1).mean()
        assert scores["brier"] == pytest.approx(float(square), rel=1e-12)
        assert scores["accuracy"] == shoal.evaluate(pred, y.argmax(-1))["accuracy"]


def test_one_hot_rows_are_labels():
    outputs, y = drawn(3, 6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    pred = Predictive(outputs, likelihoods.Categorical())
    hard, soft = shoal.evaluate(pred, y), shoal.evaluate(pred, F.one_hot(y, 4).double())
    assert soft == pytest.approx(hard, rel=1e-12)


def test_soft_yes_and_no_are_expected_log_probabilities():
    outputs = drawn(3, 5, 2)
    pred = Predictive(outputs, likelihoods.Bernoulli())
    y = torch.tensor([[0.2, 1.0], [0.5, 0.5], [0.0, 1.0], [1.0, 1.0], [0.9, 0.0]])
    p = pred.mean
    columns = (torch.special.xlogy(y, p) + torch.special.xlogy(1 - y, 1 - p)).sum(-1)
    soft = torch.tensor([True, True, False, False, True])
    found = pred.log_prob(y)
    torch.testing.assert_close(found[soft], columns[soft])
    each = torch.where(y == 1, outputs.sigmoid(), (-outputs).sigmoid()).prod(-1).mean(0)
    torch.testing.assert_close(found[~soft], each.log()[~soft])


def test_one_logit_is_softmax_of_two_classes():
    logit, y = drawn(3, 40, 1), torch.arange(40) % 2
    one = Predictive(logit, likelihoods.Bernoulli())
    two = Predictive(F.pad(logit, (1, 0)), likelihoods.Categorical())
    expected = shoal.evaluate(two, y)
    found = shoal.evaluate(one, y.bool())
    same = expected.keys() - {"disagreement"}
    assert {k: found[k] for k in same} == pytest.approx({k: expected[k] for k in same}, rel=1e-9)
    assert found["subset_accuracy"] == found["accuracy"]
    positives, negatives = one.mean[y == 1, 0], one.mean[y == 0, 0]
    ranked = (positives[:, None] > negatives).double().mean()
    assert found["label_auroc"] == pytest.approx(float(ranked))


# Sites


def test_a_prediction_with_sites_is_that_of_its_points():
    outputs, y = drawn(3, 4, 5, 6), torch.randint(6, (4, 5), generator=torch.Generator())
    y[0, :3] = -1
    pred = Predictive(outputs, likelihoods.Categorical(ignore_index=-1))
    known = y.flatten() != -1
    flat = Predictive(outputs.flatten(1, 2)[:, known], likelihoods.Categorical())
    expected = shoal.evaluate(flat, y.flatten()[known])
    assert shoal.evaluate(pred, y) == pytest.approx(expected, rel=1e-12)
    assert shoal.prediction.metrics.accuracy(pred, y) == expected["accuracy"]
    assert pred.entropy().shape == (4, 5) and len(pred) == 4 and "5 sites" in repr(pred)
    with pytest.raises(DataError, match="every target is ignored"):
        shoal.evaluate(pred, torch.full((4, 5), -1))


def test_learned_noise_is_that_of_all_sites_and_weights():
    outputs, y = drawn(2, 6, 4, 1), drawn(6, 4, seed=2)
    likelihood = likelihoods.HomoscedasticGaussian().initialised_from(y, sites=1)
    alive = torch.tensor([True, True])
    found = likelihood.statistics(outputs, y, alive)
    flat = likelihood.statistics(outputs.flatten(1, 2), y.flatten(), alive)
    torch.testing.assert_close(found, flat)
    counts = torch.arange(24) % 3
    weighted = likelihood.statistics(outputs, y, alive, counts.view(6, 4).double())
    repeated = outputs.flatten(1, 2).repeat_interleave(counts, 1)
    again = likelihood.statistics(repeated, y.flatten().repeat_interleave(counts), alive)
    torch.testing.assert_close(weighted, again, rtol=1e-12, atol=0)


# Extremes and errors


def test_extreme_logits_stay_finite():
    outputs = torch.tensor([[1e4, -1e4, 0.0]])
    value = likelihoods.Categorical().log_prob(outputs, torch.tensor([1]))
    assert value.item() == -2e4


@pytest.mark.parametrize("damping", [0.5, 1.0])
def test_damped_gradients_are_those_of_the_log_density_times_a_power_of_the_variance(damping):
    outputs, y = drawn(2, 5, 6).requires_grad_(), drawn(5, 3, seed=1)
    mean, raw = outputs.detach().chunk(2, -1)
    variance, error = softplus(raw), y - mean
    wanted = [error / variance, (error.square() / variance - 1) / (2 * variance) * raw.sigmoid()]
    damped = likelihoods.HeteroscedasticGaussian(damping=damping)
    (gradient,) = torch.autograd.grad(damped.objective(outputs, y).sum(), outputs)
    torch.testing.assert_close(gradient, torch.cat([variance**damping * g for g in wanted], -1))
    plain = likelihoods.HeteroscedasticGaussian()
    torch.testing.assert_close(damped.log_prob(outputs, y), plain.log_prob(outputs, y))
    torch.testing.assert_close(plain.objective(outputs, y), plain.log_prob(outputs, y))
    student = likelihoods.StudentT(df=1e9, damping=damping)
    (close,) = torch.autograd.grad(student.objective(outputs, y).sum(), outputs)
    torch.testing.assert_close(close, gradient, rtol=1e-6, atol=1e-6)


def test_damped_training_is_a_loop_of_torch():
    x, y, n = drawn(20, 3), 3 * drawn(20, seed=1) + 40, 20
    options = {"method": "ensemble", "optimizer": "sgd", "lr": 0.1, "prior": "flat", "epochs": 5}
    spec = {"name": "heteroscedastic", "damping": 0.5}
    ensemble = shoal_of(lambda: nn.Linear(3, 2), 2)
    networks = list(shoal_of(lambda: nn.Linear(3, 2), 2).to("cpu", torch.float64))
    run = quick(ensemble, (x, y), likelihood=spec, batch_size=n, precision="float64", **options)
    z = (y - y.mean()) / y.std(unbiased=False)
    for network in networks:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(5):
            mean, raw = network(x).unbind(-1)
            variance = F.softplus(raw) + 1e-6
            nll = 0.5 * ((z - mean).square() / variance + variance.log())
            optimizer.zero_grad()
            (variance.sqrt().detach() * nll).mean().backward()
            optimizer.step()
    assert_trained_alone(run, networks)
    assert run.config["likelihood"] == spec
    assert repr(run.likelihood) == "HeteroscedasticGaussian(damping=0.5)"
    assert likelihoods.registry.spec(likelihoods.HeteroscedasticGaussian()) == {
        "name": "heteroscedastic"
    }


def test_a_vanishing_learned_variance_is_kept_from_zero():
    outputs = torch.tensor([[0.0, -1e3]])
    value = likelihoods.HeteroscedasticGaussian().log_prob(outputs, torch.tensor([0.0]))
    assert math.isclose(value.item(), -0.5 * math.log(2 * math.pi * 1e-6), rel_tol=1e-12)


@pytest.mark.parametrize("likelihood", REGRESSION, ids=repr)
def test_another_number_of_columns_is_refused(likelihood):
    with pytest.raises(DataError, match="3 columns but the members predict 2"):
        likelihood.log_prob(drawn(5, width(likelihood, 2)), drawn(5, 3))


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan])
def test_noise_must_be_positive(std):
    with pytest.raises(ConfigError, match="noise_std must be (positive|a number)"):
        likelihoods.Gaussian(std)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: likelihoods.Categorical(smoothing=1.0), "smoothing must be at least 0 and below"),
        (lambda: likelihoods.Categorical(class_weights=(1.0, -1.0)), "at least 0"),
        (lambda: likelihoods.Categorical(0.1, (1.0, 0.0)), "need smoothing=0"),
        (lambda: likelihoods.StudentT(df=2.0), "above 2"),
        (lambda: likelihoods.HeteroscedasticGaussian(damping=1.5), "damping must be from 0 to 1"),
        (lambda: likelihoods.MixtureDensity(components=0), "from 1 on"),
        (lambda: likelihoods.Custom("mse"), "function of"),
    ],
)
def test_wrong_settings_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("likelihood", "y", "outputs", "words"),
    [
        (likelihoods.Categorical(), torch.tensor([[0.5, 0.6]]), 2, "divide each row by its sum"),
        (likelihoods.Categorical(ignore_index=-1), torch.tensor([-1, -2]), 3, r"y\[1\] is -2"),
        (likelihoods.Categorical(), torch.zeros(4, 5, dtype=torch.long), 3, "one-hot"),
        (likelihoods.Ordinal(), torch.tensor([0, 3]), 2, "y holds the class 3"),
        (likelihoods.Bernoulli(), torch.tensor([0, 2]), 1, "y holds 2"),
        (likelihoods.Poisson(), torch.tensor([1.0, 0.5]), 1, "y holds 0.5"),
        (likelihoods.NegativeBinomial(), torch.tensor([1, -1]), 2, "y holds -1"),
        (likelihoods.StudentT(), torch.tensor([1, 2]), 2, "convert y to float"),
        (likelihoods.LogNormal(), torch.tensor([1.0, 0.0]), 2, "y holds 0"),
    ],
)
def test_wrong_targets_are_refused(likelihood, y, outputs, words):
    with pytest.raises(DataError, match=words):
        likelihood.check(y, outputs)


def test_class_weights_count_the_classes():
    with pytest.raises(ConfigError, match="2 numbers, but the network has 3 outputs"):
        likelihoods.Categorical(class_weights=(1.0, 2.0)).check(torch.tensor([0]), 3)
