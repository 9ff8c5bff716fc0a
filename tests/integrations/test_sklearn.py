"""Ensembles in scikit-learn: tables, targets, weights, model selection, pickles, and the run."""

import copy
import importlib
import pickle
import re
import sys
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_digits, make_classification
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

FEW = {"epochs": 30, "members": 3, "hidden": (16,), "random_state": 0, "early_stopping": False}
pytestmark = pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")


def table(n=120, seed=0):
    """A table with texts, gaps of every kind, nullable and constant columns, and its targets."""
    random = np.random.default_rng(seed)
    rooms = random.integers(1, 6, n).astype(float)
    city = random.choice(["Bonn", "Jena", "Ulm"], n).astype(object)
    price = 50_000 * rooms + 80_000.0 * (city == "Bonn") + 10_000 * random.normal(size=n)
    rooms[::7], city[::11] = np.nan, None
    columns = {
        "rooms": rooms,
        "city": city,
        "garden": pd.array(random.choice([True, False], n), dtype="boolean"),
        "kind": pd.Categorical(random.choice(["flat", "house"], n)),
        "floor": pd.array(np.where(np.arange(n) % 5 == 0, None, 2), dtype="Int64"),
        "empty": np.full(n, np.nan),
    }
    return pd.DataFrame(columns), pd.Series(price, name="price")


@pytest.fixture(scope="module")
def houses():
    X, y = table()
    model = EnsembleRegressor(**FEW | {"epochs": 150}).fit(X, y)
    return model, *table(60, seed=1)


def test_a_table_with_texts_and_gaps_needs_no_preparation(houses):
    model, X, y = houses
    assert list(model.feature_names_in_) == list(X.columns)
    assert model.score(X, y) > 0.5
    X = X.assign(city="Rom")  # a city that training did not have
    assert np.isfinite(model.predict(X)).all()


def test_the_kind_of_a_column_is_that_of_its_values():
    columns = {
        "numbers": pd.Series([1, None, 2.5] * 10, dtype=object),
        "nothing": pd.Series([None] * 30, dtype=object),
        "texts": pd.Series(["a", pd.NA, "b"] * 10, dtype="string"),
        "classes": pd.Series(pd.Categorical([3, 1, None] * 10)),
    }
    model = EnsembleRegressor(**FEW | {"epochs": 1}).fit(pd.DataFrame(columns), np.arange(30.0))
    names = {name: parts for name, _, parts in model.preprocessing_.transformers_}
    assert names["numbers"] == [0, 1] and names["categories"] == [2, 3]
    gaps = model.preprocessing_.transform(pd.DataFrame(columns))[1]
    # the standardised numbers, their gaps, and one place for each of "a", "b", gap; 1, 3, gap
    assert gaps.tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]


def test_dates_are_days_and_places_on_circles():
    days = pd.date_range("2020-01-01", "2022-12-31", freq="D")  # 2020-01-06 is a Monday
    local = (days + pd.Timedelta(hours=1)).tz_localize("Europe/Berlin", ambiguous=True)
    X = pd.DataFrame({"sold": days, "seen": days.date, "local": local, "took": days - days[0]})
    X.loc[3, ["sold", "seen"]] = None
    season = np.sin(np.arange(len(days)) * 2 * np.pi / 365.25)
    y = 2.0 * days.strftime("%w").isin(["0", "6"]) + season
    model = EnsembleRegressor(**FEW | {"epochs": 40}).fit(X, y)
    assert model.score(X, y) > 0.9  # weekends and seasons are learned
    parts = model.preprocessing_.named_transformers_["dates"].named_steps["dateparts"]
    # a winter's hour of Berlin is another hour of UTC than a summer's, so the day varies
    assert parts.periods_ == [("week", "year"), ("week", "year"), ("day", "week", "year")]
    names = list(model.preprocessing_.get_feature_names_out())
    assert "dates__sold_week_sin" in names and "numbers__took" in names
    gap = dict(zip(names, model.preprocessing_.transform(X)[3], strict=True))
    assert gap["dates__sold"] == 0 and gap["dates__missingindicator_sold"] == 1
    with pytest.raises(DataError, match="'sold' must hold dates, not int64; type"):
        model.predict(X.assign(sold=1))
    assert np.isfinite(model.predict(X.assign(sold=pd.NaT))).all()


def test_intervals_have_the_units_of_the_targets(houses):
    model, X, y = houses
    low, high = model.predict_interval(X, level=0.8)
    assert low.shape == high.shape == (60,) and ((low <= y) & (y <= high)).mean() > 0.5
    pred = model.predictive(X)
    mean, std = model.predict(X, return_std=True)
    assert np.array_equal(std, model.predict_std(X))
    assert np.allclose(mean, pred.mean) and np.allclose(std, pred.stddev)
    quantiles = model.predict_quantile(X, [0.1, 0.9])
    assert np.allclose(quantiles, np.stack([low, high], -1))
    assert np.array_equal(model.predict_quantile(X, 0.9), quantiles[:, 1])


