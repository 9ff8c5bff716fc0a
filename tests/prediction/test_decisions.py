"""Decisions against closed forms, literal references and the libraries of the field."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

from shoal import decisions
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.inference.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Ordinal,
    Poisson,
)
from shoal.prediction import Predictive, metrics
from shoal.prediction.decisions.binomial import beta_quantile, binomial_cdf
from shoal.prediction.decisions.selection import GRID, _fallback

M, C = 3, 6


def classes(n, seed=0, members=M, scale=1.5, overconfident=1.0):
    """Predictions, and labels drawn from their own mean probabilities."""
    random = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(members, n, C, generator=random, dtype=torch.float64)
    logits = logits[:1] + 0.3 * logits
    truth = Predictive(logits, Categorical())
    y = torch.multinomial(truth.probs, 1, generator=random).squeeze(1)
    return Predictive(overconfident * logits, Categorical()), y


def numbers(n, seed=0):
    random = torch.Generator().manual_seed(seed)
    outputs = torch.randn(M, n, 2, generator=random, dtype=torch.float64)
    y = 1.5 * torch.randn(n, generator=random, dtype=torch.float64)
    return Predictive(outputs, HeteroscedasticGaussian()), y


class Known(ClassifierMixin, BaseEstimator):
    """A classifier of the field's libraries that looks its probabilities up."""

    def __init__(self, probs=None, logits=None):
        self.probs, self.logits, self.classes_ = probs, logits, np.arange(C)

    def fit(self, x, y):
        return self

    def predict_proba(self, x):
        return self.probs[x[:, 0].astype(int)]

    def decision_function(self, x):
        return self.logits[x[:, 0].astype(int)]

    def predict(self, x):
        return self.predict_proba(x).argmax(1)

    def __sklearn_is_fitted__(self):
        return True


class KnownNumbers(RegressorMixin, BaseEstimator):
    def __init__(self, values=None):
        self.values, self.fitted_ = values, True

    def fit(self, x, y):
        return self

    def predict(self, x):
        return self.values[x[:, 0].astype(int)]

    def __sklearn_is_fitted__(self):
        return True


def rows(n):
    return np.arange(n, dtype=float)[:, None]


def together(*preds):
    return Predictive.concat(preds)


# exact binomial numbers


@pytest.mark.parametrize("k, n", [(0, 10), (3, 10), (10, 10), (7, 500), (499, 500)])
def test_binomial_numbers_are_those_of_scipy(k, n):
    wanted = stats.binom.cdf(k, n, 0.03)
    assert float(binomial_cdf(torch.tensor(k), torch.tensor(n), 0.03)) == pytest.approx(wanted)
    exact = stats.binomtest(k, n).proportion_ci(0.9, method="exact")
    assert decisions.clopper_pearson(k, n, 0.9) == pytest.approx(tuple(exact), abs=1e-12)
    assert beta_quantile(0.2, k + 1, n) == pytest.approx(stats.beta.ppf(0.2, k + 1, n), abs=1e-12)


# temperature


def test_the_temperature_is_that_of_scikit_learn():
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    pred, y = classes(400, members=1, overconfident=2.5)
    known = Known(pred.probs.numpy(), pred.members[0].numpy())
    oracle = CalibratedClassifierCV(FrozenEstimator(known), method="temperature")
    oracle.fit(rows(400), y.numpy())
    for where in ("members", "pooled"):
        found = decisions.temperature(pred, y, where)
        assert found(pred).probs.numpy() == pytest.approx(oracle.predict_proba(rows(400)), abs=2e-4)
        assert 1.5 < found.value < 4


