"""Where is it wrong? The numbers are those of scikit-learn and numpy, under the user's names."""

import re

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import shoal
from shoal.core.errors import ConfigError
from shoal.data.dataset import Dataset, Split, class_names
from shoal.evaluation.evaluate import Evaluation, evaluate_run
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Bernoulli, Categorical, Gaussian
from shoal.page.blocks import Figure, Table
from shoal.page.report import report
from shoal.page.report_data import load_report_data
from shoal.page.sections import builders
from shoal.page.sections.errors import errors_section, lead_confusion
from shoal.plots.errors import PredictionBins
from shoal.plots.figure import svg
from shoal.prediction import metrics
from shoal.sklearn import EnsembleClassifier

RANDOM = np.random.default_rng(0)


def tables(section):
    return {block.title: block for block in section.blocks if isinstance(block, Table)}


def test_scores_by_class_are_those_of_scikit_learn():
    label, guess = RANDOM.integers(0, 4, 200), RANDOM.integers(0, 4, 200)
    counts = metrics.confusion(torch.tensor(label), torch.tensor(guess), 4)
    assert np.array_equal(counts, confusion_matrix(label, guess))
    wanted = precision_recall_fscore_support(label, guess)[:3]
    for mine, theirs in zip(metrics.class_scores(counts), wanted, strict=True):
        assert np.allclose(mine, theirs)


def test_a_class_without_points_has_no_recall():
    counts = metrics.confusion(torch.tensor([0, 0]), torch.tensor([0, 1]), 3)
    precision, recall, f1 = metrics.class_scores(counts)
    assert recall[1].isnan() and precision[2].isnan() and f1[2].isnan()
    assert precision[1] == 0 and recall[0] == 0.5


def test_the_table_has_every_class_by_its_name(picture_runs):
    report_data = load_report_data(picture_runs)
    section = errors_section(report_data)
    rows = tables(section)["Scores by class"].rows
    assert [row[0].text for row in rows] == ["<b>ant</b>", "bee", "cat"]
    runs = [found for run, found in picture_runs if run.config["members"] == 4][:3]
    label, guess = (
        np.concatenate([found.samples[f"test/{key}"] for found in runs])
        for key in ("label", "prediction")
    )
    for column, wanted in enumerate(precision_recall_fscore_support(label, guess), 1):
        assert np.allclose([row[column].value for row in rows], wanted)
    assert int(lead_confusion(report_data.lead).sum()) == len(label)
    assert "3 seeds" in tables(section)["Scores by class"].reading


def test_the_matrix_shows_counts_and_names(picture_runs):
    section = errors_section(load_report_data(picture_runs[:1]))
    (figure,) = [block for block in section.blocks if isinstance(block, Figure)]
    text = svg(figure.figure, "f", figure.title)
    counts = lead_confusion(load_report_data(picture_runs[:1]).lead)
    for i, name in enumerate(("&lt;b&gt;ant&lt;/b&gt;", "bee", "cat")):
        assert name in text
        assert f"{name} predicted as {name}: {int(counts[i, i])} (" in text


def test_many_classes_get_their_most_frequent_confusions(picture_runs):
    run, found = picture_runs[0]
    label = torch.arange(400) % 40
    guess = label.clone()
    guess[label == 7] = 8
    found = Evaluation(
        found.scores, found.samples | {"test/label": label, "test/prediction": guess}
    )
    section = errors_section(load_report_data([(run, found)]))
    assert "7 predicted as 8, 10 times" in section.answer
    (row,) = tables(section)["Most frequent confusions"].rows
    assert [cell.text for cell in row] == ["7", "8", "10", "100 %"]


def stand_in(picture_runs, build, likelihood):
    run, _ = picture_runs[0]
    made = Ensemble.init(build, 2, seed=0)
    return type(run)(made, likelihood, run.config, run.history, dict(run.provenance))


def test_several_labels_have_a_row_each(picture_runs):
    x, y = torch.randn(50, 3), torch.randint(2, (50, 3))
    run = stand_in(picture_runs, lambda: nn.Linear(3, 3), Bernoulli())
    data = Dataset("tags", Split(x, y), Split(x, y), classes=("sea", "sky", "sun"))
    section = errors_section(load_report_data([(run, evaluate_run(run, data))]))
    rows = tables(section)["Scores by label"].rows
    guess = shoal.predict(run.ensemble, x, likelihood=Bernoulli()).labels()
    wanted = precision_recall_fscore_support(y, guess, zero_division=np.nan)
    assert [row[0].text for row in rows] == ["sea", "sky", "sun"]
    for column in range(4):
        values = [float(row[column + 1].value or "nan") for row in rows]
        assert np.allclose(values, wanted[column], equal_nan=True)


