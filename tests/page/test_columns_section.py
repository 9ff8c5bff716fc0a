"""Which columns matter? The section of the report about the columns of a table."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

import shoal
from shoal.evaluation.columns import Explanation, Importances, PartialDependence
from shoal.page.blocks import Figure, Fold, Statement
from shoal.page.report_data import load_report_data
from shoal.page.sections.columns import columns_section
from shoal.plots.columns import dependence, importances
from shoal.plots.figure import svg
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

PLAIN = {"numbers": "standard", "dropout": 0.0, "learning_rate": 0.02, "batch_size": 100}
FEW = {"epochs": 60, "members": 2, "hidden": (16,), "random_state": 0, "folds": None} | PLAIN
pytestmark = pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")


def table(n=150, seed=0):
    random = np.random.default_rng(seed)
    columns = {
        "noise": random.normal(size=n),
        "size": random.normal(size=n),
        "<b>city": random.choice(["Bonn", "Ulm"], n),
    }
    X = pd.DataFrame(columns)
    return X, 3 * X["size"] + 2.0 * (X["<b>city"] == "Ulm") + 0.3 * random.normal(size=n)


@pytest.fixture(scope="module")
def model():
    return EnsembleRegressor(**FEW).fit(*table())


def test_the_report_of_an_estimator_has_the_columns(model, tmp_path):
    data = model.dataset(*table(seed=1))
    path = shoal.report(model.run_, tmp_path / "page.html", data=data)
    text = path.read_text(encoding="utf-8")
    assert "Which columns matter?" in text and "Permuting size raises the CRPS by" in text
    assert "Predictions over size" in text and "&lt;b&gt;city" in text and "<b>city" not in text
    evaluation = model.run_.results["evaluation"]
    found = Explanation.read(evaluation.scores["data"], evaluation.samples)
    again = model.importances(*table(seed=1), repeats=2)
    assert found.importances.mean == pytest.approx(again.mean)
    section = columns_section(load_report_data([model.run_]))
    assert section.answer.startswith("2 of 3 columns lower the CRPS")
    names = [block.name for block in section.blocks if isinstance(block, Statement)]
    assert names == ["size", "<b>city"]
    statement = next(block for block in section.blocks if isinstance(block, Statement))
    assert re.search(r"lowest at −1\.\d+ \(−\d", statement.sentence)


def test_an_evaluation_without_columns_is_made_again(model):
    data = model.dataset(*table(seed=2))
    shoal.evaluate(model.run_, (data.test.x, data.test.y))
    assert columns_section(load_report_data([model.run_])) is None
    other = EnsembleRegressor(**FEW | {"epochs": 1}).fit(*table())
    shoal.evaluate(other.run_, data)  # the columns of another model's predictions are not its own
    assert columns_section(load_report_data([other.run_])) is None


def test_a_stored_run_keeps_its_columns(tmp_path):
    X, y = table()
    labels = np.where(y > 1, "dear", "cheap")
    model = EnsembleClassifier(**FEW, out=tmp_path / "run").fit(X, labels)
    shoal.evaluate(model.run_, model.dataset(X, labels))
    section = columns_section(load_report_data([tmp_path / "run"]))
    assert "NLL" in section.answer
    titles = [block.title for block in section.blocks if isinstance(block, Figure)]
    assert titles[:2] == ["Importance of the columns", "Predictions over size"]
    sentence = next(block for block in section.blocks if isinstance(block, Statement)).sentence
    assert "mean probability of dear is lowest" in sentence


def explanation(columns=20, classes=7):
    random = np.random.default_rng(0)
    found = Importances(
        tuple(f"c{j}" for j in range(columns)), "nll", "test", 9, 1.0,
        np.arange(columns, dtype=float), np.ones(columns), random.random((columns, 2)),
    )  # fmt: skip
    curve = random.random((15, classes))
    words = np.array([f"w{k}" for k in range(15)], dtype=object)
    days = np.arange("2020-01-01", "2020-01-16", dtype="datetime64[D]").astype("datetime64[s]")
    parts = curve, curve - 0.1, curve + 0.1, None, np.stack([curve, curve])
    texts = PartialDependence("c19", "categories", words, *parts)
    return Explanation(found, (texts, PartialDependence("c18", "dates", days, *parts)))


def test_what_is_stored_is_read_again():
    one = explanation()
    facts, tensors = one.stored()
    other = Explanation.read(facts, {name: tensor.clone() for name, tensor in tensors.items()})
    assert other.importances.columns == one.importances.columns
    assert (other.importances.members == one.importances.members).all()
    for mine, theirs in zip(one.dependences, other.dependences, strict=True):
        assert (mine.grid == theirs.grid).all() and (mine.mean == theirs.mean).all()
        assert theirs.noise is None
    assert Explanation.read({}, tensors) is None and Explanation.read(facts, {}) is None


def test_figures_say_what_they_leave_out(model):
    shoal.evaluate(model.run_, model.dataset(*table(seed=3)))
    data = load_report_data([model.run_])
    facts, tensors = explanation().stored()
    data.assessment.scores["data"].update(facts)
    data.assessment.samples.update(tensors)
    section = columns_section(data)
    figures = [block for block in section.blocks if isinstance(block, Figure)]
    assert "12 of 20 columns" in figures[0].reading
    assert "5 of 7 curves" in figures[1].reading and "12 of 15 categories" in figures[1].reading
    assert isinstance(section.blocks[-1], Fold)
    assert len(figures[2].figure.axes[0].get_lines()) == 5
    assert len(figures[0].figure.axes[0].get_yticklabels()) == 12


def test_figures_show_the_numbers():
    names, ones = ["a", "b"], torch.ones(2).numpy()
    figure = importances(names, np.array([1.0, 3.0]), 0.1 * ones, "CRPS", "kde")
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["b", "a"]
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == [3, 1] and figure.axes[0].get_xlabel() == "increase of CRPS"
    grid = np.array([1.0, 2.0])
    curve = dependence("age", grid, grid, grid - 1, grid + 1, "mean").axes[0].get_lines()[0]
    assert curve.get_ydata().tolist() == [1, 2]


@pytest.mark.parametrize("days", [0.02, 1.5, 20, 55, 300, 700, 960, 9000])
def test_dates_of_any_range_have_a_few_ticks(days):
    start = np.datetime64("2020-01-03T05:00:00", "s")
    grid = start + (np.linspace(0, days, 10) * 86_400).astype("timedelta64[s]")
    figure = dependence("day", grid, np.ones(10), np.ones(10), np.ones(10), "mean")
    svg(figure, "days")  # warnings are errors
    assert 2 <= len(figure.axes[0].get_xticks()) <= 8