def test_scaling_improves_torchmetrics_calibration_on_new_data():
    from torchmetrics.functional.classification import multiclass_calibration_error

    pred, y = classes(2000, overconfident=3.0)
    fitted = decisions.temperature(pred[:1000], y[:1000])
    before, after = pred[1000:], fitted(pred[1000:])
    errors = [
        float(multiclass_calibration_error(p.probs, y[1000:], C, n_bins=15))
        for p in (before, after)
    ]
    assert errors[1] < errors[0] / 3
    assert metrics.nll(after, y[1000:]) < metrics.nll(before, y[1000:])
    assert fitted.nll < fitted.nll_before
    assert after.size == M and float(after.mutual_information().mean()) > 0


def test_no_other_temperature_has_a_lower_nll():
    pred, y = classes(300, overconfident=1.7)
    for where in ("members", "pooled"):
        found = decisions.temperature(pred, y, where)
        assert found.nll == pytest.approx(metrics.nll(found(pred), y), abs=1e-9)
        for factor in (0.8, 0.97, 1.03, 1.25):
            other = decisions.Temperature(factor * found.value, where, 0, 0)
            assert metrics.nll(other(pred), y) > found.nll


def test_yes_or_no_is_scaled_and_orders_and_numbers_are_explained():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 500, 1, generator=random)
    y = torch.bernoulli(logits.mean(0).sigmoid(), generator=random).squeeze(1).long()
    pred = Predictive(4 * logits, Bernoulli())
    for where in ("members", "pooled"):
        assert decisions.temperature(pred, y, where).value > 2
    ordinal = Predictive(torch.randn(2, 50, 3, generator=random), Ordinal())
    y = torch.arange(50) % 4
    assert decisions.temperature(ordinal, y, "pooled")(ordinal).probs.shape == (50, 4)
    with pytest.raises(ConfigError, match="pooled"):
        decisions.temperature(ordinal, y)
    with pytest.raises(ConfigError, match="conformal_intervals"):
        decisions.temperature(*numbers(20))
    with pytest.raises(ConfigError, match="members"):
        decisions.temperature(*classes(20), where="all")


# conformal sets


def mapie_sets(val, y, test, level, score, **how):
    from mapie.classification import SplitConformalClassifier

    both = together(val, test).probs.numpy()
    n = len(val)
    oracle = SplitConformalClassifier(
        Known(both), confidence_level=level, conformity_score=score, prefit=True, random_state=0
    )
    oracle.conformalize(rows(n), y.numpy())
    sets = oracle.predict_set(n + rows(len(test)), conformity_score_params=how or None)[1][..., 0]
    return sets, oracle


@pytest.mark.parametrize("level", [0.6, 0.9, 0.95])
def test_sets_of_lac_are_those_of_mapie(level):
    (val, y), (test, _) = classes(150), classes(80, seed=1)
    wanted, _ = mapie_sets(val, y, test, level, "lac")
    rule = decisions.conformal_sets(val, y, level, score="lac", allow_empty=True)
    assert (rule(test).numpy() == wanted).all() and wanted.any()


@pytest.fixture
def numpy_draws(monkeypatch):
    """The uniform numbers that MAPIE draws with random_state=0."""

    def uniform(n, seed):
        return torch.from_numpy(np.random.RandomState(0).uniform(size=n)) * (seed == 0)

    monkeypatch.setattr("shoal.prediction.decisions.conformal._uniform", uniform)


@pytest.mark.parametrize("level", [0.6, 0.9, 0.95])
def test_randomised_sets_of_aps_are_those_of_mapie(level, numpy_draws):
    (val, y), (test, _) = classes(150), classes(80, seed=1)
    wanted, oracle = mapie_sets(val, y, test, level, "aps", include_last_label="randomized")
    rule = decisions.conformal_sets(val, y, level, randomised=True, allow_empty=True, seed=0)
    threshold = oracle._mapie_classifier.conformity_score_function_.quantiles_
    assert rule.threshold == pytest.approx(float(threshold[0]), abs=1e-12)
    assert (rule(test, seed=0).numpy() == wanted).all()


