"""Grids as jobs of submitit: on its executor for this machine, and on a SLURM of one machine."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fake_slurm
import pytest
from small_runs import assert_one_sentence

from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError, PeerLost, RunFailed, ShoalWarning
from shoal.core.storage.checkpoints import steps
from shoal.experiment.build import make_data
from shoal.experiment.config import load_config
from shoal.experiment.grid import Attempts, Grid, check_grid, run_grid
from shoal.experiment.variants import parse_variants
from shoal.integrations import submitit as ours
from shoal.integrations.submitit import Cluster, Request, parse_request, run_submitted

pytest.importorskip("submitit")
pytestmark = pytest.mark.usefixtures("warm")

CHANGES = ["model.hidden=[4]", "members=2", "data.points=20", "batch_size=20", "strength=none"]
NOTHING = Attempts(0)


def grid_of(folder, *changes, methods="ensemble"):
    config = load_config("toy-classification", [*CHANGES, *changes])
    grid = Grid(config, folder, parse_variants(methods), (2,), 1)
    check_grid(grid, make_data(grid.config))
    return grid


def weights(grid, point):
    return max(grid.place(point).glob("checkpoints/step-*/ensemble.safetensors")).read_bytes()


def process_of(folder):
    """The process that trains in a run folder, once it has saved some steps; None before."""
    try:
        return int((folder / "lock").read_text().split()[0]) if steps(folder / "checkpoints") else 0
    except (OSError, IndexError):
        return 0


def wait_for(condition):
    """The first true value of a condition."""
    while not (found := condition()):
        time.sleep(0.01)
    return found


@pytest.mark.kill
def test_a_preempted_job_saves_and_its_successor_ends_with_the_same_weights(tmp_path):
    """SIGUSR2 is what SLURM sends before a time limit and, if told to, before a preemption."""
    long = ("steps=400", "save_every=0.05")
    grid, alone = grid_of(tmp_path / "jobs", *long), grid_of(tmp_path / "alone", *long)
    (point,) = grid.points
    cluster = Cluster(grid, Request("local", jobs=2), lambda point: None, NOTHING)
    cluster.submit()
    job = cluster.running[point]
    folder = grid.place(point)
    first = wait_for(lambda: process_of(folder))
    os.kill(first, signal.SIGUSR2)
    while cluster.running:
        cluster.collect()
        time.sleep(0.05)
    assert grid.is_done(point) and not NOTHING.failed
    log = Path(job.paths.stdout).read_text() + Path(job.paths.stderr).read_text()
    assert "Requeued job" in log
    assert run_grid(alone, make_data(alone.config)) == {}
    assert weights(grid, point) == weights(alone, point)
    told = [(g.place(point) / "scores.json").read_text() for g in (grid, alone)]
    assert told[0] == told[1]


@pytest.mark.nightly
@pytest.mark.kill
def test_a_killed_job_is_tried_again_and_a_failed_run_is_named(tmp_path):
    grid = grid_of(tmp_path, "steps=400", "save_every=0.05", methods="ensemble,kde")
    sound, spoiled = grid.points
    grid.place(spoiled).write_text("a file where the folder should be")
    cluster = Cluster(grid, Request("local", jobs=2), lambda point: None, Attempts(1))
    cluster.submit()
    os.kill(wait_for(lambda: process_of(grid.place(sound))), signal.SIGKILL)
    with pytest.warns(ShoalWarning) as told:
        while cluster.waiting or cluster.running:
            cluster.submit()
            cluster.collect()
            time.sleep(0.05)
    texts = [str(each.message) for each in told]
    assert len(texts) == 2 and any(sound.name in text for text in texts)
    assert grid.is_done(sound) and list(cluster.attempts.failed) == [spoiled]
    assert cluster.attempts.failed[spoiled].exit_status == 74


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A machine with the commands of SLURM; the folder has the states of its jobs."""
    commands, states = tmp_path / "bin", tmp_path / "states"
    commands.mkdir()
    states.mkdir()
    fake_slurm.install(commands)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    monkeypatch.setenv("FAKE_SLURM", str(states))
    return states


@pytest.mark.kill
def test_slurm_takes_an_array_and_the_same_command_finds_its_jobs_again(tmp_path, slurm):
    grid = grid_of(tmp_path / "grid", "steps=400", "save_every=0.05", methods="ensemble,kde")
    request = Request("slurm", 90, 2, 1, {"slurm_partition": "gpu", "mem_gb": 4})
    lost = Cluster(grid, request, lambda point: None, NOTHING)
    lost.submit()
    numbers = sorted(job.job_id for job in lost.running.values())
    assert numbers == ["77_0", "77_1"]
    scripts = list((tmp_path / "grid" / "jobs").glob("*.sh"))
    script = scripts[0]
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    for line in ("partition=gpu", "time=90", "mem=4GB", "array=0-1%2", "signal=USR2@90"):
        assert f"#SBATCH --{line}" in script.read_text()
    del lost  # whoever waited is gone: the jobs go on, and one of them is preempted
    os.kill(wait_for(lambda: process_of(grid.place(grid.points[0]))), signal.SIGUSR2)
    ticks = []
    assert run_submitted(grid, request, ticks.append) == {}
    assert sorted(point.name for point in ticks) == sorted(point.name for point in grid.points)
    assert sorted((tmp_path / "grid" / "jobs").glob("*.sh")) == sorted(scripts), "submitted twice"
    assert sum(len(p.read_text().split()) for p in slurm.glob("*.starts")) >= 2


