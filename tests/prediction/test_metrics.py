"""Laws that every registered metric keeps, whatever it measures."""

import math
from types import SimpleNamespace

import pytest
import torch

from shoal.core.bibliography import BIBLIOGRAPHY
from shoal.core.errors import ConfigError, DataError
from shoal.inference.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from shoal.prediction import Predictive, evaluate, metrics

M, B, C = 4, 60, 3
LABELS = torch.arange(B) % C
MEANINGS = {"classes": Categorical(), "numbers": HeteroscedasticGaussian()}
VALUES = torch.linspace(-3, 3, B, dtype=torch.float64)
KINDS = {
    "any",
    "ranked",
    "classes",
    "binary",
    "ordinal",
    "numbers",
    "intervals",
    "gaussian",
    "loss",
}
CASES = [
    (name, kind)
    for name in metrics.registry
    for kind in ("classes", "numbers")
    if metrics.registry[name].fits(SimpleNamespace(likelihood=MEANINGS[kind]))
]


def noise(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def perfect(kind):
    if kind == "classes":
        logits = 100.0 * torch.nn.functional.one_hot(LABELS, C).double()
        return Predictive(logits.expand(M, -1, -1), Categorical())
    return Predictive(VALUES[None, :, None].expand(M, -1, -1), Gaussian(0.01))


def ignorant(kind):
    """Uniform classes, or one wide Gaussian whatever the input."""
    if kind == "classes":
        return Predictive(torch.zeros(M, B, C, dtype=torch.float64), Categorical())
    return Predictive(torch.zeros(M, B, 1, dtype=torch.float64), Gaussian(3.0))


def divided(kind):
    """Each member sure of something else."""
    if kind == "classes":
        logits = 100.0 * torch.eye(C, dtype=torch.float64)[torch.arange(M) % C]
        return Predictive(logits.unsqueeze(1).expand(-1, B, -1), Categorical())
    means = torch.arange(M, dtype=torch.float64).view(M, 1, 1).expand(-1, B, -1)
    return Predictive(5 * means, Gaussian(0.01))


def arbitrary(kind, seed=0, members=M):
    outputs = noise(members, B, C if kind == "classes" else 2, seed=seed)
    return Predictive(outputs, MEANINGS[kind])


def measure(name, kind, pred, other=None):
    metric = metrics.registry[name]
    if metric.ood:
        return metric(pred, arbitrary(kind, seed=9) if other is None else other)
    return metric(pred, LABELS if kind == "classes" else VALUES)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_perfect_is_no_worse_than_ignorant(name, kind):
    metric = metrics.registry[name]
    if metric.ood:
        best = metric(perfect(kind), divided(kind))
        worst = metric(ignorant(kind), ignorant(kind))
    else:
        best, worst = measure(name, kind, perfect(kind)), measure(name, kind, ignorant(kind))
    if metric.better == "lower":
        assert best <= worst
    if metric.better == "higher":
        assert best > worst or math.isnan(worst)
    assert isinstance(best, float)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_order_of_members_and_points_does_not_matter(name, kind):
    pred = arbitrary(kind)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(3))
    swapped = Predictive(pred.members.flip(0), pred.likelihood)
    assert measure(name, kind, swapped) == pytest.approx(measure(name, kind, pred), rel=1e-9)
    if metrics.registry[name].ood:
        mixed = Predictive(pred.members[:, order], pred.likelihood)
        assert measure(name, kind, mixed) == pytest.approx(measure(name, kind, pred), rel=1e-12)
    else:
        y = LABELS if kind == "classes" else VALUES
        mixed = metrics.registry[name](
            Predictive(pred.members[:, order], pred.likelihood), y[order]
        )
        assert mixed == pytest.approx(measure(name, kind, pred), rel=1e-12)


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if "disagree" not in case[0]])
def test_weights_count_members(name, kind):
    """Weights 3/4 and 1/4 are three copies of one member and one of another.

    Not so for the unbiased spread, which knows how many members there are.
    """
    pair = arbitrary(kind, members=2)
    copies = Predictive(pair.members[[0, 0, 0, 1]], pair.likelihood)
    weights = torch.tensor([0.75, 0.25], dtype=torch.float64)
    weighted = Predictive(pair.members, pair.likelihood, weights)
    assert measure(name, kind, weighted) == pytest.approx(measure(name, kind, copies), rel=1e-6)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_one_member_is_enough(name, kind):
    pred, other = arbitrary(kind, members=1), arbitrary(kind, seed=9, members=1)
    value = measure(name, kind, pred, other)
    assert math.isfinite(value) or name == "disagreement_ratio"


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_single_precision_agrees_with_double(name, kind):
    pred = arbitrary(kind)
    single = Predictive(pred.members.float(), pred.likelihood)
    other = arbitrary(kind, seed=9)
    same = Predictive(other.members.float(), other.likelihood)
    value = measure(name, kind, pred, other)
    assert measure(name, kind, single, same) == pytest.approx(value, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", metrics.registry.names())
def test_every_metric_is_described_and_its_papers_are_known(name):
    assert metrics.registry.summary(name).endswith(".")
    assert all(key in BIBLIOGRAPHY for key in metrics.registry.cite(name))
    assert metrics.registry[name].better in ("lower", "higher", "neither")
    assert set(metrics.registry[name].kinds) <= KINDS


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_evaluate_gives_every_metric_that_fits(kind):
    y = LABELS if kind == "classes" else VALUES
    fits = {name for name, of in CASES if of == kind}
    known = {name for name in fits if not metrics.registry[name].ood}
    assert set(evaluate(arbitrary(kind), y)) == known
    found = evaluate(arbitrary(kind), y, ood=arbitrary(kind, seed=5))
    assert set(found) == fits
    assert all(type(value) is float for value in found.values())


def test_evaluate_knows_the_perfect_and_the_uniform_classifier():
    best = evaluate(perfect("classes"), LABELS, divided("classes"))
    expected = {"accuracy": 1, "nll": 0, "nll_legacy": 0, "brier": 0, "ece": 0, "entropy": 0}
    expected |= {"confidence": 1, "auroc_entropy": 1, "aupr_entropy": 1, "fpr95_entropy": 0}
    assert {name: best[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    plain = evaluate(ignorant("classes"), LABELS)
    expected = {"accuracy": 1 / C, "nll": math.log(C), "nll_legacy": math.log(C), "ece": 0}
    expected |= {"brier": 1 - 1 / C, "entropy": math.log(C), "confidence": 1 / C}
    expected |= {"mutual_information": 0, "disagreement": 0, "effective_functions": 1}
    assert {name: plain[name] for name in expected} == pytest.approx(expected, abs=1e-12)


def test_evaluate_refuses_ood_predictions_of_another_kind():
    with pytest.raises(DataError, match="same ensemble"):
        evaluate(arbitrary("classes"), LABELS, arbitrary("numbers"))


def test_a_misspelt_metric_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'accuracy'"):
        metrics.registry["acuracy"]