def test_sets_of_raps_are_those_of_mapie(numpy_draws):
    """With the penalty and the points that MAPIE chose, and without a draw at prediction."""
    from sklearn.model_selection import StratifiedShuffleSplit

    (val, y), (test, _) = classes(300), classes(80, seed=1)
    wanted, oracle = mapie_sets(val, y, test, 0.9, "raps", include_last_label=False)
    chosen = oracle._mapie_classifier.conformity_score_function_
    others = 300 - len(oracle._mapie_classifier.conformity_scores_)
    split = StratifiedShuffleSplit(n_splits=1, test_size=others, random_state=0)
    kept = next(split.split(rows(300), y.numpy()))[0]
    rule = decisions.conformal_sets(
        val[kept],
        y[kept],
        0.9,
        score="raps",
        penalty=float(np.ravel(chosen.lambda_star)[0]),
        free_ranks=int(np.ravel(chosen.k_star)[0]),
        randomised=True,
        seed=0,
    )
    assert rule.penalty > 0 and rule.free_ranks < C
    assert rule.threshold == pytest.approx(float(np.ravel(chosen.quantiles_)[0]), abs=1e-12)
    assert (rule(test, seed=1).numpy() == wanted).all()


def literal_scores(p, score, penalty, free):
    """Score of every class of one data point, in loops."""
    order = sorted(range(len(p)), key=lambda c: -p[c])
    found = {}
    for rank, c in enumerate(order, 1):
        total = sum(p[other] for other in order[:rank])
        found[c] = 1 - p[c] if score == "lac" else total
        if score == "raps":
            found[c] += penalty * max(0, rank - free)
    return found


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_sets_are_the_literal_ones(score):
    (val, y), (test, _) = classes(57), classes(9, seed=1)
    penalty, free = 0.2, 2
    each = sorted(
        literal_scores(p, score, penalty, free)[int(label)]
        for p, label in zip(val.probs.tolist(), y, strict=True)
    )
    threshold = each[math.ceil(58 * 0.8) - 1]
    rule = decisions.conformal_sets(
        val, y, 0.8, score=score, penalty=penalty, free_ranks=free, allow_empty=True
    )
    assert rule.threshold == pytest.approx(threshold)
    for p, inside in zip(test.probs.tolist(), rule(test), strict=True):
        scores = literal_scores(p, score, penalty, free)
        wanted = {c for c in scores if scores[c] <= threshold + 1e-12}
        assert wanted == set(inside.nonzero().flatten().tolist())


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_a_level_needs_level_over_one_minus_level_points_and_the_error_says_so(level):
    needed = math.ceil(Fraction(str(level)) / (1 - Fraction(str(level))))
    for fit, example in (
        (decisions.conformal_sets, classes),
        (decisions.conformal_intervals, numbers),
    ):
        fit(*example(needed), level)
        if needed > 1:
            with pytest.raises(DataError, match=f"needs {needed} validation points.* not"):
                fit(*example(needed - 1), level)


@pytest.mark.parametrize(
    "wrong",
    [{"penalty": math.nan}, {"penalty": math.inf}, {"free_ranks": math.nan}, {"free_ranks": 1.5}],
)
def test_a_penalty_without_a_number_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        decisions.conformal_sets(*classes(50), score="raps", **wrong)


@pytest.mark.parametrize("abstain", [math.nan, math.inf, "a"])
def test_abstention_has_a_finite_cost(abstain):
    with pytest.raises(ConfigError, match="abstain"):
        decisions.cheapest(classes(5)[0], 1 - torch.eye(C), abstain)


def test_no_set_is_empty():
    test, _ = classes(30, seed=1)
    narrow = decisions.conformal_sets(*classes(200), 0.05, score="lac")
    assert bool(narrow(test).any(1).all())
    assert torch.equal(
        narrow(test).long().argmax(1)[narrow(test).sum(1) == 1],
        test.labels()[narrow(test).sum(1) == 1],
    )


