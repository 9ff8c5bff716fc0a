"""Estimators with conformal=True: cross-conformal intervals and sets from the folds of the fit."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from small_runs import assert_one_sentence

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.orders import Folds
from shoal.integrations.sklearn.columns import merged
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

pytestmark = pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")

FEW = {"members": 4, "epochs": 4, "hidden": (8,), "random_state": 0}
FOLDS = FEW | {"folds": 4, "conformal": True}


def numbers(n=120, seed=0):
    random = np.random.default_rng(seed)
    X = random.normal(size=(n, 3))
    return X, 100 + 20 * X[:, 0] + 5 * random.normal(size=n)


def texts(n=120, seed=0):
    X, y = numbers(n, seed)
    return X, np.array(["low", "middle", "high"])[np.digitize(y, [90, 110])]


@pytest.fixture(scope="module")
def regressor():
    return EnsembleRegressor(**FOLDS).fit(*numbers())


@pytest.fixture(scope="module")
def classifier():
    return EnsembleClassifier(**FOLDS).fit(*texts())


def of_folds(model, X):
    """Means and standard deviations by the members of each fold."""
    pred, members = model.predictive(X), torch.arange(4)
    each = [shoal.Predictive(pred.members[members == k], pred.likelihood) for k in range(4)]
    return [(p.mean[:, 0].numpy(), p.stddev[:, 0].numpy()) for p in each]


def test_intervals_are_those_of_the_folds_at_any_level(regressor):
    X, y = merged(*numbers(), None)[:2]
    new, n = numbers(30, 1)[0], len(y)
    folds = Folds(n, 4, regressor.run_.config["seed"]).of_points.tolist()
    seen, fresh = of_folds(regressor, X), of_folds(regressor, new)
    ends = []
    for i, fold in enumerate(folds):
        (mean, std), (centre, unit) = seen[fold], fresh[fold]
        reach = abs(y[i] - mean[i]) / std[i] * unit
        ends.append((centre - reach, centre + reach))
    lows, highs = (np.sort(np.stack(side), 0) for side in zip(*ends, strict=True))
    for level in (0.5, 0.9):
        low, high = regressor.predict_interval(new, level)
        rank = int(np.ceil(level * (n + 1) - 1e-9))
        assert low == pytest.approx(lows[n - rank], rel=1e-5)
        assert high == pytest.approx(highs[rank - 1], rel=1e-5)


def test_coverage_of_new_points_is_near_the_level():
    model = EnsembleRegressor(**FOLDS | {"epochs": 12}).fit(*numbers(200))
    X, y = numbers(500, 1)
    low, high = model.predict_interval(X, 0.8)
    assert 0.72 < ((low <= y) & (y <= high)).mean() < 0.9
    assert "200 training points" in model.conformal_.guarantee


def test_sets_have_the_order_of_the_classes(classifier):
    X, y = texts(200, 1)
    inside = classifier.predict_set(X, level=0.8)
    assert inside.dtype == bool and inside.shape == (200, 3)
    places = np.searchsorted(classifier.classes_, y)
    assert 0.68 < inside[np.arange(200), places].mean() <= 1
    assert inside[np.arange(200), classifier.predict_proba(X).argmax(1)].all()
    assert classifier.predict_set(X, 0.5).sum() < inside.sum()


def test_a_pickle_holds_the_rule_and_no_data_and_a_clone_the_parameter(regressor, classifier):
    new = numbers(9, 2)[0]
    for model, asked in ((regressor, "predict_interval"), (classifier, "predict_set")):
        again = pickle.loads(pickle.dumps(model))
        assert np.array_equal(getattr(again, asked)(new), getattr(model, asked)(new))
        assert clone(model).conformal is True and not hasattr(clone(model), "conformal_")
        assert model.run_.given is None
        kept = sum(t.numel() for t in vars(model.conformal_.scores).values() if torch.is_tensor(t))
        assert kept < 3 * 120  # scores, counts and the folds of members


def test_the_parameter_chooses_the_interval_after_the_fit(regressor):
    new = numbers(9, 2)[0]
    central = clone(regressor).set_params(conformal=False).fit(*numbers())
    switched = pickle.loads(pickle.dumps(regressor)).set_params(conformal=False)
    for mine, theirs in zip(
        switched.predict_interval(new), central.predict_interval(new), strict=True
    ):
        assert np.array_equal(mine, theirs)
    assert not np.array_equal(switched.predict_interval(new), regressor.predict_interval(new))


def test_whole_weights_count_as_repetitions():
    X, y = numbers(80)
    times = np.arange(80) % 3
    weighted = EnsembleRegressor(**FOLDS).fit(X, y, sample_weight=times)
    rows = np.repeat(np.arange(80), times)
    repeated = EnsembleRegressor(**FOLDS).fit(X[rows], y[rows])
    new = numbers(9, 2)[0]
    assert np.array_equal(weighted.predict_interval(new), repeated.predict_interval(new))
    assert weighted.conformal_.scores.points == times.sum()
    balanced = EnsembleClassifier(**FOLDS, class_weight="balanced").fit(*texts())
    assert balanced.conformal_.scores.points == 120


def test_few_points_have_folds_too():
    X, y = numbers(30)
    model = EnsembleRegressor(**FEW, conformal=True).fit(X, y)
    assert model.run_.config["folds"] == 4
    low, high = model.predict_interval(X, 0.9)
    assert (low < high).all()
    with pytest.raises(DataError, match="99 training points"):
        model.predict_interval(X, 0.99)


def test_what_conformal_cannot_do_is_said_in_one_sentence():
    X, y = numbers(40)
    went_on = EnsembleRegressor(**FOLDS).fit(X, y).partial_fit(X + 1, y)
    both = np.stack([y > 100, y > 110], 1).astype(int)
    for wrong, words in [
        (lambda: EnsembleClassifier(**FEW).fit(*texts()).predict_set(X), "conformal=True"),
        (lambda: went_on.predict_interval(X), "partial_fit has none"),
        (lambda: EnsembleClassifier(**FOLDS).fit(X, both), "one label"),
        (lambda: EnsembleRegressor(**FOLDS).fit(X, y, np.full(40, 0.5)), "whole numbers"),
        (lambda: EnsembleRegressor(**FEW, conformal=True, folds=None).fit(X, y), "folds"),
        (lambda: EnsembleRegressor(**FEW | {"members": 1}, conformal=True).fit(X, y), "members=2"),
    ]:
        with pytest.raises((ConfigError, DataError), match=words) as error:
            wrong()
        assert_one_sentence(error.value)
