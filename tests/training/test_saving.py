"""Checkpoints are written beside the training, one at a time, and none is lost on the way out."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from small_runs import Fuse, assert_same_run, both, plain, quick

import shoal
from shoal.core.errors import ConfigError, ShoalWarning, StorageError
from shoal.core.storage.background import BackgroundWriter
from shoal.core.storage.checkpoints import steps
from shoal.training.loop.saving import RunState, host_copy

SOON = 20


class Gate:
    """Holds up the first write until it is opened, and counts writes."""

    def __init__(self, monkeypatch):
        self.begun, self.opened = threading.Event(), threading.Event()
        self.writing, self.most, self.threads = 0, 0, []
        genuine = RunState.write

        def write(state, folder, shard=None):
            self.writing += 1
            self.most = max(self.most, self.writing)
            self.threads.append(threading.current_thread().name)
            self.begun.set()
            assert self.opened.wait(SOON)
            genuine(state, folder, shard)
            self.writing -= 1

        monkeypatch.setattr(RunState, "write", write)


class Clock(Fuse):
    """Calls a function at the beginning of one step."""

    def __init__(self, at=None, call=None):
        super().__init__()
        self.when, self.call, self.seen = at, call, []

    def __call__(self, step, steps):
        self.seen.append(step)
        if step == self.when:
            self.call()
        return 1.0


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def check():
        assert gate.begun.wait(SOON) and not gate.opened.is_set()
        assert steps(tmp_path / "checkpoints") == []
        gate.opened.set()

    # The write of step 1 is still in progress when step 2 is computed.
    clock = Clock(1, check)
    run = quick(both, out=tmp_path, schedule=clock, save_every=0)
    assert clock.seen == list(range(8))
    assert gate.most == 1 and gate.threads[0] == "shoal-writer"
    assert gate.threads[-1] == threading.current_thread().name  # the last save waits
    assert_same_run(shoal.load(tmp_path, both), run)


def test_a_new_save_waits_for_the_write_before(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    waiting = threading.Event()
    genuine = BackgroundWriter.wait

    def wait(writer):
        if gate.begun.is_set() and not gate.opened.is_set():
            waiting.set()
        return genuine(writer)

    monkeypatch.setattr(BackgroundWriter, "wait", wait)
    opener = threading.Thread(target=lambda: waiting.wait(SOON) and gate.opened.set())
    opener.start()
    quick(out=tmp_path, save_every=0)
    opener.join()
    assert waiting.is_set() and gate.most == 1


def test_a_checkpoint_holds_the_step_it_was_taken_at(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with pytest.raises(Fuse.Blown):
        quick(
            both, out=tmp_path, schedule=Clock(1, gate.opened.set), callbacks=[blow], save_every=0
        )
    saved = steps(tmp_path / "checkpoints")
    assert saved == [2, 3]
    again = quick(both, out=tmp_path, schedule=Clock(), resume=True)
    assert_same_run(again, quick(both, schedule=Clock()))


def blow(event):
    raise Fuse.Blown


def test_a_run_that_breaks_waits_for_the_write_and_keeps_its_lock_until_then(tmp_path, monkeypatch):
    gate, held = Gate(monkeypatch), []

    def open_later():
        assert gate.begun.wait(SOON)
        held.append((tmp_path / "lock").exists())
        gate.opened.set()

    opener = threading.Thread(target=open_later)
    opener.start()
    with pytest.raises(Fuse.Blown):
        quick(out=tmp_path, schedule=Fuse(1), save_every=0)
    opener.join()
    assert held == [True] and not (tmp_path / "lock").exists()
    assert steps(tmp_path / "checkpoints") == [1]


def test_a_signal_waits_for_the_write_in_progress_and_saves(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def stop():
        assert gate.begun.wait(SOON)
        signal.raise_signal(signal.SIGTERM)
        threading.Timer(0.05, gate.opened.set).start()

    with pytest.raises(SystemExit) as caught:
        quick(both, out=tmp_path, schedule=Clock(1, stop), save_every=0)
    assert caught.value.code == 143
    assert steps(tmp_path / "checkpoints") == [1, 2]


@pytest.mark.parametrize("at", [1, 8], ids=["seen by the next save", "seen by the last save"])
def test_an_error_of_the_writer_comes_up(tmp_path, monkeypatch, at):
    genuine = RunState.write

    def write(state, folder, shard=None):
        if state.step == at:
            raise ConfigError("the state is too large")
        genuine(state, folder, shard)

    monkeypatch.setattr(RunState, "write", write)
    with pytest.raises(ConfigError, match="too large"):
        quick(out=tmp_path, save_every=0)
    assert shoal.load(tmp_path, plain).ensemble if at > 1 else not steps(tmp_path / "checkpoints")


def test_several_failures_in_a_row_are_warned_of_once_and_a_later_one_again(tmp_path, monkeypatch):
    genuine = RunState.write

    def write(state, folder, shard=None):
        if state.step in (2, 3, 5):
            raise StorageError(f"cannot write step {state.step}")
        genuine(state, folder, shard)

    monkeypatch.setattr(RunState, "write", write)
    with pytest.warns(ShoalWarning, match="training goes on") as caught:
        quick(out=tmp_path, save_every=0)
    assert [str(warning.message).partition(";")[0] for warning in caught] == [
        "cannot write step 2",
        "cannot write step 5",
    ]
    assert caught[0].filename.endswith("small_runs.py")  # the line that called fit
    assert steps(tmp_path / "checkpoints")[-1] == 8


def test_a_limit_of_host_memory_leaves_no_room_for_a_copy(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.training.loop.saving.host_copy", None)
    quick(out=tmp_path, memory="1GB", save_every=0)
    assert steps(tmp_path / "checkpoints")[-1] == 8


def test_a_copy_in_host_memory_is_a_copy():
    weights = {"a": torch.ones(2, 3), "b": torch.tensor(7), "c": torch.arange(12).view(3, 4).t()}
    copy = host_copy({"weights": weights})["weights"]
    for name, tensor in weights.items():
        assert torch.equal(copy[name], tensor) and copy[name].stride() == tensor.stride()
        tensor.zero_()
    assert copy["a"].sum() == 6 and copy["b"] == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_waits_for_the_write():
    writer, release, done = BackgroundWriter(), threading.Event(), []
    writer.start(lambda: done.append(release.wait(SOON)))
    threading.Timer(0.05, release.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if done == [True] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert writer.wait() is None


def test_the_error_of_a_write_is_told_once():
    writer = BackgroundWriter()
    writer.start(lambda: Path("/nowhere/at/all").write_text(""))
    assert isinstance(writer.wait(), FileNotFoundError)
    assert writer.wait() is None