def test_randomised_sets_are_smaller_and_repeat_with_their_seed():
    (val, y), (test, _) = classes(400), classes(400, seed=1)
    plain = decisions.conformal_sets(val, y, 0.8)
    random = decisions.conformal_sets(val, y, 0.8, randomised=True, seed=0)
    assert random(test, seed=1).sum() < plain(test).sum()
    assert torch.equal(random(test, seed=1), random(test, seed=1))
    assert not torch.equal(random(test, seed=1), random(test, seed=2))


# conformal intervals


@pytest.mark.parametrize("score", ["absolute", "cqr", "scaled"])
def test_intervals_are_those_of_mapie(score):
    from mapie.regression import ConformalizedQuantileRegressor, SplitConformalRegressor

    (val, y), (test, _), level, n = numbers(120), numbers(40, seed=1), 0.8, 120
    both = together(val, test)
    if score == "cqr":
        ends = [both.quantile(p) for p in (0.1, 0.9, 0.5)]
        known = [KnownNumbers(end.squeeze(1).numpy()) for end in ends]
        oracle = ConformalizedQuantileRegressor(known, confidence_level=level, prefit=True)
        how = {"symmetric_correction": True}
    else:
        mean = both.mean.squeeze(1).numpy()
        oracle = SplitConformalRegressor(KnownNumbers(mean), confidence_level=level, prefit=True)
        how = {}
    low, high = decisions.conformal_intervals(val, y, level, score=score)(test)
    if score == "scaled":  # the same, in units of the standard deviation
        unit = both.stddev.squeeze(1).numpy()
        oracle = SplitConformalRegressor(
            KnownNumbers(mean / unit), confidence_level=level, prefit=True
        )
        y = y / both.stddev[:n, 0]
    oracle.conformalize(rows(n), y.numpy())
    wanted = oracle.predict_interval(n + rows(40), **how)[1][..., 0]
    if score == "scaled":
        wanted = wanted * unit[n:, None]
    assert torch.cat([low, high], 1).numpy() == pytest.approx(wanted, abs=1e-9)


def test_columns_have_margins_of_their_own_and_counts_stay_whole():
    random = torch.Generator().manual_seed(0)
    outputs = torch.randn(M, 300, 2, generator=random)
    y = outputs.mean(0) + torch.tensor([0.1, 5.0]) * torch.randn(300, 2, generator=random)
    rule = decisions.conformal_intervals(Predictive(outputs, Gaussian(1.0)), y, score="absolute")
    assert 0.1 < rule.margin[0] < 0.3 and 6 < rule.margin[1] < 11
    counts = Predictive(outputs[..., :1], Poisson())
    y = torch.poisson(counts.mean, generator=random)
    low, high = decisions.conformal_intervals(counts, y, 0.8)(counts)
    assert torch.equal(low, low.round()) and torch.equal(high, high.round())
    assert float(((y >= low) & (y <= high)).double().mean()) >= 0.8


# selective prediction


def test_the_risk_coverage_curve_is_the_literal_one():
    pred, y = classes(60)
    curve = decisions.risk_coverage(pred, y)
    wrong = pred.labels() != y
    for threshold, coverage, risk in zip(curve.threshold, curve.coverage, curve.risk, strict=True):
        kept = pred.confidence() >= threshold
        assert float(coverage) == pytest.approx(float(kept.double().mean()))
        assert float(risk) == pytest.approx(float(wrong[kept].double().mean()))
    assert curve.area == pytest.approx(float(curve.risk.mean()))  # without ties, all steps 1 / n
    assert float(curve.coverage[-1]) == 1


def test_equal_certainties_are_answered_together():
    members = torch.tensor([[[2.0, 0.0], [2.0, 0.0], [1.0, 0.0]]])
    curve = decisions.risk_coverage(Predictive(members, Categorical()), [0, 1, 1])
    assert curve.coverage.tolist() == pytest.approx([2 / 3, 1])
    assert curve.risk.tolist() == pytest.approx([0.5, 2 / 3])
    assert curve.area == pytest.approx(2 / 3 * 0.5 + 1 / 3 * 2 / 3)


