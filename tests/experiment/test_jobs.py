"""Grids in several processes: the same numbers, whoever dies on the way."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import assert_one_sentence

import shoal
from shoal.cli.main import main
from shoal.core.checkpoints import steps
from shoal.core.errors import DataError, PeerLost, ShoalWarning, StorageError
from shoal.experiment import jobs
from shoal.experiment.build import make_data
from shoal.experiment.config import load_config
from shoal.experiment.grid import Grid, GridPoint, check_grid, run_grid
from shoal.experiment.jobs import pool
from shoal.experiment.jobs.messages import error_of, first_order, point_of, point_order, task_of
from shoal.experiment.variants import Variant, parse_variants

CHANGES = ["model.hidden=[8]", "members=2", "batch_size=64"]
NUMBERS = ("results.csv", "summary.csv")


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


def test_an_error_of_a_worker_is_the_same_here(tmp_path):
    grid = grid_of(tmp_path, "steps=5", methods="ensemble", seeds=1)
    grid.place(grid.points[0]).write_text("a file where the folder should be")
    with pytest.raises(StorageError) as error:
        jobs.run_jobs(grid, 2)
    assert_one_sentence(error.value, "ensemble-m2-s0")


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


# Deaths

LONG = ["steps=400", "save_every=0.05", "data.points=40", "batch_size=20", "strength=none"]
ARGUMENTS = ["compare", "toy-classification", "model.hidden=[8]", "members=2", *LONG]
ARGUMENTS += ["--methods", "ensemble,kde", "--seeds", "2", "-o", "grid"]


def start_in(folder, *more):
    folder.mkdir(exist_ok=True)
    home = str(Path(shoal.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.cli.start", *ARGUMENTS, *more],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": home},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process):
    _, err = process.communicate()
    assert process.returncode == 0, err
    return err


def begun(folder):
    """Runs of which some steps are kept but which are not finished."""
    return [
        run
        for run in (folder / "grid").glob("*-s*")
        if steps(run / "checkpoints") and not (run / "scores.json").exists()
    ]


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def numbers(folder):
    return [(folder / "grid" / name).read_text() for name in NUMBERS]


def finish_in(folder):
    """Type the same once more, in this process, which takes up what the workers have left."""
    with contextlib.chdir(folder):
        assert main(ARGUMENTS) == 0


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    finish_in(folder)
    return numbers(folder)


@pytest.mark.kill
@pytest.mark.parametrize("more", [(), ("--jobs", "2")], ids=["one", "two jobs"])
def test_a_grid_killed_twice_ends_with_the_numbers_of_one_left_alone(tmp_path, left_alone, more):
    for _ in range(2):
        known = set(begun(tmp_path))
        done = len(list((tmp_path / "grid").glob("*/scores.json")))
        victim = start_in(tmp_path, *more)
        # only once this process has itself taken steps that a kill would lose
        wait_until(
            lambda known=known, done=done: (
                set(begun(tmp_path)) - known
                or len(list((tmp_path / "grid").glob("*/scores.json"))) > done
            ),
            victim,
        )
        workers = workers_of(victim) if more else []
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        # workers end with whoever gave the orders
        while any(_runs(worker) for worker in workers):
            time.sleep(0.01)
        assert bool(workers) == bool(more)
        assert not (tmp_path / "grid" / "summary.csv").exists()
    finish_in(tmp_path)
    assert numbers(tmp_path) == left_alone


def workers_of(process):
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not path.exists():
        pytest.skip("this system does not list the children of a process")
    return [int(word) for word in path.read_text().split()]


@pytest.mark.kill
def test_a_dead_worker_is_told_and_its_run_goes_on(tmp_path, left_alone):
    process = start_in(tmp_path, "--jobs", "2")
    wait_until(lambda: begun(tmp_path), process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    err = finished(process)
    (told,) = [line for line in err.splitlines() if "was ended by SIGKILL" in line]
    assert told.startswith("shoal: note: a worker") and "another worker continues" in told
    assert numbers(tmp_path) == left_alone


@pytest.mark.kill
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_every_worker_and_loses_nothing(tmp_path, left_alone, number, status):
    process = start_in(tmp_path, "--jobs", "2")
    wait_until(lambda: begun(tmp_path), process)
    workers = workers_of(process)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == status
    assert "stopped; type the same command again" in err
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    finish_in(tmp_path)
    assert numbers(tmp_path) == left_alone


def _runs(pid):
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_two_jobs_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["compare", "digits", *CHANGES, "steps=5", "--seeds", "1", "--jobs", "2", "--json"]
    assert main([*arguments, "--methods", "ensemble,kde", "--strengths", "1,10"]) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert [group["method"] for group in value["groups"]] == ["ensemble", "kde:1", "kde:10"]
    assert Path(value["summary"]).exists() and "3/3" in err
