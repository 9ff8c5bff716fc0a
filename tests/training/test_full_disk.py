"""A disk that is full or read-only costs checkpoints, never what was saved before."""

import contextlib
import errno
import itertools
import os
import subprocess
import time
import warnings
from pathlib import Path

import pytest
from small_runs import STEPS_PER_EPOCH, Fuse, assert_one_sentence, assert_same_run, both, quick

import shoal
from shoal.core.errors import StorageError
from shoal.core.storage.checkpoints import steps


@contextlib.contextmanager
def full_disk(monkeypatch, after):
    """Every synchronisation fails for want of space, but for the first few."""
    real, count = os.fsync, iter(range(10**9))

    def fsync(descriptor):
        if next(count) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def saving(**options):
    """A run that saves after every step; what it raised, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            quick(both, save_every=0, **options)
        except StorageError as error:
            return error, [str(warning.message) for warning in caught]
    return None, [str(warning.message) for warning in caught]


class Clock(Fuse):
    """A constant learning rate that remembers the last step."""

    last = -1

    def __call__(self, step, steps):
        self.last = step
        return 1.0


class TestFullDisk:
    @pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89])
    def test_the_last_save_fails_in_one_sentence_and_what_was_saved_is_sound(
        self, after, monkeypatch, tmp_path
    ):
        folder = tmp_path / "run"
        with full_disk(monkeypatch, after):
            error, warned = saving(out=folder, epochs=3)
        assert_one_sentence(error, "disk full", "bytes needed", str(folder))
        assert error.exit_status == 74
        saved = steps(folder / "checkpoints") if folder.exists() else []
        if saved:
            assert len(warned) == 1 and "training goes on" in warned[0]
            assert shoal.load(folder, both).ensemble.alive.all()
        again = quick(both, out=folder, epochs=3, resume=True)
        assert_same_run(again, quick(both, epochs=3))
        assert not list(folder.rglob(".tmp-*"))

    @pytest.mark.parametrize("call", ["mkdir", "fsync", "replace", "chmod"])
    def test_a_failure_at_one_call_costs_one_checkpoint(self, call, monkeypatch, tmp_path):
        genuine, whole = getattr(os, call), quick(both, steps=4)
        for at in (6, 9, 13, 18):  # after the run's folder was begun
            calls, failed = itertools.count(), []

            def failing(*args, calls=calls, failed=failed, at=at, **options):
                if next(calls) == at:
                    failed.append(at)
                    raise OSError(errno.ENOSPC, "No space left on device")
                return genuine(*args, **options)

            folder = tmp_path / str(at)
            with monkeypatch.context() as patch:
                patch.setattr(os, call, failing)
                error, warned = saving(out=folder, steps=4)
            if failed and error is None:
                assert len(warned) == 1 and "training goes on" in warned[0]
            assert_same_run(quick(both, out=folder, steps=4, resume=True), whole)
            assert steps(folder / "checkpoints")[-1] == 4
            assert not list(folder.rglob(".tmp-*"))

    def test_a_folder_that_becomes_read_only(self, tmp_path, monkeypatch):
        genuine = Path.mkdir

        def refused(path, *args, **options):
            if path.name.startswith(".tmp-"):
                raise OSError(errno.EROFS, "Read-only file system")
            return genuine(path, *args, **options)

        def turn(event):
            monkeypatch.setattr(Path, "mkdir", refused)

        clock = Clock()
        error, warned = saving(out=tmp_path, epochs=3, callbacks=[turn], schedule=clock)
        assert clock.last == 11  # training went on to its end
        assert_one_sentence(error, "read-only", "bytes needed", str(tmp_path))
        assert len(warned) == 1 and "read-only" in warned[0]
        monkeypatch.undo()
        assert steps(tmp_path / "checkpoints")[-1] in (STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH - 2)
        again = quick(both, out=tmp_path, epochs=3, resume=True, schedule=Clock())
        assert_same_run(again, quick(both, epochs=3))

    def test_a_real_one(self, tmp_path):
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip("no file system of a given size can be made here")
        try:
            self.fill(tmp_path)
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)

    def fill(self, disk):
        saved = disk / "run" / "checkpoints"

        def writing():  # what the writer removes last would make room again
            return steps(saved)[-1] < 7 or len(steps(saved)) > 2 or any(saved.glob(".tmp-*"))

        def grow(event):
            while event.epoch == 2 and writing():
                time.sleep(0.01)
            with contextlib.suppress(OSError), open(disk / "ballast", "ab", buffering=0) as file:
                while event.epoch == 2:
                    file.write(b"0" * 4096)

        options = {"out": disk / "run", "epochs": 3, "save_every": 0}
        error, warned = saving(out=disk / "run", epochs=3, callbacks=[grow])
        assert_one_sentence(error, "disk full", "bytes needed")
        assert len(warned) == 1 and "disk full" in warned[0]
        assert steps(disk / "run" / "checkpoints")[-1] == 7
        shoal.load(disk / "run", both)
        (disk / "ballast").unlink()
        assert_same_run(quick(both, resume=True, **options), quick(both, epochs=3))
