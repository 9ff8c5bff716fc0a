"""Each likelihood on data that it made itself: the NLL of the truth, and what a fit finds of it."""

import pytest
import torch
from likelihood_examples import DEFAULTS, drawn, kind, masses, simulated, width
from torch import nn

import shoal
from shoal.inference import likelihoods
from shoal.prediction import Predictive, evaluate

TRAIN, TEST = 1500, 3000
every = pytest.mark.parametrize("likelihood", DEFAULTS, ids=repr)


def predictor(likelihood, columns=1):
    """From inputs [N, 2] to outputs: linear, and alike for every likelihood."""
    slopes = 0.7 * drawn(2, width(likelihood, columns), seed=5)
    return lambda x: 0.5 + x @ slopes.to(x)


@every
def test_the_nll_of_the_truth_is_its_entropy(likelihood):
    x = drawn(20, 2, seed=1).double()
    outputs = predictor(likelihood)(x)
    entropy = []
    for row in outputs:
        values, mass = masses(likelihood, row)
        entropy.append(-float(mass @ likelihood.log_prob(row.expand(len(values), -1), values)))
    many = outputs.repeat(300, 1)
    nll = -likelihood.log_prob(many, simulated(likelihood, many, seed=2))
    noise = float(nll.std()) / len(nll) ** 0.5
    assert float(nll.mean()) == pytest.approx(sum(entropy) / len(entropy), abs=4 * noise)


@every
def test_a_fit_finds_the_truth(likelihood):
    columns = 2 if kind(likelihood) == "binary" else 1
    truth, x = predictor(likelihood, columns), drawn(TRAIN + TEST, 2, seed=3)
    y = simulated(likelihood, truth(x).double(), seed=4)
    y = y if kind(likelihood) == "classes" else y.float()
    size = width(likelihood, columns)
    ensemble = shoal.Ensemble.init(
        lambda: nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, size)), members=3
    )
    run = shoal.fit(
        ensemble, (x[:TRAIN], y[:TRAIN]), method="ensemble", likelihood=likelihood, steps=200,
        batch_size=250, lr=0.03, schedule="cosine", progress=False,
    )  # fmt: skip
    pred = shoal.predict(run, x[TRAIN:])
    found = evaluate(pred, y[TRAIN:])
    known = Predictive(truth(x[TRAIN:])[None], likelihood)
    excess = known.log_prob(y[TRAIN:]) - pred.log_prob(y[TRAIN:])
    noise = float(excess.std()) / TEST**0.5
    assert abs(float(excess.mean())) < 0.03 + 3 * noise
    if "intervals" in likelihood.about.kinds:
        error = (0.9 * 0.1 / TEST) ** 0.5
        assert found["coverage_90"] == pytest.approx(0.9, abs=0.01 + 3 * error)
        expected = evaluate(known, y[TRAIN:])["sharpness"]
        assert found["sharpness"] == pytest.approx(expected, rel=0.15)
    else:
        assert found["ece"] < 0.04
        assert found["accuracy"] == pytest.approx(evaluate(known, y[TRAIN:])["accuracy"], abs=0.02)


# A loss of one's own


def absolute(outputs, y):
    return (outputs.squeeze(-1) - y).abs()


def mean_absolute(outputs, y):
    return absolute(outputs, y).mean()


def stubborn(outputs, y):
    """A loss that vmap cannot map, since it looks at a value."""
    return absolute(outputs, y) if float(outputs.detach().sum()) < 1e30 else outputs.sum(-1)


def line(n=200, seed=0):
    x = drawn(n, 1, seed=seed)
    return x, 2 * x[:, 0] + 0.1 * drawn(n, seed=seed + 1)


def trained(likelihood, **options):
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(1, 1), members=3)
    settings = {"method": "kde", "steps": 150, "lr": 0.05, "progress": False} | options
    return shoal.fit(ensemble, line(), likelihood=likelihood, **settings)


def test_a_custom_loss_is_minimised_however_it_is_returned():
    runs = [trained(likelihoods.Custom(loss)) for loss in (absolute, mean_absolute, stubborn)]
    weights = [run.ensemble.weights["weight"].detach() for run in runs]
    torch.testing.assert_close(weights[0].mean(), torch.tensor(2.0), atol=0.1, rtol=0)
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], atol=1e-5, rtol=1e-5)
    assert runs[0].history[-1]["loss"] < 0.15


def test_a_custom_loss_has_the_metrics_that_need_no_density():
    run = trained(likelihoods.Custom(absolute))
    x, y = line(seed=5)
    pred = shoal.predict(run, x)
    scores = evaluate(pred, y, ood=shoal.predict(run, 5 + x))
    each = torch.stack([absolute(member, y).mean() for member in pred.members])
    assert scores["loss"] == pytest.approx(float(each.mean()), rel=1e-5)
    assert {"disagreement", "effective_functions", "auroc_disagreement"} <= scores.keys()
    assert not {"nll", "rmse", "crps", "coverage_90", "accuracy", "sharpness"} & scores.keys()
    assert torch.equal(pred.mean, pred.members.mean(0)[:, 0])
    for ask in (lambda: pred.log_prob(y), pred.entropy, lambda: pred.variance, pred.confidence):
        with pytest.raises(shoal.ConfigError, match="no log density|has no"):
            ask()


def test_a_run_folder_names_the_custom_loss(tmp_path):
    run = trained(likelihoods.Custom(absolute), out=tmp_path / "run")
    assert run.config["likelihood"] == {"custom": "absolute"}
    with pytest.raises(shoal.ConfigError, match="your own 'absolute'"):
        shoal.load(tmp_path / "run", lambda: nn.Linear(1, 1))


def test_a_loss_of_another_shape_is_refused():
    with pytest.raises(shoal.ConfigError, match="one number per target"):
        likelihoods.Custom(lambda outputs, y: outputs.new_zeros(7)).log_prob(
            torch.zeros(2, 5, 1), torch.zeros(5)
        )
