"""Grids of runs: what is in them, what is skipped, and that being killed changes nothing."""

import csv
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from small_runs import assert_one_sentence

from shoal.cli.commands import demo
from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.core.storage.files import write_text
from shoal.core.storage.lock import FolderLock
from shoal.experiment import grid as grids
from shoal.experiment.build import make_data
from shoal.experiment.config import load_config
from shoal.experiment.grid import Grid, GridPoint, run_grid
from shoal.experiment.variants import (
    PUBLISHED,
    Variant,
    options_of,
    parse_strengths,
    parse_variants,
    swept,
    variant_of,
)
from shoal.interaction import methods
from shoal.page import compare as compare_page
from shoal.page.compare import comparison_text, comparison_value, groups_of, results_csv
from shoal.page.verdicts import decide_groups
from shoal.prediction.statistics import mean_and_error, paired_difference

pytestmark = pytest.mark.usefixtures("warm")

CHANGES = ["model.hidden=[8]", "members=2", "steps=6", "data.points=10", "strength=none"]


@pytest.fixture(scope="module")
def config():
    return load_config("toy-classification", CHANGES)


@pytest.fixture(scope="module")
def data(config):
    return make_data(config)


@pytest.fixture(scope="module")
def done(config, data, tmp_path_factory):
    """A finished grid of two methods, one of them at two strengths, by three seeds."""
    folder = tmp_path_factory.mktemp("grid")
    grid = Grid(config, folder, parse_variants("ensemble,kde,kde:1e5"), (2,), 3)
    assert run_grid(grid, data) == {}
    return grid


# What is in it


def test_cells_come_seed_by_seed(config, tmp_path):
    grid = Grid(replace(config, seed=4), tmp_path, parse_variants("ensemble,kde:300"), (1, 5), 2)
    names = [point.name for point in grid.points]
    assert names[:4] == ["ensemble-m1-s4", "kde-x300-m1-s4", "ensemble-m5-s4", "kde-x300-m5-s4"]
    assert [point.seed for point in grid.points] == [4] * 4 + [5] * 4


def test_a_cell_is_the_config_with_its_own_method_size_and_seed(config, tmp_path):
    grid = Grid(config, tmp_path, parse_variants("kde:300"), (5,), 1)
    assert grid.config_of(GridPoint(Variant("kde", 300.0), 5, 7)) == replace(
        config, method="kde", strength=300.0, members=5, seed=7
    )


def test_variants():
    assert [variant.method for variant in parse_variants("all")] == list(PUBLISHED)
    assert len(PUBLISHED) == 9 and all(len(methods.get(name).cite) for name in PUBLISHED)
    assert parse_variants(" kde , kde,kde:1e3") == (Variant("kde"), Variant("kde", 1000.0))
    assert parse_variants("kde:1e3")[0].label == "kde:1000"


def test_settings_of_a_method_are_part_of_its_name(tmp_path):
    (quarter,) = parse_variants("forde+fraction=0.25:16")
    assert quarter == Variant("forde", 16.0, (("fraction", 0.25),))
    assert parse_variants(quarter.label) == (quarter,)
    (tuned,) = parse_variants("forde-tuned+fraction=0.25+alpha=0.4")
    assert tuned.spec == {"name": "forde-tuned", "alpha": 0.4, "fraction": 0.25}
    assert tuned.label == "forde-tuned+alpha=0.4+fraction=0.25"
    (likely,) = parse_variants("f-kde+probabilities=true")
    assert likely.spec == {"name": "f-kde", "probabilities": True}
    assert likely.label == "f-kde+probabilities=true"
    (swept_once,) = swept(parse_variants("forde+fraction=0.25"), (16.0,))
    assert swept_once == quarter
    config = load_config("digits-forde", [])
    grid = Grid(config, tmp_path, (quarter, Variant("forde")), (2,), 1)
    first, second = map(grid.config_of, grid.points)
    assert first.method == {"name": "forde", "fraction": 0.25} and first.strength == 16.0
    assert second.method == "forde"
    assert len({point.name for point in grid.points}) == 2


