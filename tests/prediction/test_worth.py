"""What one more member is worth: exact averages over subsets, their continuation, its interval."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from small_runs import assert_one_sentence

from shoal.core.errors import ConfigError
from shoal.inference.likelihoods import registry as likelihoods
from shoal.inference.likelihoods.custom_loss import Custom
from shoal.prediction import metrics, worth
from shoal.prediction.predictive import Predictive
from shoal.prediction.worth import SizeCurve, size_curves


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(n=30, classes=3):
    return torch.arange(n) % classes


CASES = {
    "categorical": ("categorical", drawn(5, 30, 3), labels()),
    "soft labels": ("categorical", drawn(5, 30, 3), drawn(30, 3, seed=1).softmax(-1)),
    "ordinal": ("ordinal", drawn(5, 30, 2), labels()),
    "several labels": ("bernoulli", drawn(5, 30, 2), (drawn(30, 2, seed=1) > 0).long()),
    "gaussian": ("heteroscedastic", drawn(5, 30, 4), drawn(30, 2, seed=1)),
    "student-t": ("student-t", drawn(3, 5, 2), drawn(5, 1, seed=1)),
    "lognormal": ("lognormal", drawn(5, 30, 2), drawn(30, 1, seed=1).exp()),
    "counts": ("poisson", drawn(5, 30, 1), labels()),
}


def case(name, members=None):
    kind, outputs, y = CASES[name]
    return Predictive(outputs[:members], likelihoods.make(kind)), y


def of_subset(pred, members):
    return replace(pred, members=pred.members[list(members)])


def literal(pred, y, score, size):
    """The score of every subset, one after the other; the square of RMSE is averaged."""
    scores = [
        metrics.registry[score](of_subset(pred, members), y)
        for members in combinations(range(pred.size), size)
    ]
    return np.mean(np.square(scores) if score == "rmse" else scores)


@pytest.mark.parametrize("name", CASES)
def test_curves_are_averages_over_all_subsets(name):
    pred, y = case(name)
    curves = size_curves(pred, y)
    known = ("nll", "accuracy", "brier", "rmse", "crps")
    assert curves.keys() == {s for s in known if metrics.registry[s].fits(pred)}
    for score, curve in curves.items():
        expected = [literal(pred, y, score, m) for m in curve.sizes]
        np.testing.assert_allclose(curve.values, expected, rtol=1e-5, err_msg=score)
        assert curve.points == len(y) and not curve.drawn.any()


@pytest.mark.parametrize("name", ["categorical", "gaussian"])
def test_left_out_is_the_curve_of_the_other_members(name):
    pred, y = case(name)
    curves = size_curves(pred, y)
    for member in range(5):
        rest = size_curves(of_subset(pred, {*range(5)} - {member}), y)
        for score, curve in curves.items():
            np.testing.assert_allclose(curve.left_out[member], rest[score].values, rtol=1e-9)


def test_auroc_is_averaged_over_subsets():
    for name in ("categorical", "gaussian"):
        pred, y = case(name)
        ood = replace(pred, members=pred.members.flip(1)[:, :20] * 0.7)
        curve = size_curves(pred, y, ood={"far": ood})["auroc far"]
        score = f"auroc_{pred.likelihood.about.uncertainty}"
        for m in range(1, 6):
            sets = list(combinations(range(5), m))
            each = [metrics.registry[score](of_subset(pred, s), of_subset(ood, s)) for s in sets]
            assert curve.values[m - 1] == pytest.approx(np.mean(each), abs=1e-12)


def test_chains_of_draws_count_as_members():
    """Member k M + c is draw k of chain c; a chain predicts by the mixture of its draws."""
    for name in ("categorical", "gaussian", "soft labels"):
        kind, outputs, y = CASES[name]
        outputs = torch.cat([outputs, 0.5 * outputs.flip(0)])  # two draws of five chains
        pred = Predictive(outputs, likelihoods.make(kind))
        curves = size_curves(pred, y, ood={"far": pred[:20]}, draws=2)
        assert "crps" not in curves and curves["nll"].members == 5
        for score in curves.keys() - {"auroc far"}:
            for m in (1, 2, 5):
                sets = [{c, c + 5} for c in range(5)] if m == 1 else []
                sets = sets or [{*s, *(c + 5 for c in s)} for s in combinations(range(5), m)]
                each = [metrics.registry[score](of_subset(pred, s), y) for s in sets]
                expected = np.mean(np.square(each) if score == "rmse" else each)
                assert curves[score].values[m - 1] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, match="from 3 chains on, not from 2"):
        size_curves(of_subset(pred, range(4)), y, draws=2)


def test_weights_and_ignored_targets_count_as_in_metrics():
    pred, y = case("gaussian")
    weight = torch.rand(30, dtype=torch.float64)
    curves = size_curves(pred, y, weight=weight)
    whole = metrics.evaluate(pred, y, sample_weight=weight)
    for score, curve in curves.items():
        assert curve.at(5) == pytest.approx(whole[score], rel=1e-9)
    pixels = Predictive(drawn(4, 6, 5, 3), likelihoods.make({"name": "categorical"}))
    curve = size_curves(pixels, labels(30).view(6, 5))["nll"]
    assert curve.points == 6  # the sites of an image are not data points of their own


def test_random_subsets_are_balanced_and_near_all(monkeypatch):
    monkeypatch.setattr(worth, "SUBSETS", 100)
    monkeypatch.setattr(worth, "CYCLES", 1)
    sets = worth._subsets(12, 5, 100, np.random.default_rng(0))
    assert len({frozenset(row) for row in sets[:12].tolist()}) == 12 and len(sets) == 96
    assert (np.bincount(sets.ravel()) == 40).all()
    assert len(worth._subsets(100, 50, 800, np.random.default_rng(0))) == 800
    pred, y = Predictive(2 * drawn(12, 40, 3), likelihoods.make("categorical")), labels(40)
    few = size_curves(pred, y)
    monkeypatch.setattr(worth, "SUBSETS", 1000)
    exact = size_curves(pred, y)
    assert exact["nll"].subsets == 2**12 - 1 > few["nll"].subsets
    for score in ("nll", "accuracy"):
        off = few[score].values - exact[score].values
        error = few[score].drawn
        assert (np.abs(off) <= 5 * error + 1e-12).all() and error[5] > 0
        spread = exact[score].left_out.std(0)
        np.testing.assert_allclose(few[score].left_out.std(0), spread, rtol=0.5, atol=1e-4)


def test_quadratic_scores_continue_exactly():
    """a + b / m holds for every m, so five members tell the expectation for any number."""
    pred, y = case("gaussian")
    for name in ("rmse", "crps"):
        curve = size_curves(pred, y)[name]
        b = (curve.values[0] - curve.values[1]) / (1 - 1 / 2)
        expected = curve.values[0] - b * (1 - 1 / 20)
        assert curve.at(20) == pytest.approx(math.sqrt(expected) if name == "rmse" else expected)


def test_known_curve_of_gaussian_members():
    """Members N(0, 1) around the truth: the mean square error of m members is 1 / m."""
    pred = Predictive(drawn(6, 4000, 1), likelihoods.make("gaussian"))
    curve = size_curves(pred, torch.zeros(4000, 1, dtype=torch.float64))["rmse"]
    for m in (1, 3, 6, 24):
        assert curve.at(m) == pytest.approx(m**-0.5, abs=0.02)
    gain = curve.gain(18)
    assert gain.value == pytest.approx(6**-0.5 - 24**-0.5, abs=4 * gain.error)
    assert curve.gain(math.inf).value == pytest.approx(6**-0.5, abs=0.1)


def curve_of(values, members, score="nll"):
    sizes = np.arange(1, members + 1)
    left = np.tile(values[:-1], (members, 1))
    nothing = np.zeros(members)
    return SizeCurve(score, sizes, values, left, np.zeros((members,) * 2), nothing, 0, 100)


@pytest.mark.parametrize("members", [3, 4, 5, 10])
def test_the_fit_recovers_a_known_curve(members):
    c = 0.05 if members >= 5 else 0.0

    def f(m):
        return 0.3 + 0.2 / m + c / m**2

    curve = curve_of(f(np.arange(1, members + 1.0)), members)
    for more in (1, 2, 50):
        gain = curve.gain(more)
        assert gain.value == pytest.approx(f(members) - f(members + more), rel=1e-9)
        assert gain.error == pytest.approx(0, abs=1e-9)
    assert curve.gain(math.inf).value == pytest.approx(f(members) - 0.3, rel=1e-9)
    better = curve_of(1 - f(np.arange(1, members + 1.0)), members, "accuracy")
    assert better.gain(2).value == pytest.approx(f(members) - f(members + 2), rel=1e-9)


def test_members_are_counted_while_each_is_worth_its_price():
    curve = curve_of(0.3 + 0.2 / np.arange(1, 6.0), 5)
    assert 0.2 / 6 - 0.2 / 7 > 0.004 > 0.2 / 7 - 0.2 / 8  # the seventh is worth it, not the eighth
    assert curve.members_worth(0.004, 10) == 2
    assert curve.members_worth(0.004, 1) == 1
    assert curve.members_worth(0.1, 10) == 0


def test_intervals_hold_what_growing_brings():
    """Members around a truth: 95 % intervals hold the gain of one growth about as often."""
    members, more, held, gains, expected = 5, 5, [], [], []
    truth, random = 1.5 * drawn(100, 4, seed=99), torch.Generator().manual_seed(0)
    y = torch.multinomial(truth.softmax(-1), 1, generator=random)[:, 0]
    for seed in range(60):
        outputs = truth + drawn(members + more, 100, 4, seed=seed)
        outputs = outputs + 0.3 * drawn(members + more, 1, 4, seed=1000 + seed)
        pred = Predictive(outputs, likelihoods.make("categorical"))
        gain = size_curves(of_subset(pred, range(members)), y)["nll"].gain(more)
        came = metrics.nll(of_subset(pred, range(members)), y) - metrics.nll(pred, y)
        held.append(gain.low <= came <= gain.high)
        expected.append(gain.value)
        gains.append(came)
    assert 0.88 <= np.mean(held) <= 1
    assert np.mean(expected) == pytest.approx(np.mean(gains), rel=0.1)


def test_curves_are_kept_as_tensors():
    pred, y = case("categorical")
    curve = size_curves(pred, y)["nll"]
    again = SizeCurve.read("nll", curve.tensors)
    assert again.gain(2) == curve.gain(2) and again.members == 5


def test_what_cannot_be_told_is_refused():
    pred, y = case("categorical", members=2)
    with pytest.raises(ConfigError, match="from 3 finite members on, not from 2") as error:
        size_curves(pred, y)
    assert_one_sentence(error.value)
    weighted = replace(case("categorical")[0], weights=torch.tensor([0.6, 0.1, 0.1, 0.1, 0.1]))
    with pytest.raises(ConfigError, match="equal weights"):
        size_curves(weighted, y)
    loss = Predictive(drawn(5, 30, 3), Custom(lambda out, y: (out[..., 0] - y) ** 2))
    with pytest.raises(ConfigError, match="a custom loss has no distribution"):
        size_curves(loss, y)


def test_members_that_agree_have_nothing_to_add():
    """A score that is the same for all subsets: gain and interval are 0, not an error of a root."""
    pred = Predictive(5 * torch.eye(4).repeat(6, 25, 1).double(), likelihoods.make("categorical"))
    for curve in size_curves(pred, labels(100, 4)).values():
        gain = curve.gain(2)
        assert (gain.value, gain.low, gain.high) == pytest.approx((0, 0, 0), abs=1e-12)
