"""Grids in several processes: the same numbers, whoever dies on the way."""

import json
import sys
from pathlib import Path

import pytest
from small_runs import assert_one_sentence

from shoal.cli.main import main
from shoal.core.errors import DataError, PeerLost, ShoalWarning, StorageError
from shoal.experiment import jobs
from shoal.experiment.build import make_data
from shoal.experiment.config import load_config
from shoal.experiment.grid import Grid, GridPoint, check_grid, run_grid
from shoal.experiment.jobs import pool
from shoal.experiment.jobs.messages import error_of, first_order, point_of, point_order, task_of
from shoal.experiment.variants import Variant, parse_variants

pytestmark = pytest.mark.usefixtures("warm")

CHANGES = ["model.hidden=[8]", "members=2", "batch_size=64"]


def grid_of(folder, *changes, methods="ensemble,kde:100", seeds=2, name="digits"):
    grid = Grid(
        load_config(name, [*CHANGES, *changes]), folder, parse_variants(methods), (2,), seeds
    )
    check_grid(grid, make_data(grid.config))
    return grid


def scores(grid):
    return {point.name: (grid.place(point) / "scores.json").read_text() for point in grid.points}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A grid that two jobs have trained, and the points in the order they were done."""
    grid, ticks = grid_of(tmp_path_factory.mktemp("shared"), "epochs=2"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["/usr/bin/shoal", "compare", "digits", "--jobs", "2"])
        assert jobs.run_jobs(grid, 2, ticks.append) == {}
    return grid, ticks


def test_two_jobs_give_the_numbers_of_one_bit_for_bit(tmp_path, shared):
    alone, (shared, ticks) = grid_of(tmp_path, "epochs=2"), shared
    assert run_grid(alone, make_data(alone.config)) == {}
    assert scores(alone) == scores(shared)
    assert sorted(point.name for point in ticks) == sorted(point.name for point in shared.points)
    for point in alone.points:
        weights = "checkpoints/step-*/ensemble.safetensors"
        (mine,), (theirs,) = (g.place(point).glob(weights) for g in (alone, shared))
        assert mine.read_bytes() == theirs.read_bytes()


def test_a_run_of_a_worker_names_what_was_typed(shared):
    grid, _ = shared
    told = json.loads((grid.place(grid.points[0]) / "provenance.json").read_text())
    assert told["command"] == "shoal compare digits --jobs 2"


def test_what_is_done_is_not_done_again(shared):
    grid, _ = shared
    before = scores(grid), (grid.place(grid.points[0]) / "scores.json").stat().st_mtime_ns
    assert jobs.run_jobs(grid, 2, lambda point: pytest.fail("done again")) == {}
    assert before == (scores(grid), (grid.place(grid.points[0]) / "scores.json").stat().st_mtime_ns)


def test_a_run_that_comes_to_nothing_does_not_stop_the_others(tmp_path):
    wild = ["optimizer=sgd", "temperature=1e15", "steps=6", "data.points=10", "strength=none"]
    grid = grid_of(tmp_path, *wild, methods="kde:1e15,ensemble", seeds=1, name="toy-classification")
    with pytest.warns(ShoalWarning, match="diverged"):
        failed = jobs.run_jobs(grid, 2)
    assert list(failed) == [GridPoint(Variant("kde", 1e15), 2, 0)]
    (why,) = failed.values()
    assert isinstance(why, DataError) and "all members diverged" in str(why)
    assert list(scores(Grid(grid.config, tmp_path, parse_variants("ensemble"), (2,), 1)))


def test_a_failed_run_is_tried_again_and_keeps_the_type_of_its_error(tmp_path):
    grid = grid_of(tmp_path, "steps=5", seeds=1)
    spoiled, sound = grid.points
    grid.place(spoiled).write_text("a file where the folder should be")
    with pytest.warns(ShoalWarning) as told:
        failed = jobs.run_jobs(grid, 2, retries=2)
    assert [spoiled.name in str(each.message) for each in told] == [True, True]
    assert list(failed) == [spoiled] and grid.is_done(sound)
    assert isinstance(failed[spoiled], StorageError)
    assert_one_sentence(failed[spoiled], "ensemble-m2-s0")


def test_an_unexpected_error_loses_one_run_only(tmp_path, monkeypatch, bare):
    """A network that cannot be built is no error of Shoal's own: its worker dies of it."""
    grid = grid_of(tmp_path, "steps=5", seeds=1)
    spoiled, sound = grid.points
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SPOIL.format(spoiled=spoiled.name))
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    with pytest.warns(ShoalWarning, match="tried again"):
        failed = jobs.run_jobs(grid, 2)
    assert list(failed) == [spoiled] and grid.is_done(sound)
    assert failed[spoiled].exit_status == 70
    assert_one_sentence(failed[spoiled], "ZeroDivisionError", "no more luck")


SPOIL = """
import sys
from importlib.abc import MetaPathFinder

class Spoil(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "shoal.experiment.jobs.messages":
            import shoal.experiment.grid as grid
            original = grid.run_point
            def run_point(a, point, *rest):
                if point.name == "{spoiled}":
                    raise ZeroDivisionError("a long story\\nno more luck")
                return original(a, point, *rest)
            grid.run_point = run_point
        return None

sys.meta_path.insert(0, Spoil())
"""


def test_a_worker_that_cannot_begin_is_told(tmp_path, monkeypatch):
    grid = grid_of(tmp_path, "steps=5", methods="ensemble", seeds=1)
    monkeypatch.setattr(pool.sys, "executable", "/bin/false")
    with pytest.raises(PeerLost) as error:
        jobs.run_jobs(grid, 2)
    assert_one_sentence(error.value, "could not start", "status 1", "--debug")


def test_orders_come_back_as_they_went(tmp_path):
    grid = grid_of(tmp_path, "steps=5")
    task = task_of(first_order(grid, 3))
    assert (task.grid.config, task.grid.folder, task.threads) == (grid.config, tmp_path, 3)
    for point in grid.points:
        assert point_of(point_order(point)) == point
    told = error_of({"kind": "StorageError", "text": "full"})
    assert isinstance(told, StorageError) and str(told) == "full"


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "1.5", ""])
def test_jobs_are_counted(wrong, capsys):
    assert main(["compare", "digits", f"--jobs={wrong}"]) == 2
    assert "the number of jobs is 1 or more" in capsys.readouterr().err


def test_two_jobs_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", "digits", *CHANGES, "steps=5", "--seeds", "1", "--jobs", "2", "--json"]
    assert main([*arguments, "--methods", "ensemble,kde", "--strengths", "1,10"]) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert [group["method"] for group in value["groups"]] == ["ensemble", "kde:1", "kde:10"]
    assert Path(value["summary"]).exists() and "3/3" in err