def test_a_variant_may_change_options_of_its_runs(tmp_path):
    words = "ensemble,ensemble+batches=own+members=11,kde+epochs=7+prior.std=0.5:300,auto+lr=0.1"
    variants = parse_variants(words)
    assert ",".join(variant.label for variant in variants) == words
    config = load_config("digits", [])
    grid = Grid(config, tmp_path, variants, (2, 3), 1)
    assert [point.name for point in grid.points] == [
        "ensemble-m2-s0",
        "ensemble+batches=own+members=11-m11-s0",
        "kde+epochs=7+prior.std=0.5-x300-m2-s0",
        "auto+lr=0.1-m2-s0",
        "ensemble-m3-s0",
        "kde+epochs=7+prior.std=0.5-x300-m3-s0",
        "auto+lr=0.1-m3-s0",
    ]
    plain, own, kde, auto = map(grid.config_of, grid.points[:4])
    assert plain == replace(config, members=2, method="ensemble")
    assert own == replace(plain, batches="own", members=11)
    assert (kde.epochs, kde.prior["std"], kde.strength) == (7, 0.5, 300.0)
    assert auto.lr == 0.1
    assert grid.config_of(GridPoint(*_steps(parse_variants("ensemble+steps=9")))).epochs is None
    assert [options_of(point.name) for point in grid.points[:4]] == [v.options for v in variants]


def _steps(variants):
    return variants[0], 2, 0


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("ensemble+members=x", "members"),
        ("ensemble+epochs=", "epochs"),
        ("ensemble+batches=a/b", "batches"),
        ("ensemble+seed=3", "seed"),
    ],
)
def test_odd_options_of_a_variant_are_one_sentence(word, part):
    with pytest.raises(ConfigError, match=part) as error:
        parse_variants(word)
    assert_one_sentence(error.value)


