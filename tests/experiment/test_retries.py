"""Failed runs of a grid: which are tried again, what is told, and that the others are kept."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError, PeerLost, RunFailed, ShoalWarning
from shoal.experiment import grid as grids
from shoal.experiment.build import make_data
from shoal.experiment.config import load_config
from shoal.experiment.grid import Attempts, Grid, run_grid
from shoal.experiment.jobs import pool
from shoal.experiment.jobs.pool import VISIBLE
from shoal.experiment.variants import parse_variants
from shoal.page.compare import compare_grid

CHANGES = ["model.hidden=[4]", "members=2", "steps=2", "data.points=20", "strength=none"]


@pytest.fixture
def grid(tmp_path):
    config = load_config("toy-classification", CHANGES)
    return Grid(config, tmp_path / "grid", parse_variants("ensemble,kde"), (2,), 2)


@dataclass
class Failing:
    """Stands for `run_point`: one run raises so many times, then trains like the others."""

    name: str
    error: Exception
    times: int
    tried: list[str] = field(default_factory=list)

    def __call__(self, grid, point, *rest):
        self.tried.append(point.name)
        if point.name == self.name and self.tried.count(point.name) <= self.times:
            raise self.error
        return RUN_POINT(grid, point, *rest)


RUN_POINT = grids.run_point


@pytest.mark.parametrize(
    ("error", "retries", "attempts"),
    [
        (ZeroDivisionError("by zero"), 1, 2),
        (ZeroDivisionError("by zero"), 0, 1),
        (PeerLost("gone"), 3, 4),
        (DataError("not a number"), 3, 1),
        (ConfigError("no such thing"), 3, 1),
    ],
)
@pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")
def test_a_run_that_always_fails_is_given_up(grid, monkeypatch, error, retries, attempts):
    spoiled = grid.points[1]
    failing = Failing(spoiled.name, error, times=99)
    monkeypatch.setattr(grids, "run_point", failing)
    failed = run_grid(grid, make_data(grid.config), retries=retries)
    assert list(failed) == [spoiled] and str(error) in str(failed[spoiled])
    assert failing.tried.count(spoiled.name) == attempts
    assert [point for point in grid.points if not grid.is_done(point)] == [spoiled]


def test_a_run_that_fails_once_is_tried_after_the_others(grid, monkeypatch):
    first = grid.queue[0]
    failing = Failing(first.name, OSError("the disk was away"), times=1)
    monkeypatch.setattr(grids, "run_point", failing)
    ticks = []
    with pytest.warns(ShoalWarning, match=f"{first.name}.*the disk was away"):
        assert run_grid(grid, make_data(grid.config), ticks.append) == {}
    assert failing.tried[0] == failing.tried[-1] == first.name and len(failing.tried) == 5
    assert sorted(point.name for point in ticks) == sorted(point.name for point in grid.points)


@pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")
def test_the_table_names_what_is_missing(grid, monkeypatch):
    spoiled = grid.points[3]
    monkeypatch.setattr(grids, "run_point", Failing(spoiled.name, OSError("a\nb"), 99))
    found = compare_grid(grid, progress=False)
    assert isinstance(found.failed[spoiled], RunFailed)
    (line,) = [line for line in str(found).splitlines() if spoiled.name in line]
    assert line.endswith("OSError: b") and "Missing from the table: 1 run" in str(found)


@pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")
def test_if_every_run_fails_the_first_error_is_raised(grid, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(grids, "run_point", broken)
    with pytest.raises(RunFailed, match="every run failed: ZeroDivisionError: by zero") as raised:
        compare_grid(grid, progress=False)
    assert isinstance(raised.value.__cause__.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("wrong", ["-1", "two", "1.5", ""])
def test_retries_are_counted(wrong, capsys):
    assert main(["compare", "digits", f"--retries={wrong}"]) == 2
    assert "the number of retries is 0 or more" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        Attempts(-1)


class Untrained(pool.Worker):
    """A worker without a process, on the GPU that it was given."""

    def __init__(self, point, inbox, gpu):
        self.point, self.gpu, self.ready, self.fault = point, gpu, True, None

    def give(self, point):
        self.point = point

    def end(self):
        return -9


def test_jobs_take_the_gpus_in_turn_and_a_new_worker_takes_the_place_of_a_dead_one(
    grid, monkeypatch
):
    monkeypatch.setenv(VISIBLE, "3,7")
    on_gpu = replace(grid, config=replace(grid.config, device="cuda"))
    jobs = pool.Pool(on_gpu, 3, lambda point: None, Untrained, Attempts(1))
    assert [worker.gpu for worker in jobs.workers] == ["3", "7", "3"]
    with pytest.warns(ShoalWarning, match="tried again"):
        jobs._inbox.put((jobs.workers[1], None))
        jobs.attend(0)
    assert [worker.gpu for worker in jobs.workers] == ["3", "3", "7"]


def test_a_worker_sees_its_gpu_only(monkeypatch):
    monkeypatch.setenv(VISIBLE, "3,7")
    assert pool._environment(1, "7")[VISIBLE] == "7"
    assert pool._environment(1, None)[VISIBLE] == "3,7"
    assert Path(pool._environment(1, None)["PYTHONPATH"].split(":")[0], "shoal").is_dir()
