"""Grids in several processes that are killed: the same numbers, whoever dies on the way."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm import children

import shoal
from shoal.cli.main import main
from shoal.core.storage.checkpoints import steps

pytestmark = pytest.mark.usefixtures("warm")

NUMBERS = ("results.csv", "summary.csv")

LONG = ["steps=200", "save_every=0.05", "data.points=40", "batch_size=20", "strength=none"]
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
        assert main([*ARGUMENTS, "save_every=30"]) == 0


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    finish_in(folder)
    return numbers(folder)


@pytest.mark.kill
@pytest.mark.parametrize(
    "more",
    [(), pytest.param(("--jobs", "2"), marks=pytest.mark.nightly)],
    ids=["one", "two jobs"],
)
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
        workers = children(victim.pid) if more else []
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
        # workers end with whoever gave the orders
        while any(_runs(worker) for worker in workers):
            time.sleep(0.01)
        assert bool(workers) == bool(more)
        assert not (tmp_path / "grid" / "summary.csv").exists()
    finish_in(tmp_path)
    assert numbers(tmp_path) == left_alone


@pytest.mark.kill
def test_a_dead_worker_is_told_and_its_run_goes_on(tmp_path, left_alone):
    process = start_in(tmp_path, "--jobs", "2")
    wait_until(lambda: begun(tmp_path), process)
    at_work = [path.read_text().split()[0] for path in tmp_path.glob("grid/*-s*/lock")]
    os.kill(next(pid for pid in children(process.pid) if str(pid) in at_work), signal.SIGKILL)
    err = finished(process)
    (told,) = [line for line in err.splitlines() if "was ended by SIGKILL" in line]
    assert told.startswith("shoal: note: ") and "tried again" in told
    assert numbers(tmp_path) == left_alone


@pytest.mark.kill
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly)],
)
def test_a_signal_stops_every_worker_and_loses_nothing(tmp_path, left_alone, number, status):
    process = start_in(tmp_path, "--jobs", "2")
    wait_until(lambda: begun(tmp_path), process)
    workers = children(process.pid)
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
