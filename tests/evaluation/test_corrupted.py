"""Corruptions from evaluation to report: complete scores, small folders, each computed once."""

import csv
import io
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.cli.outcome import scores_text
from shoal.core.errors import CheckpointCorrupt
from shoal.core.storage.files import read_json, write_json
from shoal.data import Dataset, Split
from shoal.data.corruptions import registry, with_corruptions
from shoal.data.dataset import LazySplits
from shoal.evaluation.evaluate import (
    KEPT,
    SAMPLES,
    corrupted_means,
    evaluate_run,
    load_evaluation,
    splits_ticker,
)
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical
from shoal.page.compare import results_csv
from shoal.page.measures import Measure, headlines
from shoal.page.report import render
from shoal.page.report_data import load_report_data
from shoal.page.sections.calibration import corruption_blocks, grid_of
from shoal.prediction import evaluate, predict

POINTS = 250


@dataclass
class EvaluatedRun:
    """What a page needs of a run that nobody trained."""

    ensemble: Ensemble
    config: dict
    folder: Path | None = None
    likelihood: Any = field(default_factory=Categorical)
    history: list = field(default_factory=list)
    provenance: dict = field(default_factory=dict)


def _network():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3))


def _pictures():
    random = torch.Generator().manual_seed(0)
    x, y = torch.rand(POINTS, 3, 8, 8, generator=random) / 2, torch.arange(POINTS) % 3
    x[torch.arange(POINTS), y] += 0.4
    turned = {f"turned-{angle}": Split(x.roll(angle, 3), y) for angle in (1, 2)}
    return Dataset("pictures", Split(x, y), Split(x, y), turned, classes=("a", "b", "c"))


def _run(method, seed, folder=None):
    config = {"data": "pictures", "method": method, "members": 3, "seed": seed}
    return EvaluatedRun(Ensemble.init(_network, 3, seed=seed), config, folder)


@pytest.fixture(scope="module")
def data():
    return with_corruptions(_pictures())


@pytest.fixture(scope="module")
def pairs(data):
    runs = [_run("kde", 0), _run("kde", 1), _run("ensemble", 0)]
    return [(run, evaluate_run(run, data)) for run in runs]


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    evaluate_run(_run("kde", 0, place), data)
    return place


def test_each_shift_is_made_once_and_in_turn(data):
    made, evaluated = [], []

    def maker(name):
        return lambda: (made.append(name), data.shifts[name])[1]

    names = ["turned-1", "fog-1", "fog-5"]
    spied = LazySplits({n: maker(n) for n in names}, dict.fromkeys(names, POINTS))

    def after(part):
        evaluated.append(part)
        assert len(made) == len(evaluated)

    evaluate_run(_run("kde", 0), replace(data, shifts=spied), after=after)
    assert made == names
    assert evaluated == [f"shift:{name}" for name in names]


def test_scores_of_every_shift_are_of_all_its_inputs(pairs, data):
    run, found = pairs[0]
    assert list(found.shifts) == list(data.shifts)
    assert len(found.shifts) == 2 + 95
    split = data.shifts["contrast-4"]
    assert found.shifts["contrast-4"] == evaluate(predict(run, split), split.y)
    assert found.scores["data"]["counts"]["shift:contrast-4"] == POINTS