def test_a_job_leaves_the_error_of_its_run(tmp_path):
    grid = grid_of(tmp_path, "steps=2")
    (point,) = grid.points
    cluster = Cluster(grid, Request("local"), lambda point: None, NOTHING)
    grid.place(point).write_text("a file where the folder should be")
    assert cluster._job(point)() == "failed"
    why = cluster._error(point, None)
    assert_one_sentence(why, point.name)
    assert why.exit_status == 74


def test_a_job_that_dies_without_a_word_is_told_with_the_last_line_of_its_log(tmp_path):
    grid = grid_of(tmp_path, "steps=2")
    cluster = Cluster(grid, Request("local"), lambda point: None, NOTHING)
    log = tmp_path / "log"
    job = SimpleNamespace(job_id="12", paths=SimpleNamespace(stderr=log))
    why = cluster._error(grid.points[0], job)
    assert isinstance(why, PeerLost) and "no message" in str(why)
    log.write_text("first\nslurmstepd: error: Exceeded job memory limit\n\n")
    assert_one_sentence(cluster._error(grid.points[0], job), "12", "Exceeded job memory limit")


@pytest.mark.parametrize(
    ("stop", "calls"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0), (signal.SIGINT, 0)]
)
def test_only_a_preempted_job_is_queued_again(monkeypatch, stop, calls):
    monkeypatch.setattr(ours, "_PATIENCE", 0.0)
    queued = []
    with pytest.raises(SystemExit) as stopped:
        ours._queue_again(lambda number, frame: queued.append(number), SystemExit(128 + stop))
    assert stopped.value.code == 128 + stop and queued == [signal.SIGUSR2] * calls


@pytest.mark.parametrize("training", [True, False])
def test_a_preemption_waits_for_a_run_that_can_be_saved(training):
    heard = []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        signal.signal(signal.SIGUSR2, lambda number, frame: heard.append("queued"))
        assert ours._queue_again_after_saving() is not None
        if training:
            signal.signal(signal.SIGUSR1, lambda number, frame: heard.append("saved"))
        signal.raise_signal(signal.SIGUSR2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == (["saved"] if training else ["queued"])


def test_a_gpu_is_asked_for_where_the_config_names_one(tmp_path, slurm):
    grid = grid_of(tmp_path / "grid", "steps=2")
    on_gpu = replace(grid, config=replace(grid.config, device="cuda"))
    for given, gpus in ((grid, None), (on_gpu, 1)):
        cluster = Cluster(given, Request("slurm"), lambda point: None, NOTHING)
        assert cluster._executor._executor.parameters.get("gpus_per_node") == gpus


class Recorder:
    """Stands for an executor: notes which GPUs each job may see."""

    def __init__(self):
        self.seen, self.jobs = None, []

    def update_parameters(self, gpus_per_node, visible_gpus):
        assert gpus_per_node == 1
        self.seen = visible_gpus

    def submit(self, job):
        self.jobs.append(self.seen)
        return SimpleNamespace(done=lambda: False)


def test_jobs_of_this_machine_take_its_gpus_in_turn(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,7")
    grid = grid_of(tmp_path, "steps=2", methods="ensemble,kde,f-kde,svgd")
    on_gpu = replace(grid, config=replace(grid.config, device="cuda"))
    cluster = Cluster(on_gpu, Request("local", jobs=3), lambda point: None, NOTHING)
    cluster._executor = Recorder()
    cluster.submit()
    assert cluster._executor.jobs == [[3], [7], [3]] and len(cluster.waiting) == 1
    cluster.submit()
    assert len(cluster._executor.jobs) == 3, "there is room for three jobs"


def test_a_request_is_read_and_refused():
    assert parse_request([], None) == {}
    for wrong in ("mem_gb", "=3", "mem gb=3", "mem_gb="):
        with pytest.raises(ConfigError, match="mem_gb=32"):
            parse_request([wrong])


def test_what_submitit_refuses_is_told(tmp_path, slurm):
    grid = grid_of(tmp_path / "grid", "steps=2")
    with pytest.raises(ConfigError) as told:
        run_submitted(grid, Request("slurm", parameters={"slurm_colour": "red"}))
    assert_one_sentence(told.value, "slurm")


def test_without_slurm_or_without_its_name_nothing_is_submitted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["compare", "toy-classification", *CHANGES, "steps=2", "--json"]
    assert main([*arguments, "--submit", "slurm"]) == 2
    assert "slurm" in capsys.readouterr().err
    assert main([*arguments, "--partition", "gpu"]) == 2
    assert "--submit slurm" in capsys.readouterr().err


def test_the_error_of_a_run_keeps_its_type(tmp_path):
    grid = grid_of(tmp_path, "steps=2")
    (point,) = grid.points
    cluster = Cluster(grid, Request("local"), lambda point: None, NOTHING)
    for kind in (DataError, RunFailed):
        text = {"event": "failed", "text": "why", "kind": kind.__name__}
        cluster._failure(point).parent.mkdir(exist_ok=True)
        cluster._failure(point).write_text(json.dumps(text))
        assert type(cluster._error(point, None)) is kind