def test_the_run_has_a_page_an_evidence_and_a_landscape(houses, tmp_path):
    model, X, y = houses
    data = model.dataset(X, y, train=table())
    path = shoal.report(model.run_, tmp_path / "page.html", data=data)
    assert "RMSE" in path.read_text()
    rmse = np.sqrt(np.mean((model.predict(X) - y) ** 2))
    scores = shoal.evaluate(model.run_, data).scores["test"]
    assert scores["rmse"] == pytest.approx(rmse, rel=1e-5)
    found = shoal.evidence(model.run_, data, priors=False, points=50)
    assert np.isfinite(found.log_evidence).all()
    assert shoal.landscape(model.run_, data, parts=["line"], quick=True)["line"].scores


def test_the_documented_way_from_a_table_to_a_page(tmp_path, monkeypatch):
    text = (Path(__file__).parents[2] / "docs" / "sklearn.md").read_text()
    first, conformal, second, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    X, y = table(200)
    X.assign(price=y).to_csv("houses.csv", index=False)
    names = {}
    exec(first, names)
    assert "90 %" in Path("page.html").read_text()
    names |= {"X_val": names["X_test"], "y_val": names["y_test"].to_numpy()}
    exec(second, names)
    assert len(names["low"]) == len(names["y_test"])
    names["labels"] = np.where(names["y_train"] > names["y_train"].median(), "high", "low")
    exec(conformal.replace("=True)", "=True, preset='fast', epochs=3)"), names)
    assert names["inside"].shape == (len(names["low"]), 2)


def test_conformal_intervals_take_the_prediction(houses):
    model, X, y = houses
    rule = shoal.decisions.conformal_intervals(model.predictive(X), y.to_numpy(), level=0.9)
    low, high = rule(model.predictive(X))
    assert ((low.numpy() <= y) & (y <= high.numpy())).mean() >= 0.9


def test_class_names_reach_the_evaluation():
    X, y = make_classification(60, random_state=0)
    names = np.array(["no", "yes"])[y]
    model = EnsembleClassifier(**FEW).fit(X, names)
    assert model.dataset(X, names).classes == ("no", "yes")
    assert list(model.classes_) == ["no", "yes"] and set(model.predict(X)) <= {"no", "yes"}
    assert np.allclose(model.predict_proba(X).sum(1), 1)
    assert np.array_equal(model.decision_function(X) > 0, model.predict(X) == "yes")
    with pytest.raises(DataError, match="no class of the training data"):
        model.dataset(X, np.full(len(X), "perhaps"))


def test_several_labels_at_once_are_independent_columns():
    random = np.random.default_rng(0)
    X = random.normal(size=(150, 4))
    y = (X[:, :3] > 0).astype(int)
    model = EnsembleClassifier(**FEW | {"epochs": 100}).fit(X, y)
    assert model.predict_proba(X).shape == (150, 3)
    assert (model.predict(X) == y).mean() > 0.9 and model.score(X, y) > 0.8
    assert shoal.evaluate(model.run_, model.dataset(X, y)).scores["test"]["accuracy"] > 0.9


def test_several_target_columns_keep_their_units():
    random = np.random.default_rng(0)
    X = random.normal(size=(100, 3))
    y = np.stack([X[:, 0], 1000 + 500 * X[:, 1]], 1)
    model = EnsembleRegressor(**FEW | {"epochs": 150}).fit(X, y)
    low, high = model.predict_interval(X)
    assert model.predict(X).shape == low.shape == high.shape == (100, 2)
    assert model.score(X, y) > 0.8


def test_another_unit_of_the_targets_changes_nothing_else():
    X, y = np.random.default_rng(0).normal(size=(2, 40, 2))
    model, other = (EnsembleRegressor(**FEW | {"epochs": 5}) for _ in range(2))
    plain = model.fit(X, y[:, 0]).predict(X)
    assert np.allclose(other.fit(X, 7 + 1e6 * y[:, 0]).predict(X), 7 + 1e6 * plain)


