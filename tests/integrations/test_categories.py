"""Columns of many categories: embeddings that members learn, hashed words, names left out."""

import pickle
from copy import deepcopy
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder
from small_runs import assert_one_sentence
from torch.nn import functional as F

import shoal
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.integrations.sklearn import CategoryCodes, preprocessing_for
from shoal.integrations.sklearn.columns import as_numbers, as_seconds, input_kind
from shoal.models import MLP, TableMLP
from shoal.models.table import Embedded
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

FEW = {"epochs": 3, "members": 2, "hidden": (8,), "random_state": 0, "early_stopping": False}
pytestmark = pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")


def coded(column, weight=None):
    """The fitted codes of one column, and the places of its values."""
    X = np.asarray(column, dtype=object)[:, None]
    made = CategoryCodes().fit(X, sample_weight=weight)
    n = len(made.categories_[0]) + 1
    return made.categories_[0].tolist(), (made.transform(X)[:, 0] * n).astype(int).tolist()


def test_rare_and_unknown_categories_share_the_first_code():
    known, places = coded([*"bbbaaaa", np.nan, np.nan, np.nan, "c", "c", "d"])
    assert known[:2] == ["a", "b"] and np.isnan(known[2])
    assert places == [2, 2, 2, 1, 1, 1, 1, 3, 3, 3, 0, 0, 0]
    assert coded([*"aab"], np.array([1.0, 2.0, 2.0]))[0] == ["a"]
    assert coded([*"aaabbb"], np.full(6, 1e-3))[0] == ["a", "b"]  # small weights change nothing
    assert coded([1, "1", 1, "1", 1, "1"])[0] == [1, "1"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_codes_find_their_embedding_in_every_precision(dtype):
    n = 100_003
    made = Embedded((n,)).to(dtype)
    made.tables[0].weight.data[:, 0] = torch.arange(n)
    x = torch.from_numpy((np.arange(n) + 0.5) / n).to(dtype)
    assert torch.equal(made(x[:, None])[:, 0], torch.arange(n).to(dtype))
    far = torch.tensor([[-3.0], [1.0], [9.0]], dtype=dtype)  # points moved by a method
    assert made(far)[:, 0].tolist() == [0, n - 1, n - 1]


def test_half_precision_refuses_codes_that_it_cannot_hold():
    with pytest.raises(ConfigError, match="cannot number the 900 categories") as error:
        Embedded((900,)).bfloat16()(torch.rand(3, 1).bfloat16())
    assert_one_sentence(error.value)
    Embedded((40,)).bfloat16()(torch.rand(3, 1).bfloat16())


@pytest.mark.parametrize("batches", ["common", "own"])
def test_members_train_as_networks_in_a_loop(batches):
    """Full batches of gradient descent on (NLL - log prior) / N, written out in torch."""
    torch.manual_seed(0)
    n, rate, std = 60, 0.3, 0.5
    codes = (torch.randint(0, 40, (n, 1)) + 0.5) / 40
    x = torch.cat([torch.randn(n, 2), codes, (torch.randint(0, 3, (n, 1)) + 0.5) / 3], 1).double()
    y = torch.randint(0, 3, (n,))
    table = TableMLP(hidden=(7,), columns=1, activation="tanh", embeddings=(40, 3))
    networks = [table.build((4,), 3).double() for _ in range(3)]
    ensemble = shoal.Ensemble.of(deepcopy(networks))
    options = {"optimizer": "sgd", "lr": rate, "batch_size": n, "epochs": 4, "batches": batches}
    prior = shoal.priors.Gaussian(std)
    run = shoal.fit(ensemble, (x, y), prior=prior, precision="float64", progress=False, **options)
    for i, network in enumerate(networks):
        for _ in range(4):
            prior_term = sum(p.square().sum() for p in network.parameters()) / (2 * std**2 * n)
            gradients = torch.autograd.grad(
                F.cross_entropy(network(x), y) + prior_term, list(network.parameters())
            )
            with torch.no_grad():
                for parameter, gradient in zip(network.parameters(), gradients, strict=True):
                    parameter -= rate * gradient
        torch.testing.assert_close(run.ensemble.member(i)(x), network(x))


def shops(n=400, cities=60, seed=0):
    """A number, many cities and a few kinds; the target is an effect of the city."""
    random = np.random.default_rng(seed)
    effect = np.random.default_rng(1).normal(size=cities)
    city = random.integers(0, cities, n)
    X = pd.DataFrame({
        "size": random.normal(size=n),
        "city": np.array([f"city {i:03d}" for i in range(cities)], dtype=object)[city],
        "kind": random.choice(["new", "old"], n),
    })  # fmt: skip
    return X, effect[city] + 0.1 * random.normal(size=n)


def test_many_categories_are_learned_without_a_column_for_each(tmp_path):
    X, y = shops(1200)
    model = EnsembleRegressor(
        members=2,
        hidden=(16,),
        epochs=40,
        numbers="standard",
        random_state=0,
        out=tmp_path / "run",
    ).fit(X, y)
    other, truth = shops(300, seed=2)
    assert np.mean((model.predict(other) - truth) ** 2) < 0.3 * np.var(truth)
    network = model.run_.ensemble.builds[0].architecture
    assert network == TableMLP(hidden=(16,), dropout=network.dropout, embeddings=(61,))
    assert model._prepared(other).shape == (300, 4)
    assert model._names(model.preprocessing_) == ("size", "kind_new", "kind_old", "city")
    other.loc[0, "city"], other.loc[1, "city"] = "Rom", None
    np.testing.assert_array_equal(model._prepared(other)[:2, 3], 0.5 / 61)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.predict(other), model.predict(other))
    found = shoal.predict(shoal.load(tmp_path / "run"), model._prepared(other))
    np.testing.assert_allclose(found.mean.flatten(), model.predict(other), atol=1e-5)