@pytest.mark.parametrize(
    ("method", "label"),
    [
        ("kde", "kde"),
        ({"name": "forde", "fraction": 0.25}, "forde+fraction=0.25"),
        ({"name": "kde"}, "kde"),
        ({"name": "forde", "strength": 4.0}, "custom"),
        ({"name": "forde", "target": "log-probability"}, "custom"),
        ({"name": "repulsion", "space": "outputs"}, "custom"),
        ({"space": "outputs"}, "custom"),
    ],
)
def test_the_method_of_a_config_in_words(method, label):
    assert variant_of(method).label == label


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("forde+fractoin=0.25", "fraction"),
        ("forde+fraction=2", "fraction"),
        ("forde+fraction", "a name and a number"),
        ("f-kde+probabilities=2", "probabilities"),
        ("ensemble+fraction=0.25", "no repulsion"),
        ("custom+fraction=0.25", "in the config"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(word, says):
    with pytest.raises(ConfigError, match=says):
        parse_variants(word)


def test_strengths_are_swept_for_what_repels():
    variants = parse_variants("ensemble,kde,f-kde:7,custom")
    labels = [variant.label for variant in swept(variants, parse_strengths("1,10,10"))]
    assert labels == ["ensemble", "kde:1", "kde:10", "f-kde:7", "custom:1", "custom:10"]


@pytest.mark.parametrize("text", ["", "1,x", "0", "-1", "inf", "nan", "1,,2"])
def test_strengths_are_positive_numbers(text):
    with pytest.raises(ConfigError) as error:
        parse_strengths(text)
    assert_one_sentence(error.value, "--strengths 1,10,100", repr(text))


def test_the_longest_runs_come_first_within_a_seed(config, tmp_path):
    grid = Grid(config, tmp_path, parse_variants("ensemble,ssge"), (1, 5), 2)
    names = [point.name for point in grid.queue]
    assert names[:4] == ["ssge-m5-s0", "ensemble-m5-s0", "ssge-m1-s0", "ensemble-m1-s0"]
    assert sorted(names) == sorted(point.name for point in grid.points)


def test_two_cannot_run_one_grid_at_once(done, data):
    with FolderLock(done.folder), pytest.raises(StorageError, match="is being written by"):
        run_grid(done, data)


def test_a_composition_of_ones_own_can_be_compared(config, data, tmp_path):
    own = replace(config, method={"kernel": "imq"})
    grid = Grid(own, tmp_path, parse_variants("ensemble,custom"), (2,), 1)
    assert run_grid(grid, data) == {}
    assert [group.label for group in groups_of(grid)] == ["ensemble", "custom"]
    with pytest.raises(ConfigError, match="defines no repulsion"):
        run_grid(replace(grid, config=config, folder=tmp_path / "b"), data)


# What is skipped


def test_what_is_done_is_not_done_again(done, data, monkeypatch):
    monkeypatch.setattr(grids, "train", lambda *args, **options: pytest.fail("trained again"))
    ticks = []
    assert run_grid(done, data, ticks.append) == {}
    assert ticks == []


def test_a_grid_grows(done, data, monkeypatch):
    trained = []
    monkeypatch.setattr(grids, "evaluate_run", lambda run, data: trained.append(run.config))
    grown = replace(done, variants=(*done.variants, Variant("svgd")), sizes=(2, 3), seeds=4)
    run_grid(grown, data)
    new = len(grown.points) - len(done.points)
    assert len(trained) == new == 4 * 2 * 4 - 9
    assert all(not done.is_done(point) for point in grown.points if point.members == 3)


def test_a_grid_older_than_a_setting_has_its_default(done, data):
    path = done.folder / "grid.toml"
    text = path.read_text()
    older = [line for line in text.splitlines() if not line.startswith(("frozen", "calibrated"))]
    path.write_text("\n".join(older))
    run_grid(done, data)
    path.write_text(text)


def test_runs_of_other_settings_are_never_mixed(done, data):
    with pytest.raises(ConfigError, match="holds runs with lr = 0.01, not 0.5"):
        run_grid(replace(done, config=replace(done.config, lr=0.5)), data)
    with pytest.raises(ConfigError, match="holds runs with strength = None, not 2.0"):
        run_grid(replace(done, config=replace(done.config, strength=2.0)), data)


def test_methods_cannot_be_compared_without_a_test_part(done, data):
    with pytest.raises(DataError, match="no test set"):
        run_grid(done, replace(data, test=None))


@pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")
def test_a_run_that_comes_to_nothing_does_not_stop_the_others(config, data, tmp_path):
    wild = replace(config, optimizer="sgd", temperature=1e15)
    grid = Grid(wild, tmp_path, parse_variants("kde:1e15,ensemble"), (2,), 1)
    failed = run_grid(grid, data)
    assert list(failed) == [GridPoint(Variant("kde", 1e15), 2, 0)]
    assert "all members diverged" in str(failed[grid.points[0]])
    assert [group.label for group in groups_of(grid)] == ["ensemble"]


# What it tells


def column(grid, label, key):
    rows = csv.DictReader(io.StringIO(results_csv(groups_of(grid))))
    return [float(row[key]) for row in rows if row["method"] == label]


def test_every_run_has_its_row(done):
    rows = list(csv.DictReader(io.StringIO(results_csv(groups_of(done)))))
    assert len(rows) == len(done.points)
    for point in done.points:
        scores = json.loads((done.place(point) / "scores.json").read_text())
        (row,) = [
            r for r in rows if (r["method"], r["seed"]) == (point.variant.label, str(point.seed))
        ]
        assert float(row["test.nll"]) == scores["test"]["nll"]
        assert float(row["ood.ring.recognised"]) == scores["ood"]["ring"]["recognised"]


def test_means_and_paired_differences_are_those_of_the_runs(done):
    plain = column(done, "ensemble", "test.nll")
    for group in comparison_value(decide_groups(groups_of(done))):
        values = column(done, group["method"], "test.nll")
        found = group["scores"]["test/nll"]
        assert (found["mean"], found["error"]) == pytest.approx(mean_and_error(values))
        if group["method"] == "ensemble":
            assert "to_ensemble" not in found
        else:
            expected = paired_difference(values, plain)._asdict()
            assert found["to_ensemble"] == pytest.approx(expected)


def test_repulsion_changes_the_strong_variant_and_leaves_the_weak_one_apart(done):
    plain, weak, strong = (
        column(done, label, "test.nll") for label in ("ensemble", "kde", "kde:100000")
    )
    assert plain != weak != strong


def test_the_table_shows_every_group(done):
    text = comparison_text(decide_groups(groups_of(done)))
    for label in ("ensemble", "kde", "kde:100000"):
        assert any(line.startswith(f"{label} ") for line in text.splitlines())
    assert "Mean ± standard error over 3 seeds" in text
    assert "Difference to the plain ensemble" in text


def test_one_seed_has_no_error_bars(done):
    single = replace(done, seeds=1)
    family = decide_groups(groups_of(single))
    assert comparison_text(family).startswith("One seed, no error bars")
    assert math.isnan(comparison_value(family)[0]["scores"]["test/nll"]["error"])


# From the command line

ARGUMENTS = ["compare", "toy-classification", *CHANGES[:2], "data.points=40", "batch_size=20"]
ARGUMENTS += ["steps=250", "save_every=0.1", "--methods", "ensemble,kde", "--seeds", "2"]


def start_in(folder):
    command = [sys.executable, "-m", "shoal.cli.start", *ARGUMENTS, "-o", "grid"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, "the grid ended before it could be killed"
        time.sleep(0.01)


@pytest.mark.kill
def test_a_killed_grid_goes_on_to_the_same_numbers(tmp_path, monkeypatch, capsys):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    monkeypatch.chdir(whole)
    assert main([*ARGUMENTS, "-o", "grid"]) == 0
    capsys.readouterr()
    victim = start_in(cut)
    second = cut / "grid" / "kde-m2-s0"
    wait_until(lambda: list(second.glob("checkpoints/*/*.json")), victim)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    # the kill may come late; what was done by then is told below
    done = len(list((cut / "grid").glob("*/scores.json")))
    assert 1 <= done < 4 and (cut / "grid" / "ensemble-m2-s0" / "scores.json").exists()
    monkeypatch.chdir(cut)
    assert main([*ARGUMENTS, "-o", "grid"]) == 0
    out, err = capsys.readouterr()
    assert f"4 runs in grid: 2 methods, 1 size, 2 seeds; {done} done already" in err
    assert "4/4" in err and "ensemble, 2 members, seed 0" not in err
    results = [folder / "grid" / "results.csv" for folder in (whole, cut)]
    assert results[0].read_text() == results[1].read_text()
    assert "results grid/results.csv" in out


def test_compare_with_a_page_and_as_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", "toy-classification", *CHANGES, "--seeds", "2", "--sizes", "1,2"]
    assert main([*arguments, "--report", "page.html", "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert [(group["method"], group["members"]) for group in value["groups"]] == [
        ("ensemble", 1),
        ("f-kde", 1),
        ("ensemble", 2),
        ("f-kde", 2),
    ]
    assert err == ""
    page = (tmp_path / value["page"]).read_text()
    assert page.startswith("<!") and "The family of tests" in page
    assert value["power"]["seeds"] == 2 and "cannot decide" in value["power"]["sentence"]
    assert any("not decided" in answer for answer in value["answers"])
    assert (tmp_path / value["results"]).exists()


def test_power_and_margin_are_said(done, tmp_path, capsys):
    """Finished runs give power its unit, and a wide margin makes methods equal."""
    grid = replace(done, folder=shutil.copytree(done.folder, tmp_path / "grid"))
    wide = compare_page.compare_grid(grid, margins={"nll": 100.0})
    assert "3 seeds find a difference in NLL of " in capsys.readouterr().err
    decided = wide.scores[1]["scores"]["test/nll"]["decision"]
    assert (decided["within"], decided["margin"]) == (True, 100.0)
    assert "NLL 100 nats" in str(wide) and wide.power.value["differences"]["test/nll"]["family"] > 0


def test_a_margin_is_checked_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "toy-classification", "--margin", "nll"]) == 2
    assert "such as nll=0.01" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")
def test_compare_tells_of_runs_that_came_to_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wild = ["optimizer=sgd", "temperature=1e15", "--methods", "kde:1e15", "--seeds", "1"]
    assert main(["compare", "toy-classification", *CHANGES, *wild, "-q"]) == 65
    assert "every run failed: all members diverged" in capsys.readouterr().err


def test_the_demo_reports_on_a_plain_ensemble_and_then_compares(tmp_path, monkeypatch, capsys):
    small = load_config("digits", ["epochs=1", "model.hidden=[8]"])
    monkeypatch.setattr(demo, "load_config", lambda name: small if name == "digits" else None)
    counted = lambda runs, path, **_: write_text(path, str(len(runs)))  # noqa: E731
    monkeypatch.setattr(compare_page, "write_report", counted)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--seeds", "1", "-q"]) == 0
    assert "results runs/demo/results.csv" in capsys.readouterr().out
    assert (tmp_path / "runs/demo/report.html").read_text() == "1"
    methods = parse_variants(demo.METHODS)
    assert (tmp_path / "runs/demo/comparison.html").read_text() == str(len(methods))
    assert not methods[0].repels
    assert all(variant.repels for variant in methods[1:])
