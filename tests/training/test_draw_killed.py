"""Chains on disk: real processes are killed, stopped and taken up again, and disks are full."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_runs import assert_equal_trees, assert_one_sentence, frozen, plain, quick

import shoal
from shoal.cli.main import main
from shoal.core.errors import StorageError

LENGTHS = ["--draws", "150", "--warmup", "30", "--thin", "1", "save_every=0", "-q"]
SMALL = ["data.points=60", "data.test_points=10", "data.ood_points=10", "model.hidden=[3]"]


def begin(run: Path, out: Path, *more: str) -> subprocess.Popen:
    """A process that draws and saves after every step."""
    command = [sys.executable, "-m", "shoal.cli.start", "draw", str(run), *LENGTHS, "-o", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *more], env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_files(process: subprocess.Popen, out: Path, count: int) -> None:
    """Until the chains have written so many files of draws."""
    while len(list(out.glob("sampling/draws-*.safetensors"))) < count:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)


@pytest.mark.kill
@pytest.mark.usefixtures("warm")
def test_killed_and_stopped_processes_end_as_if_nothing_had_happened(tmp_path, capsys):
    run, whole, out = (tmp_path / name for name in ("run", "whole", "out"))
    small = [*SMALL, "members=2", "steps=5", "-q"]
    assert main(["fit", "toy-classification", *small, "-o", str(run)]) == 0
    assert main(["draw", str(run), *LENGTHS, "-o", str(whole)]) == 0
    resume: list[str] = []
    steps = [(1, signal.SIGKILL), (20, signal.SIGKILL), (40, signal.SIGINT), (60, signal.SIGTERM)]
    for count, number in steps:
        with begin(run, out, *resume) as process:
            wait_for_files(process, out, count)
            process.send_signal(number)
            said = process.stderr.read()
        status = -number if number == signal.SIGKILL else 128 + number
        assert process.returncode == status, said
        if number != signal.SIGKILL:
            assert said == "shoal: stopped; add --resume to continue\n"
        with pytest.raises(StorageError, match="have not ended"):
            shoal.load(out)
        resume = ["--resume"]
    assert main(["draw", str(run), *LENGTHS, "-o", str(out), "--resume"]) == 0
    assert_equal_trees(frozen(shoal.load(out).ensemble), frozen(shoal.load(whole).ensemble))
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    assert not list(out.rglob(".tmp-*"))


@pytest.mark.parametrize("after", [0, 1, 3, 6, 10, 15, 21, 40])
def test_a_full_disk_is_told_in_one_sentence_and_the_chains_go_on_later(
    after, monkeypatch, tmp_path
):
    run, out = quick(plain, steps=1), tmp_path / "run"
    options = {"draws": 5, "warmup": 2, "thin": 1, "progress": False}
    real, count = os.fsync, iter(range(10**9))

    def fsync(descriptor):
        if next(count) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch, pytest.raises(StorageError) as error:
        patch.setattr(os, "fsync", fsync)
        shoal.draw(run, out=out, save_every=0, **options)
    assert_one_sentence(error.value, "disk full", str(out))
    assert error.value.exit_status == 74
    again = shoal.draw(run, out=out, resume=True, **options)
    whole = shoal.draw(run, **options)
    assert_equal_trees(frozen(again.ensemble), frozen(whole.ensemble))
    assert not list(out.rglob(".tmp-*"))
    x = torch.zeros(2, 3)
    loaded = shoal.load(out, plain)
    assert torch.equal(shoal.predict(loaded, x).mean, shoal.predict(whole, x).mean)