def test_a_selective_rule_answers_as_much_as_its_test_allows():
    pred, y = classes(3000, scale=3.0)
    rule = decisions.selective(pred, y, error=0.1)
    kept = pred.confidence() >= rule.threshold
    assert torch.equal(rule(pred), kept)
    wrong = int((pred.labels() != y)[kept].sum())
    assert rule.answered == pytest.approx(float(kept.double().mean()))
    assert rule.validation_error == pytest.approx(wrong / int(kept.sum())) and rule.bound <= 0.1
    assert rule.bound == pytest.approx(stats.beta.ppf(0.95, wrong + 1, int(kept.sum()) - wrong))
    assert rule.answered > 0.4
    stricter = decisions.selective(pred, y, error=0.05)
    assert stricter.threshold > rule.threshold and stricter.answered < rule.answered


@pytest.mark.parametrize("score", ["entropy", "mutual_information"])
def test_certainty_may_be_measured_otherwise(score):
    pred, y = classes(2000, scale=3.0)
    rule = decisions.selective(pred, y, error=0.2, score=score)
    uncertain = pred.entropy() if score == "entropy" else pred.mutual_information()
    answered = rule(pred)
    assert 0 < rule.answered <= 1
    assert float(uncertain[answered].max()) <= (1 - rule.threshold) * math.log(C) + 1e-9


def test_a_rule_that_cannot_be_guaranteed_answers_nothing_and_warns():
    pred, y = classes(100)
    with pytest.warns(ShoalWarning, match="validation points"):
        rule = decisions.selective(pred, y, error=0.01)
    assert rule.threshold == math.inf and not bool(rule(pred).any())


def test_the_fallback_procedure_hands_budgets_on():
    """Ten hypotheses, each with a tenth of 0.1: a rejection adds its tenth to the next."""
    assert _fallback([0.01, 0.02, 0.03] + [1.0] * 7, 0.1) == [0, 1, 2]
    assert _fallback([0.02, 0.01, 0.02] + [1.0] * 7, 0.1) == [1, 2]
    assert _fallback([1.0] * 9 + [0.0101], 0.1) == []
    assert len(GRID) == 241 and float(GRID[-1]) == 0 and bool((GRID.diff() < 0).all())


# costs


def test_the_cheapest_decision_is_the_literal_one():
    pred, _ = classes(40)
    costs = torch.rand(C, 4, generator=torch.Generator().manual_seed(0))
    found = decisions.cheapest(pred, costs)
    for b, p in enumerate(pred.probs.tolist()):
        expected = [sum(p[c] * float(costs[c, a]) for c in range(C)) for a in range(4)]
        assert int(found.decision[b]) == int(np.argmin(expected))
        assert float(found.cost[b]) == pytest.approx(min(expected))


@pytest.mark.parametrize("d", [0.1, 0.4])
def test_abstention_is_the_rule_of_chow(d):
    pred, _ = classes(200)
    found = decisions.cheapest(pred, 1 - torch.eye(C), abstain=d)
    answered = pred.confidence() >= 1 - d
    assert torch.equal(found.decision, torch.where(answered, pred.labels(), -1))
    assert (
        float(found.cost.max()) <= d + 1e-12 and bool(answered.any()) and not bool(answered.all())
    )


# alarms


def test_the_threshold_of_an_alarm_is_an_order_statistic_with_a_beta_law():
    pred, _ = classes(99)
    alarm = decisions.ood_alarm(pred, 0.1)
    assert alarm.score == "entropy"
    assert alarm.threshold == pytest.approx(float(pred.entropy().sort().values[89]))
    law = stats.beta(100 - 90, 90)
    assert (alarm.low, alarm.high) == pytest.approx((law.ppf(0.025), law.ppf(0.975)))
    assert int(alarm(pred).sum()) == 9
    sure = decisions.ood_alarm(pred, 0.1, confidence=0.95)
    rank = next(k for k in range(1, 100) if stats.beta.cdf(0.1, 100 - k, k) >= 0.95)
    assert sure.threshold == pytest.approx(float(pred.entropy().sort().values[rank - 1]))
    assert sure.high < alarm.high


