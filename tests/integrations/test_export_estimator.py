"""Estimators as one ONNX file: raw columns in, the estimator's predictions out, without Shoal."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.preprocessing import MinMaxScaler
from small_runs import assert_one_sentence

import shoal
from shoal.core.errors import ConfigError
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

for needed in ("onnx", "onnxscript"):
    pytest.importorskip(needed)
onnxruntime = pytest.importorskip("onnxruntime")

FEW = {"epochs": 3, "members": 2, "hidden": (8,), "random_state": 0, "early_stopping": False}
pytestmark = pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")

ALONE = """
import json, sys
sys.modules.update(dict.fromkeys(["shoal", "torch", "sklearn", "pandas"]))  # importing them fails
import numpy as np, onnxruntime
folder = sys.argv[1]
columns = dict(np.load(f"{folder}/columns.npz"))
for file in ("regressor", "classifier"):
    session = onnxruntime.InferenceSession(
        f"{folder}/{file}.onnx", providers=["CPUExecutionProvider"]
    )
    about = json.loads(session.get_modelmeta().custom_metadata_map["shoal"])
    feeds = {}
    for each in about["inputs"]:
        if "column" in each:
            column = columns[each["column"]]
            feeds[each["name"]] = column.astype(object) if column.dtype.kind == "U" else column
    names = [each["name"] for each in about["outputs"]]
    outputs = dict(zip(names, session.run(names, feeds)))
    if file == "regressor":
        feeds["level"] = np.array(0.999)
        outputs["wide"] = session.run(["high"], feeds)[0]
    outputs = {k: v.astype(str) if v.dtype == object else v for k, v in outputs.items()}
    np.savez(f"{folder}/{file}.npz", **outputs)
"""


def table(n, seed):
    """Numbers, texts, categories of numbers and dates, each with gaps; odd names of columns."""
    random = np.random.default_rng(seed)
    columns = {
        "mean": 5 + 3 * random.normal(size=n),  # also the name of an output
        "city (€)": random.choice(["Bonn", "Jena", "", "None"], n).astype(object),
        "sold": pd.date_range("2019-01-01", periods=n, freq="207h"),
        "kind": pd.Categorical(random.integers(0, 3, n)),
        "garden": pd.array(random.choice([True, False], n), dtype="boolean"),
        "empty": np.full(n, np.nan),
        "took": pd.to_timedelta(random.integers(0, 99, n), "h"),
    }
    X = pd.DataFrame(columns)
    y = 1e6 + 2e5 * X["mean"] + 3e5 * (X["city (€)"] == "Bonn") + 100 * random.normal(size=n)
    X.loc[::7, "mean"], X.loc[1::5, "garden"], X.loc[3::11, "sold"] = np.nan, pd.NA, pd.NaT
    X.loc[2::9, "took"] = pd.NaT
    return X, y.to_numpy()


def as_columns(X):
    """The columns as a file takes them, by pandas alone."""
    texts = X["city (€)"].fillna("nan").astype(str)
    return {
        "mean": X["mean"].to_numpy("float64"),
        "city (€)": texts.to_numpy(str),
        "sold": X["sold"].to_numpy("datetime64[s]").astype("int64"),
        "kind": X["kind"].astype(object).fillna("").astype(str).to_numpy(str),
        "garden": X["garden"].to_numpy("float64", na_value=np.nan),
        "empty": X["empty"].to_numpy("float64"),
        "took": X["took"].dt.total_seconds().to_numpy("float64"),
    }


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Both estimators, another table, and what a process without Shoal computes for it."""
    folder = tmp_path_factory.mktemp("files")
    X, y = table(150, seed=0)
    X.loc[4::6, "city (€)"], X.loc[::8, "kind"] = None, np.nan
    regressor = EnsembleRegressor(**FEW, likelihood="heteroscedastic").fit(X, y)
    labels = np.where(y > 2.2e6, "high", np.where(y > 1.8e6, "middle", "löw"))
    classifier = EnsembleClassifier(**FEW).fit(X, labels)
    files = {
        "regressor": shoal.export(regressor, folder / "regressor.onnx"),
        "classifier": shoal.export(classifier, folder / "classifier.onnx"),
    }
    other, _ = table(90, seed=1)
    other.loc[::10, "city (€)"], other.loc[1::10, "city (€)"] = None, "Rom"
    np.savez(folder / "columns.npz", **as_columns(other))
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    outputs = {name: dict(np.load(folder / f"{name}.npz")) for name in files}
    return regressor, classifier, other, files, outputs


