"""Presets of the estimators: recipes, the search, the clock, folds and out-of-fold predictions."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import shoal
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.integrations.sklearn import presets
from shoal.integrations.sklearn.presets import (
    PRESETS_FOR_NUMBERS,
    Clock,
    Patience,
    Recipe,
    chosen,
    recipe_of,
)
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

FEW = {"epochs": 3, "members": 4, "hidden": (8,), "random_state": 0}


def line(n=120, seed=0):
    x, noise = np.random.default_rng(seed).normal(size=(2, n, 2))
    return x, 3 * x[:, 0] + 0.3 * noise[:, 0]


def test_parameters_replace_what_a_preset_says():
    fast = PRESETS_FOR_NUMBERS["fast"]
    given = {"members": 7, "epochs": None}
    assert recipe_of(PRESETS_FOR_NUMBERS, "fast", given) == replace(fast, members=7)
    with pytest.raises(ConfigError, match="preset must be one of .*, not 'quick'"):
        EnsembleRegressor(preset="quick").fit(*line())


def test_the_search_halves_the_candidates_by_their_scores():
    changes = {"a": {"dropout": 0.1}, "b": {"dropout": 0.2}, "c": {"dropout": 0.3}}
    recipe, trained = Recipe(dropout=0.0, epochs=80, members=32, candidates=changes), []

    def score(small):
        trained.append((small.dropout, small.epochs, small.members))
        return abs(small.dropout - 0.18)

    assert chosen(recipe, score, lambda sentence: None).dropout == 0.2
    assert trained[:4] == [(d, 20, recipe.folds) for d in (0.0, 0.1, 0.2, 0.3)]
    assert sorted(trained[4:]) == [(0.1, 40, recipe.folds), (0.2, 40, recipe.folds)]


@pytest.mark.parametrize(
    ("limit", "epochs", "members"), [(1000, 400, 16), (50, 42, 16), (10, 20, 4), (0.1, 20, 2)]
)
def test_a_time_limit_takes_epochs_then_members(monkeypatch, limit, epochs, members):
    now = [0.0]
    monkeypatch.setattr(presets.time, "monotonic", lambda: now[0])
    clock = Clock(limit)

    def train(recipe, watch):
        for _ in range(recipe.epochs):
            now[0] += 1.0
            watch(type("Event", (), {"stop": lambda self, why: None})())

    found = clock.fitting(Recipe(), train)
    assert (found.epochs, found.members) == (epochs, members) and found.folds <= members


def test_no_time_is_lost_without_a_limit():
    assert Clock(None).fitting(Recipe(), None) == Recipe()  # no pilot
    with pytest.raises(ConfigError, match="time_limit must be seconds above 0"):
        EnsembleRegressor(time_limit=-1).fit(*line())


def test_a_limit_that_is_over_still_gives_a_model():
    X, y = line()
    model = EnsembleRegressor(**FEW, time_limit=1e-3).fit(X, y)
    assert np.isfinite(model.predict(X)).all() and model.run_.ensemble.members >= 2


@pytest.mark.parametrize(
    ("losses", "epochs"),
    [
        ([[1.0, 1.0]] * 9, 4),  # no change
        ([[1.0 - 0.004 * k, 1.0] for k in range(30)], 30),  # small steps count together
        ([[1.0 - 0.001 * k, 1.0] for k in range(30)], 4),  # 0.2 % in three epochs
        ([[1.0, 1.0], [0.5, 2.0], [1.0, 1.0], [1.0, 1.0], [1.0, None], [1.0, 1.0]], 5),
        ([[None, None]] * 5, 3),
    ],
)
def test_training_ends_when_the_mean_of_the_best_losses_stays(losses, epochs):
    patience, stopped = Patience(3), []
    for epoch, each in enumerate(losses, 1):
        row = {"member_validation": each}
        stop = lambda why, epoch=epoch: stopped.append(epoch)  # noqa: E731
        patience(SimpleNamespace(epoch=epoch, row=row, stop=stop))
    assert (stopped or [len(losses)])[0] == epochs


def test_out_of_fold_predictions_come_in_the_order_of_fit():
    X, y = line(150)
    X, y = np.concatenate([X, X[:20]]), np.concatenate([y, y[:20]])  # equal rows are merged
    model = EnsembleRegressor(**FEW | {"epochs": 60, "learning_rate": 0.02}).fit(X, y)
    oof = model.oof_predictive_
    assert oof.members.shape[1] == 170 and np.corrcoef(oof.mean, y)[0, 1] > 0.9
    assert np.array_equal(oof.mean[:20], oof.mean[150:])
    assert model.oof_score_ == pytest.approx(1 - np.mean((oof.mean.numpy() - y) ** 2) / np.var(y))
    assert pickle.loads(pickle.dumps(model)).oof_score_ == model.oof_score_


def test_an_out_of_fold_score_of_noise_is_that_of_guessing():
    random = np.random.default_rng(0)
    X, y = random.normal(size=(200, 5)), random.integers(0, 2, 200)
    change = {"epochs": 60, "learning_rate": 0.02, "hidden": (32,), "dropout": 0.0}
    model = EnsembleClassifier(**FEW | change, early_stopping=False).fit(X, y)
    assert model.score(X, y) > 0.8 and model.oof_score_ < 0.65


@pytest.mark.parametrize(
    "change",
    [{"method": "f-kde"}, {"folds": None}, {"members": 1}, {"options": {"validation": 0.2}}],
)
def test_without_folds_there_are_no_out_of_fold_predictions(change):
    X, y = line()
    model = EnsembleRegressor(**FEW | change).fit(X, y)
    assert model.oof_predictive_ is None and model.oof_score_ is None
    assert "validation" in model.run_.history[0]


def test_few_points_have_no_folds_and_all_of_them_train():
    X, y = line(30)
    model = EnsembleRegressor(**FEW).fit(X, y)
    assert model.oof_score_ is None and model.run_.provenance["data"]["points"] == 30
    folded = EnsembleRegressor(**FEW, folds=4).fit(X, y)
    assert folded.run_.config["folds"] == 4 and folded.oof_predictive_.members.shape[1] == 30
    with pytest.raises(ConfigError, match="folds must be a number"):
        EnsembleRegressor(folds="many").fit(X, y)


def test_members_train_in_single_precision_and_predict_in_double():
    X, y = line()
    model = EnsembleRegressor(**FEW).fit(X, y)
    assert model.predict(X).dtype == np.float64
    alone = np.concatenate([model.predict(x[None]) for x in X])
    np.testing.assert_allclose(alone, model.predict(X), rtol=0, atol=1e-12)
    assert shoal.evaluate(model.run_, model.dataset(X, y)).scores["test"]["nll"] < 10


def test_skewed_targets_choose_their_scale_by_out_of_fold_scores():
    random = np.random.default_rng(0)
    X = random.normal(size=(200, 1))
    y = np.exp(2 * X[:, 0] + 0.5 * random.normal(size=200))
    model = EnsembleRegressor(**FEW | {"epochs": 40, "learning_rate": 0.02}).fit(X, y)
    assert type(model.run_.likelihood).__name__ == "LogNormal"
    assert (model.predict_interval(X)[0] > 0).all()
    named = EnsembleRegressor(**FEW, likelihood="heteroscedastic").fit(X, y)
    assert type(named.run_.likelihood).__name__ != "LogNormal"


def test_heavy_tails_of_the_noise_are_found():
    random = np.random.default_rng(0)
    X = random.normal(size=(600, 1))
    y = X[:, 0] + 0.2 * random.standard_t(2, size=600)
    model = EnsembleRegressor(**FEW | {"epochs": 30, "learning_rate": 0.02}).fit(X, y)
    assert type(model.run_.likelihood).__name__ == "StudentT"
    low, high = model.predict_interval(X)
    assert 0.86 < np.mean((low < y) & (y < high)) < 0.95


def test_trials_are_silent_and_the_training_has_the_callbacks(recwarn, tmp_path):
    X, y = line(80)
    X, seen = np.column_stack([X, y]), []  # a column that is the target: a warning
    options = {"callbacks": [lambda event: seen.append(event.epoch)]}
    change = {"time_limit": 1000, "options": options, "out": tmp_path / "run", "epochs": 2}
    EnsembleRegressor(**FEW | change).fit(X, y)
    assert seen == [1, 2] and (tmp_path / "run").is_dir()
    assert sum("is the target itself" in str(each.message) for each in recwarn) == 1


def test_counts_are_recognised_and_another_likelihood_is_suggested():
    random = np.random.default_rng(0)
    X = random.normal(size=(60, 1))
    y = random.poisson(np.exp(X[:, 0])).astype(float)
    with pytest.warns(ShoalWarning, match="y holds counts .* likelihood='negative-binomial'"):
        model = EnsembleRegressor(**FEW).fit(X, y)
    assert any("counts" in sentence for sentence in model.run_.warnings)
    EnsembleRegressor(**FEW, likelihood="negative-binomial").fit(X, y)