def test_ten_thousand_categories_take_one_input():
    random = np.random.default_rng(0)
    X = pd.DataFrame({"item": random.integers(0, 10_000, 40_000).astype(str)})
    made = preprocessing_for(X)
    assert made.fit_transform(X).shape == (40_000, 1)
    few = X.iloc[:3000]["item"].astype(int) % 32
    assert (
        preprocessing_for(few.astype(str).to_frame()).fit_transform(few.to_frame()).shape[1] == 32
    )


@pytest.mark.parametrize("kind", [EnsembleClassifier, EnsembleRegressor])
def test_folds_and_own_batches(kind):
    X, y = shops(120, cities=35)
    y = y if kind is EnsembleRegressor else y > 0
    model = kind(**FEW, batches="own", options={"folds": 2}).fit(X, y)
    assert np.isfinite(model.score(X, y))
    assert model.run_.ensemble.builds[0].architecture.embeddings


def test_weights_equal_repetition_to_the_bit():
    X, y = shops(150, cities=60)
    weight = np.random.default_rng(0).integers(0, 4, 150)
    rows = np.arange(150).repeat(weight)
    one = EnsembleRegressor(**FEW).fit(X.iloc[rows], y[rows])
    two = EnsembleRegressor(**FEW).fit(X, y, sample_weight=weight)
    assert one.run_.ensemble.builds[0].architecture.embeddings
    np.testing.assert_array_equal(one.predict(X), two.predict(X))


@pytest.mark.parametrize("method", ["kde", "forde"])
def test_repulsive_methods_take_them(method):
    X, y = shops(120, cities=35)
    model = EnsembleRegressor(**FEW, method=method, numbers="periodic").fit(X, y)
    assert np.isfinite(model.predict(X)).all()


def test_a_network_of_ones_own_gets_columns_of_zeros_and_ones():
    X, y = shops(120, cities=35)
    model = EnsembleRegressor(**FEW, network=MLP(hidden=(8,)), numbers="standard").fit(X, y)
    assert isinstance(model.preprocessing_.named_transformers_["categories"][-1], OneHotEncoder)
    assert model._prepared(X).shape[1] == 1 + X["city"].nunique() + 2


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"width": 0}, "at least 1"),
        ({"scale": 0.0}, "a scale above 0"),
        ({"columns": 4}, "encodes 4 numbers and 0 categories, but there are 3 inputs"),
        ({"columns": 2, "embeddings": (5, 5)}, "encodes 2 numbers and 2 categories"),
        ({"embeddings": (5, 0)}, "at least 1"),
    ],
)
def test_unsuitable_table_networks_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words) as error:
        TableMLP(**settings).build((3,), 1)
    assert_one_sentence(error.value)


def kinds(n=120):
    """A table with a column of every kind of texts, and the kind of each."""
    random = np.random.default_rng(0)
    nouns = np.array(["house", "garden", "river", "street", "school", "tower"])
    review = [" ".join([*random.choice(nouns, 5), f"number{i}"]) for i in range(n)]
    columns = {
        "kind": ("categories", random.choice(["new", "old"], n).tolist()),
        "city": ("codes", [f"city {i % 37}" for i in range(n)]),
        "review": ("words", [None if i % 10 == 0 else text for i, text in enumerate(review)]),
        "ticket": ("left out", [f"A{i}" if i > 6 else "A6" for i in range(n)]),
        "cabin": (
            "codes",
            [None if i % 2 else f"C{i}" for i in range(n)],
        ),  # the gaps say something
        "family": ("codes", [f"F{max(i, 20)}" for i in range(n)]),
        "mixed": ("left out", [i if i % 2 else f"{i}" for i in range(n)]),
    }
    return pd.DataFrame({k: v for k, (_, v) in columns.items()}), {
        k: kind for k, (kind, _) in columns.items()
    }