def test_numbers_of_inputs_are_thinned_evenly_and_curves_are_not(pairs, data):
    run, found = pairs[0]
    pred = predict(run, data.shifts["snow-2"])
    step = math.ceil(POINTS / (KEPT // 97))
    part = found.split_samples("shift:snow-2")
    assert step > 1
    torch.testing.assert_close(part["entropy"], pred.entropy().float()[::step])
    assert torch.equal(part["label"], torch.arange(POINTS)[::step] % 3)
    curve = found.reliability("shift:snow-2")
    assert curve is not None and float(curve.count.sum()) == POINTS
    assert len(found.split_samples("test")["entropy"]) == POINTS


def test_a_folder_of_95_shifts_stays_below_a_megabyte(folder):
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    assert (folder / SAMPLES).exists()


def test_means_come_back_from_the_folder(folder, pairs):
    found = load_evaluation(folder)
    assert found is not None
    for name, scores in pairs[0][1].corrupted.items():
        assert found.corrupted[name] == pytest.approx(scores, nan_ok=True)


def test_means_that_are_no_table_are_refused(pairs, tmp_path):
    pairs[0][1].save(tmp_path)
    write_json(tmp_path / "scores.json", read_json(tmp_path / "scores.json") | {"corrupted": 1})
    with pytest.raises(CheckpointCorrupt, match="shoal evaluate"):
        load_evaluation(tmp_path)


def test_means_are_over_their_corruptions(pairs):
    found = pairs[0][1]
    parts = found.corrupted
    assert list(parts) == ["all", "standard", *(f"severity-{s}" for s in range(1, 6))]

    def mean(names, key):
        return sum(found.shifts[name][key] for name in names) / len(names)

    standard = [name for name in registry if registry[name].standard]
    for key in ("accuracy", "nll", "ece"):
        everything = [f"{name}-{s}" for name in registry for s in range(1, 6)]
        assert parts["all"][key] == pytest.approx(mean(everything, key))
        published = [f"{name}-{s}" for name in standard for s in range(1, 6)]
        assert parts["standard"][key] == pytest.approx(mean(published, key))
        third = [f"{name}-3" for name in registry]
        assert parts["severity-3"][key] == pytest.approx(mean(third, key))


def test_without_corruptions_there_are_no_means():
    assert corrupted_means({"rotated-15": {"nll": 1.0}, "fog": {"nll": 2.0}}) == {}
    assert "standard" not in corrupted_means({"fog-1": {"nll": 1.0}})
    assert evaluate_run(_run("kde", 0), _pictures()).corrupted == {}


def test_the_terminal_shows_means_instead_of_95_rows(pairs):
    scores = pairs[0][1].scores
    text = scores_text(scores)
    assert "turned-1" in text and "fog-3" not in text
    row = next(line for line in text.splitlines() if line.startswith("corrupted, severity 3"))
    assert f"{scores['corrupted']['severity-3']['accuracy']:.4f}" in row


def test_comparisons_have_the_mean_over_corruptions(pairs):
    groups = load_report_data(pairs).groups
    titles = [measure.title for measure in headlines(groups)]
    assert {"accuracy, corrupted", "NLL, corrupted", "ECE, corrupted"} <= {*titles}
    rows = list(csv.DictReader(io.StringIO(results_csv(groups))))
    first = pairs[0][1].corrupted["all"]["accuracy"]
    assert float(rows[0]["corrupted.all.accuracy"]) == pytest.approx(first)
    assert Measure("ece", "corrupted:severity-2").title == "ECE, corrupted, severity 2"


def test_the_page_shows_severity_curves_and_the_whole_table(pairs):
    story = load_report_data(pairs)
    accuracy, ece, table, fold = corruption_blocks(story)
    assert accuracy.title == "Accuracy under corruption"
    assert ece.title == "ECE under corruption"
    line = accuracy.figure.axes[0].get_lines()[0]
    lead = [found for run, found in pairs if run.config["method"] == "kde"]
    for severity in range(1, 6):
        wanted = sum(found.corrupted[f"severity-{severity}"]["accuracy"] for found in lead) / 2
        assert line.get_ydata()[severity] == pytest.approx(wanted)
    assert [row[0].text for row in table.rows] == registry.names()
    assert list(table.columns) == ["corruption", "1", "2", "3", "4", "5", "mean"]
    fog = next(row for row in table.rows if row[0].text == "fog")
    assert fog[3].value == pytest.approx(sum(f.shifts["fog-3"]["accuracy"] for f in lead) / 2)
    assert fog[-1].value == pytest.approx(sum(cell.value for cell in fog[1:-1]) / 5)
    assert len(fold.blocks) == 2


def test_the_page_draws_one_figure_a_metric_and_not_one_a_corruption(pairs):
    text = render(load_report_data(pairs))
    assert text.count("under corruption") == 2 * text.count("Accuracy under corruption")
    assert "severity (turned)" in text
    assert "severity (fog)" not in text
    assert "jpeg-compression" in text


def test_runs_without_corruptions_stand_beside_runs_with_them(pairs):
    """A method evaluated without corruptions has only its point for the test set."""
    run = _run("ensemble", 0)
    accuracy, *_ = corruption_blocks(
        load_report_data([pairs[0], (run, evaluate_run(run, _pictures()))])
    )
    assert [len(line.get_xdata()) for line in accuracy.figure.axes[0].get_lines()][0] == 6
    assert list(corruption_blocks(load_report_data([(run, evaluate_run(run, _pictures()))]))) == []


@pytest.mark.parametrize("count, shown", [(20, True), (3, False)])
def test_many_shifts_are_counted_and_few_are_not(count, shown, capsys):
    x = torch.zeros(1, 1)
    shifts = {f"shift-{i}": Split(x) for i in range(count)}
    with splits_ticker(Dataset("many", Split(x), shifts=shifts), quiet=False) as ticker:
        ticker.tick("shift:shift-0")
    assert (f"1/{count}  shift:shift-0" in capsys.readouterr().err) == shown
    assert not splits_ticker(Dataset("many", Split(x), shifts=shifts), quiet=True).show


def test_grid_of_names_the_severities():
    assert grid_of(["fog-5", "turned-1", "fog-1"]) == {"fog": [5, 1]}