@pytest.mark.parametrize("batch_size", ["auto", 8])
@pytest.mark.parametrize("gaps", [False, True])
def test_weights_equal_repetition_to_the_bit(batch_size, gaps):
    X, y = table(40)
    X = X if gaps else X[["rooms"]].fillna(0).to_numpy()
    weight = np.random.default_rng(0).integers(0, 4, 40)
    rows = np.random.default_rng(1).permutation(np.arange(40).repeat(weight))
    repeated = X.iloc[rows] if gaps else X[rows]
    settings = FEW | {"batch_size": batch_size, "likelihood": "heteroscedastic"}
    one = EnsembleRegressor(**settings).fit(repeated, y.iloc[rows])
    two = EnsembleRegressor(**settings).fit(X, y, sample_weight=weight)
    assert np.array_equal(one.predict(X), two.predict(X))


def test_a_table_of_numbers_equals_an_array_to_the_bit():
    X, y = noisy(120)
    X[::9, 1] = np.nan
    settings = FEW | {"epochs": 3, "early_stopping": "auto", "batch_size": 16}
    array, frame = (EnsembleRegressor(**settings) for _ in range(2))
    named = pd.DataFrame(X, columns=list("abcde"))
    assert np.array_equal(array.fit(X, y).predict(X), frame.fit(named, y).predict(named))


def test_balanced_classes_count_alike():
    X, y = make_classification(60, weights=[0.8], random_state=0)
    weight = len(y) / (2 * np.bincount(y))[y]
    by_hand = EnsembleClassifier(**FEW).fit(X, y, sample_weight=weight)
    for class_weight in ("balanced", {0: weight[y == 0][0], 1: weight[y == 1][0]}):
        model = EnsembleClassifier(**FEW, class_weight=class_weight).fit(X, y)
        assert np.allclose(model.predict_proba(X), by_hand.predict_proba(X))
    with pytest.raises(ConfigError, match="class_weight"):
        EnsembleClassifier(**FEW, class_weight="balance").fit(X, y)


@pytest.mark.parametrize("kind", [EnsembleClassifier, EnsembleRegressor])
def test_members_may_have_batches_of_their_own(kind):
    X = np.random.default_rng(0).normal(size=(50, 2))
    y = (X[:, 0] > 0).astype(int) if kind is EnsembleClassifier else X[:, 0]
    few = FEW | {"epochs": 2, "batch_size": 8, "folds": None}
    own = kind(**few, batches="own").fit(X, y)
    assert own.run_.config["batches"] == "own"
    predict = "predict_proba" if kind is EnsembleClassifier else "predict"
    by_option, common = (
        getattr(kind(**few, options=options).fit(X, y), predict)(X)
        for options in ({"batches": "own"}, None)
    )
    np.testing.assert_array_equal(getattr(own, predict)(X), by_option)
    assert not np.allclose(by_option, common)


def noisy(n=150):
    random = np.random.default_rng(0)
    X = random.normal(size=(n, 5))
    return X, X[:, 0] + random.normal(size=n)


def test_early_stopping_keeps_the_best_epoch():
    settings = FEW | {"epochs": 200, "hidden": (64, 64), "early_stopping": "auto", "folds": None}
    X, y = noisy()
    model = EnsembleRegressor(**settings, n_iter_no_change=5).fit(X, y)
    history = [row["validation"]["nll"] for row in model.run_.history]
    assert model.run_.best_epoch == 1 + int(np.argmin(history))
    assert model.n_iter_ == len(history) == model.run_.best_epoch + 5 < 200
    assert 0.6 < float(model.predictive(X).stddev.mean()) < 1.4


@pytest.mark.parametrize("rare, stops", [(9, False), (10, True)])
def test_rare_classes_are_not_held_out_by_default(rare, stops):
    X, y = np.random.default_rng(0).normal(size=(100, 2)), np.arange(100) < rare
    model = EnsembleClassifier(**FEW | {"epochs": 1, "early_stopping": "auto"}).fit(X, y)
    assert ("validation" in model.run_.history[0]) == stops
    with pytest.raises(ConfigError, match="early_stopping"):
        clone(model).set_params(early_stopping="yes").fit(X, y)


def test_validation_data_have_every_class_and_no_part_in_the_preprocessing():
    X, y = make_classification(100, weights=[0.9], random_state=0)
    change = {"epochs": 2, "early_stopping": True, "folds": None, "numbers": "standard"}
    model = EnsembleClassifier(**FEW | change)
    model.fit(X, y, sample_weight=np.full(100, 2.0))
    scaler = model.preprocessing_.named_transformers_["numbers"][1]
    assert scaler.n_samples_seen_ == 180 and model.run_.history[0]["validation"]["nll"] > 0
    with pytest.raises(ValueError, match="The test_size = 1"):
        clone(model).set_params(validation_fraction=0.01).fit(X, y)