def close(output, value):
    """Equal to 1e-5 of the standard deviation of the values, far stricter than of the values."""
    assert output.shape == value.shape
    assert np.abs(output - value).max() <= 1e-5 * value.std()


def test_a_regressor_predicts_the_same_without_shoal(exported):
    regressor, _, X, files, outputs = exported
    found, (mean, std) = outputs["regressor"], regressor.predict(X, return_std=True)
    low, high = regressor.predict_interval(X, level=0.9)
    for name, value in {"mean": mean, "stddev": std, "low": low, "high": high}.items():
        close(found[name], value)
    close(found["wide"], regressor.predict_interval(X, level=0.999)[1])
    assert files["regressor"].difference <= 1e-5


def test_a_classifier_predicts_the_same_without_shoal(exported):
    _, classifier, X, files, outputs = exported
    found = outputs["classifier"]
    np.testing.assert_allclose(found["probabilities"], classifier.predict_proba(X), atol=1e-7)
    assert (found["label"] == classifier.predict(X)).all() and len(set(found["label"])) > 1
    entropy = classifier.predictive(X).entropy().numpy()
    np.testing.assert_allclose(found["entropy"], entropy, atol=1e-7)
    about = files["classifier"].metadata
    assert about["classes"] == ["high", "löw", "middle"]
    assert about["estimator"] == "EnsembleClassifier"
    city = next(each for each in about["inputs"] if each["column"] == "city (€)")
    assert city["dtype"] == "string" and city["categories"] == ["", "Bonn", "Jena", "None"]
    assert city["gap"] == "nan"  # the empty text is a category
    assert [each["name"] for each in about["inputs"]][0] == "column_mean"


def test_the_run_of_an_estimator_says_that_its_inputs_are_prepared(exported, tmp_path):
    _, classifier, _, _, _ = exported
    x = classifier.preprocessing_.transform(exported[2])
    with pytest.warns(shoal.ShoalWarning, match=r'shoal.export\(model, "a.onnx"\)'):
        done = shoal.export(classifier.run_, tmp_path / "a.onnx", x)
    assert "not raw columns" in done.metadata["preprocessing"]["inputs"]


@pytest.mark.parametrize(
    "case",
    [
        "numbers",
        "several",
        "array",
        pytest.param("bools", marks=pytest.mark.nightly),
        pytest.param("no preprocessing", marks=pytest.mark.nightly),
    ],
)
def test_other_labels_and_arrays(case, tmp_path):
    import onnxruntime

    X, y = table(40, seed=2)
    above = y > np.median(y)
    numbers = X[["mean", "empty"]].to_numpy()
    if case in ("array", "no preprocessing"):
        preprocess = "auto" if case == "array" else None
        X = numbers if case == "array" else np.nan_to_num(numbers)
        targets = np.stack([y, -y], 1)
        model = EnsembleRegressor(**FEW, preprocess=preprocess).fit(X, targets)
    else:
        targets = {"numbers": 7 - 3 * above, "bools": above}
        several = np.stack([above, y > 2e6], 1).astype(int)
        model = EnsembleClassifier(**FEW).fit(X, targets.get(case, several))
    done = shoal.export(model, tmp_path / "a.onnx", X)
    session = onnxruntime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    if isinstance(X, np.ndarray):
        mean, low = session.run(["mean", "low"], {"x": X})
        close(mean, model.predict(X))
        close(low, model.predict_interval(X)[0])
        return
    columns = as_columns(X)
    names = {each["name"]: each["column"] for each in done.metadata["inputs"]}
    feeds = {name: columns[column] for name, column in names.items()}
    feeds = {n: c.astype(object) if c.dtype.kind == "U" else c for n, c in feeds.items()}
    label, probabilities = session.run(["label", "probabilities"], feeds)
    assert np.array_equal(label, model.predict(X)) and label.dtype == model.predict(X).dtype
    np.testing.assert_allclose(probabilities, model.predict_proba(X), atol=1e-7)


