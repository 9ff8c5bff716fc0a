"""Runs whose method was chosen: in grids, on the page, on the command line, in estimators."""

import json

import numpy as np
import pytest
from small_runs import points

import shoal
from shoal.cli.main import main
from shoal.core.errors import ConfigError
from shoal.experiment.config import load_config
from shoal.experiment.grid import Grid, run_grid
from shoal.experiment.variants import parse_variants, swept, variant_of
from shoal.page.blocks import Fold, Table
from shoal.page.compare import groups_of
from shoal.page.measures import baseline
from shoal.page.report import _built_sections
from shoal.page.report_data import ReportData, RunRecord, load_report_data
from shoal.page.rerun_commands import commands
from shoal.page.sections.choice import choice_section
from shoal.page.sweep import sweeps
from shoal.training.folder.choice import CandidateResult, Choice, Trial
from shoal.training.folder.run import RunFolder

SMALL = ["model.hidden=[8]", "members=2", "steps=8", "data.points=20", "strength=none"]


def test_words_of_a_search():
    assert [v.label for v in parse_variants("auto,kde:auto,forde+fraction=0.5:auto")] == [
        "auto",
        "kde:auto",
        "forde+fraction=0.5:auto",
    ]
    assert swept(parse_variants("auto,kde:auto,kde"), (1.0,)) == parse_variants(
        "auto,kde:auto,kde:1"
    )
    assert variant_of("auto", "auto").label == "auto"
    for wrong in ("auto:3", "auto+fraction=0.5", "kde:automatic"):
        with pytest.raises(ConfigError, match="auto"):
            parse_variants(wrong)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    config = load_config("toy-classification", SMALL)
    found = Grid(
        config, tmp_path_factory.mktemp("grid"), parse_variants("ensemble,auto,kde:auto"), (2,), 2
    )
    assert run_grid(found, shoal.data.load(config.data)) == {}
    return found


def test_seeds_of_a_search_are_one_group_beside_the_plain_ensemble(grid):
    groups = groups_of(grid)
    assert [(group.label, len(group.entries)) for group in groups] == [
        ("ensemble", 2),
        ("auto", 2),
        ("kde:auto", 2),
    ]
    assert all(baseline(group, groups) is groups[0] for group in groups[1:])
    assert sweeps(groups) == []
    loaded = load_report_data([grid.place(point) for point in grid.points])
    assert [group.label for group in loaded.groups] == ["ensemble", "auto", "kde:auto"]
    (typed,) = commands(loaded.entries)
    assert "ensemble,auto,kde:auto" in typed


def test_a_finished_grid_of_searches_is_not_run_again(grid):
    assert grid.queue == []
    config = RunFolder(grid.place(grid.points[1])).config()
    assert config["asked"] == {"method": "auto"}
    repeated = load_config(grid.place(grid.points[2]) / "config.toml")
    assert repeated.method in ("kde", "ensemble")
    assert repeated.strength != "auto"


def test_the_page_shows_every_candidate(grid):
    runs = [grid.place(point) for point in grid.points]
    section = _built_sections(load_report_data(runs))["choice"]
    tables = [block for block in section.blocks if isinstance(block, Table)]
    assert len(tables[0].rows) == 4
    choice = RunFolder(runs[1]).choice()
    assert [row[0].text for row in tables[1].rows] == [
        candidate.label for candidate in choice.candidates
    ]
    assert sum(isinstance(block, Fold) for block in section.blocks) == 3
    assert choice_section(load_report_data(runs[:1])) is None


def record(chosen="kde:10", **choice):
    trial = Trial(25, 1.0, 0.5, 0.9, (-0.1, 0.02), (-0.3, 0.04))
    candidates = (
        CandidateResult("ensemble", "ensemble", None, (Trial(25, 1.0, 0.6, 1.2),)),
        CandidateResult("kde:10", None, 10.0, (trial,)),
        CandidateResult("kde:99", None, 99.0, failed="all members diverged"),
    )
    asked = {"method": "kde", "strength": "auto"}
    found = Choice(
        asked, chosen, "Because it is better.", candidates, "held-out data", 30, ("noise",), 1.5
    )
    config = {"method": "kde", "strength": 10.0, "seed": 0, "members": 2, "asked": asked}
    return RunRecord("run", config, [], [], {}, None, choice=found)


def test_one_run_tells_reason_price_and_failures():
    section = choice_section(ReportData([record()]))
    assert "strength" in section.question
    assert "Because it is better." in section.answer
    assert "1.5 trainings" in section.answer
    (table,) = section.blocks
    results = {row[0].text: row[-1].text for row in table.rows}
    assert results == {
        "ensemble": "not chosen",
        "kde:10": "chosen",
        "kde:99": "all members diverged",
    }


def test_a_run_is_called_by_the_word_that_asked_for_it():
    assert record().method == record().family == "kde:auto"
    assert not record().plain


def test_the_command_line_chooses(tmp_path, capsys):
    typed = ["fit", "toy-classification", *SMALL[:-1], "method=kde", "strength=auto"]
    assert main([*typed, "-o", str(tmp_path / "run"), "--json", "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["config"]["asked"] == {"method": "kde", "strength": "auto"}
    assert told["choice"]["chosen"] in [candidate["label"] for candidate in told["choice"]["arms"]]
    assert main([*typed, "-o", str(tmp_path / "run"), "--resume", "--quiet"]) == 0
    assert main(["fit", "toy-classification", "strength=strong", "-o", str(tmp_path / "b")]) == 2
    assert "auto" in capsys.readouterr().err


def test_an_estimator_of_scikit_learn_chooses():
    sklearn = pytest.importorskip("shoal.sklearn", reason="scikit-learn is not installed")
    x, y = (np.asarray(each) for each in points(60))
    model = sklearn.EnsembleClassifier(
        members=2, hidden=(4,), epochs=4, method="kde", strength="auto", random_state=0
    )
    assert model.fit(x, y).run_.choice.asked == {"method": "kde", "strength": "auto"}