@pytest.mark.nightly
def test_model_selection_in_parallel_processes():
    X, y = make_classification(80, random_state=0)
    model = make_pipeline(MinMaxScaler(), EnsembleClassifier(**FEW | {"epochs": 5}))
    alone = cross_val_score(model, X, y, cv=2)
    grid = {"ensembleclassifier__hidden": [(16,), (8,)]}
    search = GridSearchCV(model, grid, cv=2, n_jobs=2).fit(X, y)
    assert search.best_score_ >= alone.mean()
    assert search.best_estimator_.predict(X).shape == y.shape


def test_fits_in_threads_do_not_disturb_each_other():
    X, y = noisy(40)

    def predicted(seed):
        model = EnsembleRegressor(**FEW | {"random_state": seed, "epochs": 5})
        return model.fit(X, y).predict(X)

    work = (joblib.delayed(predicted)(seed) for seed in range(3))
    together = joblib.Parallel(n_jobs=3, backend="threading")(work)
    assert all(np.array_equal(predicted(seed), together[seed]) for seed in range(3))


@pytest.mark.parametrize("likelihood", ["student-t", "poisson", {"name": "gaussian"}])
def test_other_likelihoods_of_numbers(likelihood):
    X, _ = noisy(40)
    y = np.random.default_rng(0).poisson(3, 40)
    model = EnsembleRegressor(**FEW, likelihood=likelihood).fit(X, y)
    low, high = model.predict_interval(X)
    assert (low <= high).all() and abs(model.predict(X).mean() - y.mean()) < 1


def test_copies_predict_the_same(tmp_path, houses):
    model, X, _ = houses
    expected = model.predict(X)
    joblib.dump(model, tmp_path / "model.joblib")
    copies = [
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
        joblib.load(tmp_path / "model.joblib"),
    ]
    assert all(np.array_equal(each.predict(X), expected) for each in copies)
    assert clone(model).get_params() == model.get_params()
    assert not hasattr(clone(model), "run_")


def test_random_states():
    X, y = make_classification(40, random_state=0)

    def fitted(state):
        model = EnsembleClassifier(**FEW | {"random_state": state, "epochs": 2})
        return model.fit(X, y).predict_proba(X)

    state = np.random.RandomState(3)
    assert np.array_equal(fitted(np.random.RandomState(3)), fitted(state))
    assert not np.array_equal(fitted(state), fitted(state))
    assert not np.array_equal(fitted(None), fitted(None))


def test_tables_as_output_of_transformers_change_nothing(houses):
    model, X, _ = houses
    with config_context(transform_output="pandas"):
        assert np.array_equal(model.predict(X), clone(model).fit(*table()).predict(X))


def convolution(input_shape, outputs):
    channels, *_ = input_shape
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(4 * 36, outputs),
    )  # fmt: skip


def test_networks_of_ones_own_take_images():
    X, y = load_digits(n_class=3, return_X_y=True)
    X = X[:150].reshape(-1, 1, 8, 8) / 16
    for own in (convolution, shoal.models.SmallCNN(channels=(8, 8))):
        model = EnsembleClassifier(**FEW, network=own, preprocess=None).fit(X, y[:150])
        assert model.score(X, y[:150]) > 0.9
        assert np.array_equal(pickle.loads(pickle.dumps(model)).predict(X), model.predict(X))


def test_a_run_in_a_folder_can_be_loaded(tmp_path):
    X, y = make_classification(40, random_state=0)
    model = EnsembleClassifier(**FEW, out=tmp_path / "run").fit(X, y)
    test = model.dataset(X, y).test
    loaded = shoal.predict(shoal.load(tmp_path / "run"), test.x)
    assert np.allclose(loaded.probs, model.predict_proba(X))
    with pytest.raises(ConfigError, match="already holds a run"):
        model.fit(X, y)


def test_unsuitable_tables_are_refused_by_the_name_of_the_column(houses):
    model, X, y = houses
    with pytest.raises(DataError, match="'rooms' must hold numbers, but it holds dates"):
        model.predict(X.assign(rooms=pd.Timestamp("2020-01-01")))
    with pytest.raises(DataError, match="'rooms' must hold numbers"):
        model.predict(X.assign(rooms="three"))
    with pytest.raises(DataError, match="'rooms' holds infinity"):
        model.predict(X.assign(rooms=np.inf))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(X.rename(columns={"rooms": "chambers"}))
    with pytest.raises(ValueError, match="NaN"):
        EnsembleRegressor(**FEW, preprocess=None).fit([[np.nan], [1.0]], [1.0, 2.0])
    with pytest.raises(DataError, match="more than two classes"):
        EnsembleClassifier(**FEW).fit([[0.0], [1.0], [2.0]], [[0, 1], [1, 2], [2, 0]])


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "shoal.sklearn")
    with pytest.raises(ConfigError, match=r"shoal\[sklearn\]"):
        importlib.import_module("shoal.sklearn")
