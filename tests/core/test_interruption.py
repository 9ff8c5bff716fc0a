"""Signals: the run saves, and leaves as it was asked to."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from small_runs import (
    STEPS_PER_EPOCH,
    Fuse,
    assert_one_sentence,
    assert_same_run,
    both,
    plain,
    quick,
)

import shoal
from shoal.core.errors import StorageError
from shoal.core.interruption import Interruption
from shoal.core.storage.checkpoints import steps
from shoal.core.storage.lock import FolderLock

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
NEVER = 1e9


class Alarm(Fuse):
    """Sends signals to this thread in the middle of one step: each has arrived before the next."""

    def __init__(self, at=None, *numbers):
        super().__init__()
        self.when, self.numbers = at, numbers

    def __call__(self, step, steps):
        if step == self.when:
            for number in self.numbers:
                signal.raise_signal(number)
        return 1.0


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture(autouse=True)
def put_back():
    """Python's own handlers; a shell starts what it runs in the background with SIGINT ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = handlers()
    yield
    assert handlers() == before
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.parametrize("at", [0, 2, STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH, 11])
@pytest.mark.parametrize(
    "number, raised, status",
    [
        (signal.SIGINT, KeyboardInterrupt, None),
        (signal.SIGTERM, SystemExit, 143),
        (signal.SIGUSR1, SystemExit, 128 + signal.SIGUSR1),
    ],
)
def test_the_step_is_finished_and_saved_first(at, number, raised, status, tmp_path):
    with pytest.raises(raised) as caught:
        quick(both, out=tmp_path, schedule=Alarm(at, number), epochs=3, save_every=NEVER)
    assert getattr(caught.value, "code", None) == status
    assert steps(tmp_path / "checkpoints") == [at + 1]
    assert not (tmp_path / "lock").exists()
    again = quick(both, out=tmp_path, schedule=Alarm(), epochs=3, resume=True)
    assert_same_run(again, quick(both, epochs=3, schedule=Alarm()))


def test_the_second_signal_does_not_wait_for_the_step(tmp_path):
    alarm = Alarm(2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        quick(out=tmp_path, schedule=alarm, save_every=NEVER)
    assert steps(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_step_is_not_lost(number, tmp_path):
    def late(event):
        if event.epoch == 2:
            signal.raise_signal(number)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        quick(out=tmp_path, epochs=2, callbacks=[late])
    assert_same_run(shoal.load(tmp_path, plain), quick(epochs=2))


def test_without_a_folder_nothing_is_installed():
    before, seen = handlers(), []
    quick(callbacks=[lambda event: seen.append(handlers())], epochs=1)
    assert seen == [before]
    with pytest.raises(KeyboardInterrupt):
        quick(schedule=Alarm(1, signal.SIGINT))


def test_with_a_folder_handlers_are_there_only_while_it_trains(tmp_path):
    before, seen = handlers(), []
    quick(callbacks=[lambda event: seen.append(handlers())], epochs=1, out=tmp_path)
    assert all(now != then for now, then in zip(seen[0], before, strict=True))
    assert handlers() == before


@pytest.mark.parametrize("at", [0, 5])
def test_handlers_are_put_back_after_an_error(at, tmp_path):
    before = handlers()
    with pytest.raises(Fuse.Blown):
        quick(out=tmp_path, schedule=Fuse(at))
    assert handlers() == before


def test_in_another_thread_signals_are_left_alone(tmp_path):
    seen = []

    def train():
        quick(out=tmp_path, epochs=1, callbacks=[lambda event: seen.append(handlers())])

    before = handlers()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before]
    assert_same_run(shoal.load(tmp_path, plain), quick(epochs=1))


def test_a_handler_that_was_not_set_from_python_does_no_harm(monkeypatch):
    monkeypatch.setattr("shoal.core.interruption._SIGNALS", [signal.SIGUSR1])
    own = signal.signal

    def unknown(number, handler):
        own(number, handler)
        return None

    before = signal.getsignal(signal.SIGUSR1)
    with Interruption():
        pass
    monkeypatch.setattr(signal, "signal", unknown)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGUSR1)
        assert interruption.received == signal.SIGUSR1
    own(signal.SIGUSR1, before)


class TestOneWriter:
    def test_a_folder_that_is_held_is_refused(self, tmp_path):
        with FolderLock(tmp_path), pytest.raises(StorageError) as caught:
            quick(out=tmp_path)
        assert_one_sentence(caught.value, f"process {os.getpid()}", "wait for it or choose another")
        assert list(tmp_path.iterdir()) == []

    def test_another_process_is_refused_until_it_dies(self, tmp_path):
        lines = [
            "import fcntl, os, sys",
            "file = open(sys.argv[1], 'w')",
            "fcntl.flock(file, fcntl.LOCK_EX)",
            "print(os.getpid(), 'elsewhere', file=file, flush=True)",
            "print('held', flush=True)",
            "sys.stdin.read()",
        ]
        command = [sys.executable, "-S", "-c", "\n".join(lines), str(tmp_path / "lock")]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(StorageError) as caught:
                quick(out=tmp_path)
            assert_one_sentence(caught.value, f"process {other.pid} on elsewhere")
            other.kill()
            other.wait()
        assert (tmp_path / "lock").exists()
        assert_same_run(quick(out=tmp_path), quick())
        assert not (tmp_path / "lock").exists()