def test_what_an_estimator_cannot_export(exported, tmp_path):
    regressor, classifier, X, _, _ = exported
    own = EnsembleRegressor(**FEW, preprocess=MinMaxScaler()).fit([[0.0], [1.0]] * 5, range(10))
    cases = [
        (regressor, "a.pt2", {}, "a.onnx"),
        (regressor, "a.onnx", {"precision": "int8"}, "double precision"),
        (classifier, "a.onnx", {"classes": ["a", "b", "c"]}, "leave them out"),
        (EnsembleRegressor(), "a.onnx", {}, "not fitted"),
        (own, "a.onnx", {}, "MinMaxScaler"),
    ]
    for model, name, options, word in cases:
        with pytest.raises(ConfigError) as caught:
            shoal.export(model, tmp_path / name, **options)
        assert_one_sentence(caught.value, word)
    assert not list(tmp_path.iterdir())
    assert json.dumps(exported[3]["regressor"].metadata)


@pytest.mark.parametrize("numbers", ["piecewise", "periodic"])  # both have heavy tails, too
def test_encodings_of_numbers_and_categories_are_inside_the_file(numbers, tmp_path):
    X, y = table(100, seed=0)
    X["tail"] = np.exp(2 * np.random.default_rng(0).normal(size=100))
    X.insert(1, "ticket", [f"T{i}" for i in range(100)])  # left out
    X["shop"] = [None if i % 9 == 0 else f"shop {min(i, i % 37)}" for i in range(100)]
    model = EnsembleRegressor(**FEW, numbers=numbers).fit(X, y)
    file = shoal.export(model, tmp_path / "model.onnx")
    assert file.difference <= 1e-5
    other, _ = table(40, seed=1)
    other["tail"] = np.concatenate([[np.nan, -5.0, 1e4], np.linspace(0, 300, 37)])
    other.insert(1, "ticket", "T0")
    other["shop"] = [None, "a shop that training had not", *(f"shop {i}" for i in range(38))]
    columns = as_columns(other) | {"tail": other["tail"].to_numpy()}
    columns["shop"] = other["shop"].fillna("").to_numpy(str)
    session = onnxruntime.InferenceSession(file.path, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["shoal"])
    raw = {each["name"]: columns[each["column"]] for each in about["inputs"] if "column" in each}
    feeds = {k: v.astype(object) if v.dtype.kind == "U" else v for k, v in raw.items()}
    close(session.run(["mean"], feeds)[0], model.predict(other))
    shop = next(each for each in about["inputs"] if each.get("column") == "shop")
    (size,) = model.run_.ensemble.builds[0].architecture.embeddings
    assert len(shop["categories"]) == size - 2 < 37  # without the gap and the rare ones


def test_the_file_of_a_conformal_regressor_has_its_intervals(tmp_path):
    random = np.random.default_rng(0)
    X = random.normal(size=(60, 3))
    y = 1e6 + 2e5 * np.stack([X[:, 0], -X[:, 1]], 1) + 1e4 * random.normal(size=(60, 2))
    model = EnsembleRegressor(**FEW, folds=2, conformal=True)
    model.fit(X, y, sample_weight=1 + np.arange(60) % 2)
    file = shoal.export(model, tmp_path / "model.onnx")
    assert file.difference <= 1e-5 and "CV+" in str(file.metadata["outputs"])
    session = onnxruntime.InferenceSession(file.path, providers=["CPUExecutionProvider"])
    new = random.normal(size=(40, 3))
    for level in (0.5, 0.9, 0.98):
        found = session.run(["low", "high"], {"x": new, "level": np.array(level)})
        for mine, theirs in zip(found, model.predict_interval(new, level), strict=True):
            close(mine, theirs)
    found = session.run(["low", "high"], {"x": new, "level": np.array(0.999)})
    assert np.isneginf(found[0]).all() and np.isposinf(found[1]).all()