def test_texts_that_differ_are_words_or_left_out():
    X, expected = kinds()
    assert {name: input_kind(X[name]) for name in X} == expected
    weight = np.full(len(X), 3.0)  # every data point three times: no value is rare
    repeated = {k: input_kind(X[k], weight) for k in X}
    assert repeated == {k: "categories" if k == "kind" else "codes" for k in X}
    assert {name: input_kind(X[name], weight / 100) for name in X} == expected


def test_hashed_words_and_left_out_columns_are_said_and_predict(tmp_path):
    X, _ = kinds()
    y = X["review"].str.count("river").fillna(0.0).to_numpy()
    model = EnsembleRegressor(**FEW, out=tmp_path / "run")
    with pytest.warns(ShoalWarning) as caught:
        model.fit(X, y)
    said = [str(each.message) for each in caught]
    (words,) = [text for text in said if "words of column 'review' are hashed" in text]
    (left_out,) = [text for text in said if "lack columns 'ticket', 'mixed'" in text]
    for sentence in (words, left_out):
        assert sentence in shoal.load(tmp_path / "run").warnings
    names = model._names(model.preprocessing_)
    assert "review_word63" in names and not any("ticket" in name for name in names)
    prepared = model._prepared(X)
    at = [i for i, name in enumerate(names) if "review" in name]
    length = np.linalg.norm(prepared[:, at], axis=1)
    np.testing.assert_allclose(length, X["review"].notna(), atol=1e-12)
    copy, other = pickle.loads(pickle.dumps(model)), X.assign(ticket="new", mixed=None)
    np.testing.assert_array_equal(copy.predict(other), model.predict(X))
    other["review"] = "garden garden"
    assert np.std(model.predict(other) - model.predict(X)) > 0
    with pytest.raises(ConfigError, match="words of column 'review'") as error:
        shoal.export(model, tmp_path / "model.onnx")
    assert_one_sentence(error.value)


def test_a_table_of_names_alone_is_refused():
    X, _ = kinds()
    with pytest.raises(DataError, match="columns 'ticket', 'mixed'") as error:
        EnsembleRegressor(**FEW).fit(X[["ticket", "mixed"]], np.arange(120.0))
    assert_one_sentence(error.value)


def test_decimals_and_periods_are_numbers_and_dates():
    prices = pd.DataFrame({"price": [Decimal("1.50"), None, Decimal("-2")]})
    assert input_kind(prices["price"]) == "numbers"
    np.testing.assert_array_equal(as_numbers(prices)[:, 0], [1.5, np.nan, -2.0])
    months = pd.DataFrame({"month": pd.period_range("1970-01", periods=3, freq="M")})
    months.loc[1, "month"] = pd.NaT
    assert input_kind(months["month"]) == "dates"
    np.testing.assert_array_equal(as_seconds(months)[:, 0], [0, np.nan, 59 * 86_400])


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%SZ"])
def test_texts_in_the_form_of_dates_are_dates(form):
    days = pd.date_range("2020-01-01", periods=50, freq="27D").to_series()
    days.iloc[3] = pd.NaT
    texts = pd.DataFrame({"day": days.dt.strftime(form)})
    assert input_kind(texts["day"]) == "dates"
    expected = as_seconds(pd.DataFrame({"day": days}))
    np.testing.assert_array_equal(as_seconds(texts), expected)
    assert input_kind(pd.Series([None] * 9, dtype="string")) == "categories"
    for other in ("", "2020-13-01", "01/02/2020", "2020", "soon"):
        mixed = texts["day"].where(texts.index > texts.index[0], other)
        assert input_kind(mixed) == "left out", other
    model = EnsembleRegressor(**FEW).fit(texts, np.arange(50.0))
    same = EnsembleRegressor(**FEW).fit(pd.DataFrame({"day": days}), np.arange(50.0))
    np.testing.assert_array_equal(model.predict(texts), same.predict(pd.DataFrame({"day": days})))
    with pytest.raises(DataError, match="'day' must hold dates"):
        model.predict(pd.DataFrame({"day": ["soon"]}))


@pytest.mark.parametrize("dtype", ["string", "category", object])
def test_gaps_of_every_type_of_column_are_one_category(dtype):
    X, y = shops(200, cities=40)
    X["city"] = X["city"].where(X.index % 5 > 0).astype(dtype)
    model = EnsembleRegressor(**FEW).fit(X, y)
    codes = model._prepared(X)[:, -1]
    assert len(np.unique(codes[::5])) == 1 and codes[0] == codes.max()  # the gap is the last one


@pytest.mark.parametrize(
    "values, words",
    [([[1], [2]], "holds lists"), ([(1,), (2,)], "holds lists"), ([1j, 2j], "complex numbers")],
)
def test_values_that_are_no_column_are_refused(values, words):
    with pytest.raises(DataError, match=f"'odd' .*{words}") as error:
        EnsembleRegressor(**FEW).fit(pd.DataFrame({"odd": values * 10}), np.arange(20.0))
    assert_one_sentence(error.value)
