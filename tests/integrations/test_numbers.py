"""Numbers of a table as the networks take them: heavy tails, bins by quantiles, sines."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from small_runs import assert_one_sentence

import shoal
from shoal.core.errors import ConfigError
from shoal.integrations.sklearn import (
    NUMBERS,
    HeavyTails,
    InRange,
    PiecewiseLinear,
    preprocessing_for,
)
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

FEW = {"epochs": 3, "members": 2, "hidden": (8,), "random_state": 0, "early_stopping": False}
pytestmark = pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")


def literal_code(x, edges):
    """The encoding of one number, bin by bin, as the paper writes it."""
    code = []
    for left, right in zip(edges[:-1], edges[1:], strict=True):
        fraction = (x - left) / (right - left)
        if x < left:
            fraction = 0.0
        if x >= right:
            fraction = 1.0
        code.append(fraction)
    return code


def codes(column, at=None, weight=None):
    """Edges, and the bins of other numbers."""
    made = PiecewiseLinear().fit(column[:, None], sample_weight=weight)
    at = column if at is None else at
    return made.edges_[0], made.transform(at[:, None])[:, 1:]


def test_the_encoding_is_the_closed_form():
    column = np.random.default_rng(0).normal(size=500)
    at = np.concatenate([np.linspace(-9, 9, 301), column])
    edges, found = codes(column, at)
    assert len(edges) == 17
    np.testing.assert_allclose(found, [literal_code(x, edges) for x in at], atol=1e-13)
    shares = np.histogram(column, edges)[0] / len(column)
    assert np.abs(shares - 1 / 16).max() < 0.01


def test_the_encoding_is_monotone_and_can_be_turned_back():
    column = np.random.default_rng(1).gamma(1.0, size=200)
    at = np.linspace(-3, 12, 200)
    edges, found = codes(column, at)
    assert (np.diff(found, axis=0) >= 0).all()
    inside = at.clip(edges[0], edges[-1])
    np.testing.assert_allclose(edges[0] + found @ np.diff(edges), inside, atol=1e-12)


@pytest.mark.parametrize(
    "column, edges",
    [
        (np.full(9, 2.5), [0]),
        (np.array([0.0, 1.0, 1.0, 0.0]), [0]),
        (np.full(4, np.nan), [0]),
        (np.array([3.0, 1.0, 2.0, 2.0, np.nan]), [1, 2, 3]),
        (np.repeat(np.arange(17.0), 3), np.arange(17)),
        (np.array([0.0, 1.0, 1.0 + 1e-9, 2.0]), [0, 1, 2]),
        (
            np.concatenate([np.zeros(90), np.linspace(1, 2, 30)]),
            [0, *(1 + np.array([7, 14, 22, 29]) / 29)],
        ),
    ],
    ids=["constant", "two values", "empty", "gap", "few", "nearly equal", "equal quantiles"],
)
def test_a_column_of_few_values_has_few_bins(column, edges):
    found, bins = codes(column)
    np.testing.assert_allclose(found, edges)
    assert bins.shape == (len(column), len(edges) - 1)
    assert np.isfinite(bins).all()


def test_quantiles_count_weights_as_repetition():
    random = np.random.default_rng(2)
    column, weight = random.normal(size=60), random.integers(0, 5, 60)
    weighted, _ = codes(column[weight > 0], weight=weight[weight > 0])
    repeated, _ = codes(column.repeat(weight))
    np.testing.assert_array_equal(weighted, repeated)
    gap = np.append(column, np.nan)
    with_gap, bins = codes(gap, weight=np.append(np.ones(60), 7.0))
    np.testing.assert_array_equal(with_gap, codes(column)[0])
    np.testing.assert_array_equal(bins[-1], codes(column, np.zeros(1))[1][0])


def test_heavy_tails_become_logarithmic_and_others_stay():
    random = np.random.default_rng(3)
    normal, logs = random.normal(size=400), np.exp(1.5 * random.normal(size=400))
    rare = np.concatenate([np.zeros(350), np.exp(np.linspace(-5, 5, 50))])  # equal quartiles
    few = random.choice([1.0, 1.01, 1.02, 99.0], 400, p=[0.3, 0.35, 0.3, 0.05])
    X = np.stack([normal, logs, rare, few, np.full(400, 3.0), np.full(400, np.nan)], 1)
    X[5, 1] = np.nan
    tails = HeavyTails().fit(X)
    assert np.isfinite(tails.scale_).tolist() == [False, True, True, False, False, False]
    out = tails.transform(X)
    np.testing.assert_array_equal(out[:, [0, 3, 4, 5]], X[:, [0, 3, 4, 5]])
    known = logs[np.arange(400) != 5]
    median, (low, high) = np.sort(known)[199], np.sort(known)[[99, 299]]
    expected = np.arcsinh((logs - median) / ((high - low) / 1.349))
    np.testing.assert_allclose(np.delete(out[:, 1], 5), np.delete(expected, 5))
    np.testing.assert_allclose(tails.inverse_transform(out), X, atol=1e-12)
    order = np.argsort(rare)
    assert (np.diff(out[order, 2]) >= 0).all()
    scaled = 7 + 1e6 * X  # another unit changes nothing
    np.testing.assert_allclose(HeavyTails().fit_transform(scaled)[:, 1:3], out[:, 1:3], atol=1e-8)


def table(n=60):
    """Numbers with a heavy tail and gaps, texts, dates and a constant."""
    random = np.random.default_rng(0)
    columns = {
        "income": np.exp(2 * random.normal(size=n)),
        "age": random.integers(18, 90, n).astype(float),
        "city": random.choice(["Bonn", "Jena"], n),
        "since": pd.date_range("2020-01-01", periods=n, freq="31h"),
        "one": np.ones(n),
    }
    X = pd.DataFrame(columns)
    y = np.log(X["income"]) + 0.01 * X["age"]
    X.loc[::9, "age"], X.loc[4::9, "since"], X.loc[2::9, "city"] = np.nan, pd.NaT, None
    return X, y.to_numpy()


@pytest.mark.parametrize("numbers", NUMBERS)
def test_tables_with_texts_dates_and_gaps(numbers):
    X, y = table()
    model = EnsembleRegressor(**FEW, numbers=numbers).fit(X, y)
    assert model.get_params()["numbers"] == numbers == clone(model).get_params()["numbers"]
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.predict(X), model.predict(X))
    prepared = model.preprocessing_.transform(X)
    names = model._names(model.preprocessing_)
    assert prepared.shape == (60, len(names)) and np.isfinite(prepared).all()
    assert names[:3] == ("income", "age", "one")
    assert names.count("missingindicator_age") == 1
    assert ("age_bin9" in names) == (numbers == "piecewise")
    assert ("since_bin3" in names) == (numbers == "piecewise")
    labels = np.where(y > 0, "rich", "poor")
    assert EnsembleClassifier(**FEW, numbers=numbers).fit(X, labels).score(X, labels) > 0.3


def test_gaps_lie_at_the_mean_and_are_indicated_once():
    X = np.random.default_rng(0).normal(size=(80, 2))
    X[::8, 1] = np.nan
    made = preprocessing_for(X, "piecewise")
    out = made.fit_transform(X)
    assert out.shape == (80, 2 + 2 * 16 + 1)
    np.testing.assert_array_equal(out[:, -1], np.isnan(X[:, 1]))
    mean = np.array([[0.0, np.nanmean(X[:, 1])]])
    np.testing.assert_allclose(out[0, 18:34], made.transform(mean)[0, 18:34])


@pytest.mark.parametrize("numbers", ["robust", "piecewise"])
def test_weights_equal_repetition_to_the_bit(numbers):
    X, y = table(40)
    weight = np.random.default_rng(0).integers(0, 4, 40)
    rows = np.arange(40).repeat(weight)
    one = EnsembleRegressor(**FEW, numbers=numbers).fit(X.iloc[rows], y[rows])
    two = EnsembleRegressor(**FEW, numbers=numbers).fit(X, y, sample_weight=weight)
    np.testing.assert_array_equal(one.predict(X), two.predict(X))


def test_the_periodic_layer_is_its_equation():
    layer = shoal.models.PeriodicMLP(columns=2, frequencies=3, width=4).build((3,), 1)[1].double()
    x = torch.randn(5, 3, dtype=torch.float64)
    found = layer(x)
    assert torch.equal(found[:, :3], x)
    for j in range(2):
        angle = 2 * torch.pi * layer.frequency[j] * x[:, j, None]
        waves = torch.cat([angle.sin(), angle.cos()], 1)
        expected = (waves @ layer.weight[j] + layer.bias[j, 0]).relu()
        torch.testing.assert_close(found[:, 3 + 4 * j : 7 + 4 * j], expected)


def test_periodic_members_encode_the_numbers_alone(tmp_path):
    X, y = table()
    model = EnsembleRegressor(**FEW, numbers="periodic", out=tmp_path / "run").fit(X, y)
    assert model.run_.ensemble.builds[0].architecture.columns == 3
    loaded = shoal.load(tmp_path / "run")
    found = shoal.predict(loaded, model.dataset(X, y).test.x)
    np.testing.assert_allclose(found.mean.flatten(), model.predict(X), atol=1e-5)
    texts = EnsembleRegressor(**FEW, numbers="periodic").fit(X[["city"]], y)
    assert type(texts.run_.ensemble.builds[0].architecture) is shoal.models.MLP


def test_pickles_of_former_versions_load():
    X, y = table()
    model = EnsembleRegressor(**FEW, numbers="standard").fit(X, y)
    state = {k: v for k, v in model.__getstate__().items() if k not in ("numbers", "batches")}
    former = EnsembleRegressor.__new__(EnsembleRegressor)
    former.__setstate__(state)
    assert former.get_params() == model.get_params()
    np.testing.assert_array_equal(former.predict(X), model.predict(X))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"numbers": "quantile"}, "numbers must be one of"),
        ({"numbers": "robust", "preprocess": None}, "a part of preprocess='auto'"),
        ({"numbers": "periodic", "network": shoal.models.MLP()}, "leave out network"),
    ],
)
def test_unsuitable_values_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words) as error:
        EnsembleRegressor(**FEW, **settings).fit(np.eye(4), np.arange(4.0))
    assert_one_sentence(error.value)
    own = {"preprocess": None, "numbers": "standard"}  # as in pickles of former versions
    EnsembleRegressor(**FEW, **own).fit(np.eye(4), np.arange(4.0))


ODD = {
    "constant": lambda n: np.full(n, 7.0),
    "constant with gaps": lambda n: np.where(np.arange(n) % 3 == 0, np.nan, 0.1),
    "all gaps": lambda n: np.full(n, np.nan),
    "twice": lambda n: np.linspace(-1, 1, n),
    "again": lambda n: np.linspace(-1, 1, n),
    "two close values": lambda n: 1.0 + 1e-12 * (np.arange(n) % 2),
    "truth with gaps": lambda n: np.array([True, None, False, True] * n, dtype=object)[:n],
    "clustered": lambda n: np.concatenate([np.linspace(0, 1, n - 9), 5 + 1e-2 * np.arange(9)]),
}


@pytest.mark.parametrize("numbers", NUMBERS)
def test_odd_columns_and_numbers_far_away_give_finite_predictions(numbers):
    X = pd.DataFrame({name: make(60) for name, make in ODD.items()})
    settings = FEW | {"epochs": 10, "likelihood": "heteroscedastic"}
    model = EnsembleRegressor(**settings, numbers=numbers).fit(X, X["twice"])
    seen = model.predict(X)
    assert np.isfinite(seen).all() and np.isfinite(model._prepared(X)).all()
    changed = X.assign(**{"constant": -1e9, "all gaps": 3.0})  # training says nothing about them
    np.testing.assert_array_equal(model.predict(changed), seen)
    far = pd.concat([X.assign(**{name: at}) for name in X for at in (1e30, -1e30, 1e300)])
    mean, std = model.predict(far, return_std=True)
    low, high = model.predict_interval(far, level=0.999)
    assert np.isfinite([mean, std, low, high]).all()
    assert np.abs(model._prepared(far)).max() < 100


def test_the_range_of_a_column_is_widened_by_its_width():
    column = np.array([-1.0, 0.0, 3.0, np.nan])[:, None]
    made = InRange().fit(column)
    at = np.array([-9.0, -5.0, -4.0, 2.0, 7.0, 8.0, np.nan])
    np.testing.assert_array_equal(made.transform(at[:, None])[:, 0], [-5, -5, -4, 2, 7, 7, np.nan])
