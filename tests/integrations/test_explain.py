"""Which columns matter to an estimator: importances, partial dependence, and the report."""

import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.feature_selection import SelectFromModel
from sklearn.inspection import partial_dependence, permutation_importance
from sklearn.metrics import log_loss
from torch import nn

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.integrations.sklearn.columns import merged
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

PLAIN = {"numbers": "standard", "dropout": 0.0, "learning_rate": 0.01, "batch_size": 100}
FEW = {"epochs": 60, "members": 4, "hidden": (16,), "random_state": 0, "folds": None} | PLAIN
FOLDS = FEW | {"folds": 2}
pytestmark = pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")


def table(n=240, seed=0):
    """A table in which size matters most, then city, and neither day nor noise."""
    random = np.random.default_rng(seed)
    columns = {
        "noise": random.normal(size=n),
        "size": random.normal(size=n),
        "city": random.choice(["Bonn", "Jena", "Ulm"], n),
        "day": pd.date_range("2020-01-01", periods=n),
    }
    X = pd.DataFrame(columns)
    y = 3 * X["size"] + 2.0 * (X["city"] == "Ulm") + 0.3 * random.normal(size=n)
    X.loc[::9, "noise"] = np.nan
    return X, y.rename("price")


@pytest.fixture(scope="module")
def houses():
    X, y = table()
    return EnsembleRegressor(**FOLDS).fit(X, y), X, y


@pytest.fixture(scope="module")
def labels():
    X, y = table(seed=1)
    labels = np.where(y > 1, "dear", "cheap")
    return EnsembleClassifier(**FEW).fit(X, labels), X, labels


def test_importances_come_with_the_fit(houses):
    model, X, _ = houses
    found = model.importances()
    assert (found.data, found.score, found.points) == ("out-of-fold", "crps", len(X))
    assert found.columns == tuple(X.columns)
    assert np.argsort(-found.mean)[:2].tolist() == [1, 2]
    low, high = found.interval()
    assert abs(found.mean[0]) < 0.02 * found.mean[1] and low[0] < high[0] < low[1]
    shares = model.feature_importances_
    assert shares.shape == (4,) and shares.min() >= 0 and shares.sum() == pytest.approx(1)
    assert (pickle.loads(pickle.dumps(model)).feature_importances_ == shares).all()


def test_training_data_are_permuted_out_of_fold(houses):
    model, X, y = houses
    found = model.importances(X, y, repeats=2)
    assert found.data == "out-of-fold" and found.baseline == model.importances().baseline
    assert model.importances(X[:100], y[:100], repeats=1).data == "given"
    new = model.importances(*table(seed=5), repeats=1)
    assert new.data == "given" and new.members.shape == (4, model.members)


def test_the_out_of_fold_score_is_the_baseline():
    X, y = table(120)
    order = np.lexsort((y, X["size"]))
    model = EnsembleRegressor(**FOLDS | {"preprocess": None, "epochs": 5})
    inputs, y = X[["size"]].to_numpy()[order], y.to_numpy()[order]
    model.fit(inputs, y)
    x, targets, *_ = merged(inputs, y, None)
    scores = shoal.evaluate(shoal.out_of_fold(model.run_, (x, targets)), targets)
    assert model.importances().baseline == pytest.approx(scores["crps"], rel=1e-9)


def test_importances_agree_with_those_of_sklearn(labels):
    model, X, y = labels
    assert model.importances().data == "validation" and model.importances().score == "nll"
    X, y = X[:150], y[:150]

    def score(model, X, y):
        return -log_loss(y, model.predict_proba(X))

    other = permutation_importance(model, X, y, scoring=score, n_repeats=10, random_state=0)
    found = model.importances(X, y, repeats=10)
    assert found.baseline == pytest.approx(log_loss(y, model.predict_proba(X)))
    reach = 4 * other.importances_std / np.sqrt(10) + 0.01
    assert (abs(found.mean - other.importances_mean) < reach).all()


def test_a_selection_of_columns_takes_the_importances(houses):
    model, X, _ = houses
    kept = SelectFromModel(model, prefit=True, threshold="mean").get_support()
    assert kept.tolist() == [False, True, False, False]


def test_images_have_no_columns():
    def flat(input_shape, outputs):
        return nn.Sequential(nn.Flatten(), nn.Linear(4, outputs))

    images, y = np.random.default_rng(0).normal(size=(30, 1, 2, 2)), np.arange(30.0)
    model = EnsembleRegressor(**FEW | {"epochs": 1}, network=flat, preprocess=None)
    model.fit(images, y)
    assert not hasattr(model, "feature_importances_")
    with pytest.raises(ConfigError, match="no importances"):
        model.importances()
    with pytest.raises(ConfigError, match="no columns"):
        model.importances(images, y)


@pytest.mark.parametrize("column", ["size", "city", "day"])
def test_partial_dependence_is_that_of_sklearn(houses, column):
    model, X, _ = houses
    found = model.partial_dependence(X, column, grid=7)
    values = {column: found.grid}
    other = partial_dependence(model, X, [column], custom_values=values, kind="average")
    assert found.mean == pytest.approx(other["average"][0], abs=1e-6)
    assert (found.low < found.mean).all() and (found.mean < found.high).all()
    assert found.noise.shape == found.grid.shape
    if column == "size":
        same = partial_dependence(model, X, [column], grid_resolution=7)
        assert found.grid == pytest.approx(same["grid_values"][0])
    if column == "city":
        assert found.grid.tolist() == ["Bonn", "Jena", "Ulm"]
        assert found.mean[2] - found.mean[0] == pytest.approx(2, abs=0.7)


def test_partial_dependence_of_classes_and_given_values(labels):
    model, X, _ = labels
    found = model.partial_dependence(X, 1, grid=[-3.0, 0, 3])
    other = partial_dependence(model, X, [1], custom_values={1: np.array([-3.0, 0, 3])})
    assert found.column == "size" and found.mean == pytest.approx(other["average"][0], abs=1e-6)
    assert found.mean[0] < 0.2 and found.mean[2] > 0.8 and found.high.max() <= 1
    days = model.partial_dependence(X, "day", grid=["2020-03-01", "2020-05-01"])
    assert days.grid.tolist() == pd.to_datetime(["2020-03-01", "2020-05-01"]).tolist()


def test_a_column_that_is_not_there_is_named(houses):
    model, X, _ = houses
    with pytest.raises(DataError, match="'rooms'.*noise, size"):
        model.partial_dependence(X, "rooms")
    with pytest.raises(DataError, match="2 values or more"):
        model.partial_dependence(X, "size", grid=1)
    with pytest.raises(DataError, match="gaps only"):
        model.partial_dependence(X.assign(noise=np.nan), "noise")
