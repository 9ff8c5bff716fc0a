"""`partial_fit` of the estimators: passes go on where the last one ended."""

import pickle

import numpy as np
import pytest
from sklearn.datasets import make_classification

from shoal.core.errors import ConfigError, DataError
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

PLAIN = {"numbers": "standard", "dropout": 0.0, "learning_rate": 0.01, "batch_size": 100}
FEW = {"members": 2, "hidden": (16,), "random_state": 0} | PLAIN
pytestmark = pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")


def line(n, seed=0, slope=2.0):
    random = np.random.default_rng(seed)
    X = random.normal(size=(n, 2))
    return X, 100 + slope * X[:, 0] + 0.1 * random.normal(size=n)


def test_passes_over_the_same_data_go_on():
    X, y = line(200)
    model = EnsembleRegressor(**FEW).partial_fit(X, y)
    assert model.predict(X).shape == (200,) and model.n_iter_ == 1
    for _ in range(40):
        model.partial_fit(X, y)
    losses = [row["loss"] for row in model.run_.history]
    assert len(losses) == model.n_iter_ == 41
    assert losses[0] > losses[10] > losses[40] and model.score(X, y) > 0.98
    constant = {"folds": None, "early_stopping": False, "options": {"schedule": None}}
    alike = EnsembleRegressor(**FEW, epochs=41, **constant).fit(X, y)
    assert losses[40] == pytest.approx(alike.run_.history[-1]["loss"], abs=0.3)


def test_small_parts_come_one_after_the_other():
    X, y = line(400)
    model = EnsembleRegressor(**FEW, options={"batches": "own"})
    for _ in range(5):
        for start in range(0, 400, 50):
            model.partial_fit(X[start : start + 50], y[start : start + 50])
    assert model.score(X, y) > 0.8
    assert len(model.run_.results["partial_fit"]["rows"]) == 400  # N counts different points


def test_members_of_a_fit_go_on_and_the_fit_stays_as_it_was():
    X, y = line(200)
    model = EnsembleRegressor(**FEW | {"batch_size": 50}, epochs=20, folds=2).fit(X, y)
    before, new = pickle.loads(pickle.dumps(model)), line(200, 1, slope=2.5)
    unit = model.run_.likelihood.learned.scale
    for _ in range(15):
        model.partial_fit(*new)
    errors = [abs(each.predict(new[0]) - new[1]).mean() for each in (model, before)]
    assert errors[0] < 0.5 * errors[1]
    assert (model.run_.likelihood.learned.scale == unit).all()
    assert before.run_.config["folds"] == 2 and model.run_.config["folds"] is None
    again = pickle.loads(pickle.dumps(model)).partial_fit(*new)
    assert (again.predict(X) == model.partial_fit(*new).predict(X)).all()
    assert model.fit(X, y).n_iter_ <= 20 and model.score(X, y) > 0.9


def test_classes_are_known_in_advance():
    X, y = make_classification(200, 5, n_informative=3, n_classes=3, random_state=0)
    names = np.array(["a", "b", "c"])[y]
    model = EnsembleClassifier(**FEW)
    with pytest.raises(DataError, match="classes="):
        model.partial_fit(X, names)
    two = names != "c"
    model.partial_fit(X[two], names[two], classes=["c", "b", "a"])
    assert model.classes_.tolist() == ["a", "b", "c"]
    assert model.predict_proba(X).shape == (200, 3)
    for _ in range(30):
        model.partial_fit(X, names)
    assert model.score(X, names) > 0.7
    weights = model.run_.ensemble.state
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    with pytest.raises(DataError, match="'d', which is no class"):
        model.partial_fit(X, np.where(y == 0, "d", names))
    with pytest.raises(DataError, match="began with"):
        model.partial_fit(X, names, classes=["a", "b"])
    assert all((copies[name] == tensor).all() for name, tensor in model.run_.ensemble.state.items())


def test_what_a_pass_cannot_do_is_refused(tmp_path):
    X, y = line(50)
    with pytest.raises(ConfigError, match="leave out the folder"):
        EnsembleRegressor(**FEW, out=tmp_path / "run").partial_fit(X, y)
    with pytest.raises(ConfigError, match="dict of weights"):
        EnsembleClassifier(**FEW, class_weight="balanced").partial_fit(X, y > 100, classes=[0, 1])
    model = EnsembleRegressor(**FEW).partial_fit(X, y)
    with pytest.raises(ValueError, match="expecting 2 features"):
        model.partial_fit(X[:, :1], y)


def test_weights_and_several_labels_count():
    X, y = line(100)
    model = EnsembleRegressor(**FEW).partial_fit(X, y)
    weight = np.repeat([1.0, 0.0], 50)
    y = np.where(weight > 0, y, 1e6)
    for _ in range(20):
        model.partial_fit(X, y, sample_weight=weight)
    assert model.score(X[:50], y[:50]) > 0.5
    labels = (X > 0).astype(int)
    several = EnsembleClassifier(**FEW).partial_fit(X, labels)
    for _ in range(25):
        several.partial_fit(X, labels)
    assert (several.predict(X) == labels).mean() > 0.8