def test_the_false_alarms_and_detections_are_those_of_the_roc_of_torchmetrics():
    from torchmetrics.functional.classification import binary_roc

    (test, _), (ood, _) = classes(99), classes(70, seed=1, scale=0.2)
    alarm = decisions.ood_alarm(test, 0.1)
    score = torch.cat([test.entropy(), ood.entropy()]) / math.log(C)
    truth = torch.cat([torch.zeros(99), torch.ones(70)]).long()
    fpr, tpr, thresholds = binary_roc(score, truth)
    above = int((thresholds > alarm.threshold / math.log(C) + 1e-12).sum()) - 1
    assert float(alarm(test).double().mean()) == pytest.approx(float(fpr[above]))
    assert float(alarm(ood).double().mean()) == pytest.approx(float(tpr[above]))
    assert float(alarm(ood).double().mean()) > 0.5


def test_numbers_have_alarms_too_and_few_points_have_none():
    pred, _ = numbers(50)
    assert decisions.ood_alarm(pred).score == "variance"
    with pytest.warns(ShoalWarning, match="5 validation points are too few"):
        few = decisions.ood_alarm(pred[:5], 0.01)
    assert few.threshold == math.inf and few.low == 0 and not bool(few(pred).any())
    with pytest.raises(ConfigError, match="disagreement"):
        decisions.ood_alarm(pred, score="entropy")


# words


@pytest.mark.parametrize(
    "rule",
    [
        lambda: decisions.conformal_sets(*classes(50)),
        lambda: decisions.conformal_intervals(*numbers(50)),
        lambda: decisions.selective(*classes(500, scale=3.0), 0.3),
        lambda: decisions.ood_alarm(classes(50)[0]),
    ],
)
def test_a_guarantee_names_its_condition_and_its_data(rule):
    found = rule()
    assert str(found.validation_points) in found.guarantee
    assert "exchangeable" in found.guarantee or "distribution" in found.guarantee


@pytest.mark.parametrize(
    "call",
    [
        lambda p, y: decisions.conformal_sets(p, y, 1.0),
        lambda p, y: decisions.conformal_sets(p, y, score="best"),
        lambda p, y: decisions.conformal_sets(p, y, penalty=-1),
        lambda p, y: decisions.conformal_intervals(p, y),
        lambda p, y: decisions.selective(p, y, error=0),
        lambda p, y: decisions.selective(p, y, error=0.5, score="luck"),
        lambda p, y: decisions.ood_alarm(p, 2),
        lambda p, y: decisions.ood_alarm(p, confidence=1.5),
        lambda p, y: decisions.cheapest(p, torch.zeros(2, 2)),
        lambda p, y: decisions.clopper_pearson(1, 2, 95),
    ],
)
def test_wrong_settings_are_refused(call):
    with pytest.raises(ConfigError):
        call(*classes(20))


def test_tokens_are_data_points_and_ignored_labels_do_not_count():
    random = torch.Generator().manual_seed(0)
    members = torch.randn(M, 40, 5, C, generator=random)
    y = torch.randint(C, (40, 5), generator=random)
    y[:, -1] = -100
    pred = Predictive(members, Categorical(ignore_index=-100))
    rule = decisions.conformal_sets(pred, y)
    assert rule.validation_points == 160 and rule(pred).shape == (200, C)


def test_several_labels_at_once_are_refused():
    pred = Predictive(torch.randn(M, 10, 3), Bernoulli())
    with pytest.raises(ConfigError, match="one label"):
        decisions.conformal_sets(pred, torch.zeros(10, 3, dtype=torch.long))
