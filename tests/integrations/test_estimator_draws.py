"""Estimators with draws: every member becomes a chain after its training."""

import pickle

import numpy as np
import pytest
from small_runs import assert_equal_trees, assert_one_sentence, frozen

import shoal
from shoal.core.errors import ConfigError
from shoal.integrations.sklearn.columns import merged
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

SMALL = {"members": 4, "hidden": (6,), "epochs": 5, "random_state": 0, "numbers": "standard"}
FEW = {"draws": 20, "warmup": 40, "thin": 1}


def table(n=60):
    random = np.random.default_rng(0)
    X = random.normal(size=(n, 3))
    return X, X[:, 0] + 0.3 * random.normal(size=n)


@pytest.fixture(scope="module")
def model():
    return EnsembleRegressor(draws=FEW, folds=4, **SMALL).fit(*table())


def test_every_member_keeps_its_draws(model):
    X, y = table()
    assert model.run_.ensemble.members == 4 * 20 and model.run_.config["draws"]["chains"] == 4
    assert model.predict(X).shape == (60,) and (model.predict_std(X) > 0).all()
    assert model.score(X, y) > 0
    plain = EnsembleRegressor(folds=4, calibrate=False, **SMALL).fit(X, y)
    more = {"seed": plain.run_.config["seed"], "progress": False}
    rows, targets, *_ = merged(X, y, None)  # in the order of the training
    again = shoal.draw(plain.run_, data=(plain._prepared(rows), targets), **FEW, **more)
    assert_equal_trees(frozen(again.ensemble), frozen(model.run_.ensemble))
    assert model.feature_importances_.sum() == pytest.approx(1)


def test_what_needs_points_that_were_held_out_is_not_there(model):
    assert model.oof_predictive_ is None and model.oof_score_ is None
    assert not model.run_.likelihood.calibration
    with pytest.raises(ConfigError, match="no folds"):
        shoal.out_of_fold(model.run_, table())
    with pytest.raises(ConfigError) as error:
        EnsembleRegressor(draws=20, conformal=True, **SMALL).fit(*table())
    assert_one_sentence(error.value, "leave out draws or conformal")
    with pytest.raises(ConfigError) as error:
        EnsembleRegressor(draws=20, **SMALL).partial_fit(*table())
    assert_one_sentence(error.value, "leave out draws")


@pytest.mark.parametrize(
    ("draws", "words"),
    [
        (0, "draws must be"),
        ({"draw": 3}, "did you mean 'draws'"),
        ({"out": "folder"}, "no setting 'out'"),
        ({"sampler": "mclmd"}, "did you mean 'mclmc'"),
    ],
)
def test_mistakes_are_told_before_the_training(draws, words):
    with pytest.raises(ConfigError) as error:
        EnsembleRegressor(draws=draws, **SMALL).fit(*table())
    assert_one_sentence(error.value, words)


def test_a_classifier_with_a_folder_is_pickled_and_repeatable(tmp_path):
    X, y = table()
    few = {**FEW, "sampler": {"name": "sghmc", "lr": 0.01}}
    made = [
        EnsembleClassifier(draws=few, out=out, **SMALL).fit(X, y > 0)
        for out in (tmp_path / "run", None)
    ]
    probabilities = made[0].predict_proba(X)
    assert np.array_equal(probabilities, made[1].predict_proba(X))
    assert np.array_equal(pickle.loads(pickle.dumps(made[0])).predict_proba(X), probabilities)
    loaded = shoal.load(tmp_path / "run")
    assert loaded.config["draws"]["sampler"]["name"] == "sghmc" and loaded.ensemble.members == 80


def test_a_file_holds_evenly_spaced_draws(model, tmp_path):
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(needed)
    file = tmp_path / "model.onnx"
    for source in (model, model.run_):
        with pytest.raises(ConfigError) as error:
            shoal.export(source, file)
        assert_one_sentence(error.value, "80 draws", "most=")
    with pytest.raises(ConfigError) as error:
        shoal.export(model.run_, file, most=8, weights="stacking")
    assert_one_sentence(error.value, "most", "weights")
    X, y = table()
    labels = EnsembleClassifier(draws=FEW, **SMALL).fit(X, y > 0)
    done = shoal.export(labels, file, most=2)
    assert done.metadata["members"] == 2 and max(done.differences.values()) < 1e-5
