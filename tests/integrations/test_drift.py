"""Drift of columns against the sketches of the training data: false alarms, power and sentences."""

import pickle
import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kstest

from shoal.core.errors import ConfigError, DataError
from shoal.integrations.sklearn.drift import drift_of, sketches
from shoal.sklearn import EnsembleRegressor


def table(n, seed):
    random = np.random.default_rng(seed)
    columns = {
        "age": random.normal(40, 10, n),
        "rooms": random.integers(1, 6, n),
        "income": np.where(random.random(n) < 0.1, np.nan, random.exponential(size=n)),
        "city": random.choice(["Bonn", "Jena", "Ulm"], n, p=[0.6, 0.3, 0.1]),
        "day": pd.Timestamp("2020-01-01") + pd.to_timedelta(random.random(n) * 365, unit="D"),
    }
    return pd.DataFrame(columns)


NAMES = list(table(1, 0).columns)


def test_alarms_without_drift_come_at_the_level():
    results = [
        drift_of(sketches(table(300, seed), NAMES), table(100, 1000 + seed), 0.05)
        for seed in range(25)
    ]
    assert np.mean([bool(result) for result in results]) <= 0.24  # 1 expected, 6 allowed
    by_column = np.array([[each.p for each in result.columns] for result in results])
    assert ((by_column <= 0.2).mean(0) < 0.48).all() and ((by_column <= 0.5).mean(0) > 0.1).all()


def test_p_values_of_numbers_are_uniform_without_drift():
    random = np.random.default_rng(0)
    p = []
    for _ in range(300):
        train, new = random.normal(size=(400, 1)), random.normal(size=(200, 1))
        p.append(drift_of(sketches(train, ["x"]), new, 0.05).columns[0].p)
    p = np.array(p)
    assert 0.02 <= (p <= 0.05).mean() <= 0.09  # binomial, 300 draws: 0.05 ± 3 standard errors
    assert kstest(p[p < 0.5] / 0.5, "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("column", "change", "sentence"),
    [
        ("age", lambda c: c + 30, "age: .* % above the largest training value"),
        ("age", lambda c: c - 90, "age: 100 % below the smallest training value"),
        ("age", lambda c: c + 5, "age: median 4.* instead of (3|4)"),
        ("age", lambda c: 40 + (c - 40) / 3, "age: quartiles 3.* to 4.* instead of 3.* to 4"),
        ("rooms", lambda c: c + 3, "rooms: .* above the largest training value, 5"),
        ("rooms", lambda c: c * 0 + 2, "rooms: 2 has 100 % instead of"),
        ("income", lambda c: c.where(c.index % 2 == 0), "income: 5.* % gaps instead of 1"),
        ("city", lambda c: c.where(c.index % 5 > 0, "Rom"), "city: 20 % in .* such as 'Rom'"),
        ("city", lambda c: c.replace("Bonn", "Ulm"), "city: 'Ulm' has"),
        ("day", lambda c: c + pd.Timedelta(days=200), "day: .* after the last .*, 2020-12-3"),
    ],
)
def test_the_column_that_drifted_is_named_with_its_difference(column, change, sentence):
    new = table(400, 1)
    new[column] = change(new[column])
    found = drift_of(sketches(table(1000, 0), NAMES), new, 0.05)
    assert found and found.drifted == (column,)
    assert re.match(sentence, found.sentences[0])
    assert column in repr(found) and len(found.to_pandas()) == 5


def test_a_fitted_model_keeps_small_sketches():
    X = table(2000, 0)
    model = EnsembleRegressor(
        epochs=1, members=2, hidden=(8,), early_stopping=False, random_state=0
    )
    model.fit(X, np.random.default_rng(7).normal(size=2000))
    assert not model.drift(table(500, 1), level=0.001)
    moved = model.drift(X.assign(age=X["age"] + 10))
    assert moved.drifted == ("age",) and 0.3 < moved.columns[0].distance < 0.5
    assert len(pickle.dumps(model._sketches)) < 10_000
    with pytest.raises(ConfigError, match="level"):
        model.drift(X, level=2)
    copy = pickle.loads(pickle.dumps(model))
    assert copy.drift(X).points == 2000
    with pytest.raises(ConfigError, match="no columns to compare"):
        drift_of([], X, 0.05)
    with pytest.raises(DataError, match="no rows"):
        drift_of(model._sketches, X[:0], 0.05)


def test_columns_of_gaps_and_constants_do_not_drift_alone():
    X = pd.DataFrame({"empty": [np.nan] * 50, "one": [1.0] * 50, "text": ["a"] * 50})
    known = sketches(X, list(X.columns))
    assert not drift_of(known, X[:20], 0.05)
    filled = drift_of(known, X.assign(empty=1.0), 0.05)
    assert filled.sentences == ("empty: 0 % gaps instead of 100 %",)