@pytest.mark.parametrize("columns", [1, 2])
def test_residuals_and_coverage_over_the_prediction(picture_runs, columns):
    x = torch.randn(90, 2)
    y = x.sum(1) if columns == 1 else x
    run = stand_in(picture_runs, lambda: nn.Linear(2, columns), Gaussian(0.5))
    found = evaluate_run(run, Dataset("line", Split(x, y), Split(x, y)))
    section = errors_section(load_report_data([(run, found)]))
    titles = [block.title.partition(",")[0] for block in section.blocks]
    assert titles == ["Residuals over the prediction", "Coverage over the prediction"] * columns
    mean = found.samples["test/mean"].reshape(90, -1)[:, 0].double()
    bias = float((y.reshape(90, -1)[:, 0] - mean).mean())
    shown = float(re.search(r"mean residual is (\S+?)[: ]", section.answer)[1].replace("−", "-"))
    assert shown == pytest.approx(bias, abs=0.1)


def test_bins_hold_every_point_once_in_order():
    mean = torch.tensor(RANDOM.normal(size=205))
    bins = PredictionBins.of(mean)
    assert len(bins.rows) == 10 and len(bins.edges) == 11
    assert sorted(np.concatenate(bins.rows)) == list(range(205))
    for low, high, rows in zip(bins.edges, bins.edges[1:], bins.rows, strict=False):
        assert low <= float(mean[rows].min()) and float(mean[rows].max()) <= high


@pytest.fixture
def short_page(undrawn, monkeypatch):
    """A page of this section alone."""
    only = {"errors": builders()["errors"]}
    monkeypatch.setattr("shoal.page.report.builders", lambda: only)


def page_words(run, tmp_path, **options):
    return report(run, tmp_path / "page.html", **options).read_text(encoding="utf-8")


def trained(data):
    ensemble = Ensemble.init(lambda: nn.Linear(2, 2), 2)
    return shoal.fit(ensemble, data, epochs=1, progress=False)


X, Y = torch.randn(40, 2), torch.arange(40) % 2


def test_names_of_the_data_set_reach_a_page_of_plain_test_arrays(short_page, tmp_path):
    run = trained(Dataset("animals", Split(X, Y), classes=("ant", "bee")))
    assert run.provenance["classes"] == ["ant", "bee"]
    assert ">ant<" in page_words(run, tmp_path, data=(X, Y))


def test_names_can_be_given_to_the_report(short_page, tmp_path):
    run = trained((X, Y))
    assert ">0<" in page_words(run, tmp_path, data=(X, Y))
    named = Dataset("animals", Split(X, Y), Split(X, Y), classes=("cat", "dog"))
    for page in (
        page_words(run, tmp_path, classes=["ant", "bee"]),
        page_words(run, tmp_path, data=(X, Y), classes=np.array(["ant", "bee"])),
    ):
        assert ">ant<" in page and ">bee<" in page
    assert ">dog<" in page_words((run, evaluate_run(run, named)), tmp_path)


@pytest.mark.parametrize("wrong", ["ab", ["one"], []])
def test_too_few_names_are_refused(short_page, tmp_path, wrong):
    run = trained((X, Y))
    with pytest.raises(ConfigError, match="2 classes"):
        page_words(run, tmp_path, data=(X, Y), classes=wrong)


def test_names_of_numbers_are_refused(line_runs):
    with pytest.raises(ConfigError, match="leave out classes"):
        load_report_data(line_runs, classes=["a", "b"])


def test_text_labels_of_an_estimator_are_names_on_its_page(short_page, tmp_path):
    labels = np.array(["ant", "bee"])[Y]
    model = EnsembleClassifier(members=2, epochs=1, random_state=0).fit(X.numpy(), labels)
    page = page_words(model.run_, tmp_path, data=model.dataset(X.numpy(), labels))
    assert ">ant<" in page and ">bee<" in page


def test_names_of_torch_sets_are_found():
    animals = TensorDataset(X, Y)
    animals.classes = ["ant", "bee"]
    loader = DataLoader(Subset(animals, range(20)))
    assert class_names(loader) == ("ant", "bee")
    assert class_names((X, Y)) is None and class_names(TensorDataset(X, Y)) is None
    assert trained(loader).provenance["classes"] == ["ant", "bee"]


def test_names_stay_in_the_folder(short_page, tmp_path):
    run = shoal.fit(
        Ensemble.init(lambda: nn.Linear(2, 2), 2),
        Dataset("animals", Split(X, Y), classes=("ant", "bee")),
        epochs=1,
        progress=False,
        out=tmp_path / "run",
    )
    again = shoal.load(run.folder, lambda: nn.Linear(2, 2))
    assert ">bee<" in page_words(again, tmp_path, data=(X, Y))
    assert isinstance(again.likelihood, Categorical)
