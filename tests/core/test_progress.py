"""What a run shows while it runs, and that it leaves nothing behind."""

import contextlib
import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from small_runs import both, plain, quick, shoal_of

from shoal.core.display.progress import make_progress

FIGURES = {"epoch": 3, "loss": 0.123456, "push": 2e-5, "ratio": 1.6e-4, "seconds": 0.25}


def lines(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


class TestLines:
    def test_one_an_epoch_where_there_is_no_terminal(self, capsys):
        run = quick(epochs=3, progress=True, strength=100.0)
        shown = lines(capsys)
        assert len(shown) == 3
        for number, (line, row) in enumerate(zip(shown, run.history, strict=True), 1):
            assert line.startswith(
                f"f-kde: epoch {number}: loss {row['loss']:.4f}, repulsion / driving force "
            )
            assert line.endswith(" s")

    def test_a_plain_ensemble_has_no_push_to_tell_of(self, capsys):
        quick(epochs=1, progress=True, method="ensemble")
        assert "push" not in lines(capsys)[0]

    def test_what_is_worth_knowing_comes_last(self, capsys):
        run = quick(epochs=2, progress=True, method="kde", strength=1e-9)
        assert lines(capsys)[-1] == f"kde: {run.notes[0]}"

    def test_silence_when_asked(self, capsys):
        quick(epochs=2, progress=False, method="kde", strength=1e-9)
        assert lines(capsys) == []

    def test_a_loss_that_is_not_a_number(self, capsys):
        make_progress(True, "kde", 10, 0).epoch(FIGURES | {"loss": None, "ratio": None})
        assert lines(capsys) == ["kde: epoch 3: loss not finite, 0.2 s"]

    def test_what_a_start_waits_for(self, capsys):
        progress = make_progress(True, "kde", 10, 0)
        progress.note("capturing the step")
        progress.note("")
        assert lines(capsys) == ["kde: capturing the step"]


class Terminal:
    """Standard error as a terminal while in a `with` block; `text` is what it showed."""

    def __init__(self, monkeypatch):
        self.patch, self.text = monkeypatch, ""
        self.patch.setenv("TERM", "xterm")
        self.patch.setenv("COLUMNS", "120")

    def __enter__(self):
        self.ours, theirs = os.openpty()
        self.file = os.fdopen(theirs, "w")
        self.patch.setattr(sys, "stderr", self.file)
        return self

    def __exit__(self, *_):
        self.file.flush()
        os.set_blocking(self.ours, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.text += os.read(self.ours, 65536).decode()
        self.file.close()
        os.close(self.ours)
        self.patch.undo()

    @property
    def whole_again(self):
        """Whether the cursor was hidden, and is back."""
        return self.text.count("\x1b[?25l") == self.text.count("\x1b[?25h") > 0


@pytest.fixture
def terminal(monkeypatch):
    if not hasattr(os, "openpty"):
        pytest.skip("this system has no terminals to imitate")
    pytest.importorskip("rich")
    return Terminal(monkeypatch)


class TestBar:
    def test_it_counts_the_steps_and_shows_the_figures(self, terminal):
        with terminal:
            bar = make_progress(True, "f-kde", 12, 4)
            for _ in range(8):
                bar.step()
            bar.epoch(FIGURES)
            bar.say("Something worth knowing.")
            bar.close()
        for words in (
            "f-kde",
            "12/12",
            "loss 0.1235, repulsion / driving force 1.6e-04",
            "Something worth",
        ):
            assert words in terminal.text
        assert terminal.whole_again

    def test_it_shows_what_a_start_waits_for(self, terminal):
        with terminal:
            bar = make_progress(True, "f-kde", 12, 4)
            bar.note("capturing the step")
            bar.close()
        assert "capturing the step" in terminal.text

    def test_a_run_on_a_terminal_draws_it_and_takes_it_down(self, terminal):
        with terminal:
            run = quick(epochs=3, progress=True)
        assert f"loss {run.history[-1]['loss']:.4f}" in terminal.text
        assert "12/12" in terminal.text and terminal.whole_again

    def test_it_is_taken_down_after_an_error_too(self, terminal):
        def stop(event):
            raise RuntimeError

        with terminal, pytest.raises(RuntimeError):
            quick(epochs=3, progress=True, callbacks=[stop])
        assert terminal.whole_again

    def test_a_resumed_run_starts_where_it_was(self, terminal):
        with terminal:
            make_progress(True, "f-kde", 12, 4).close()
        assert "4/12" in terminal.text

    def test_without_rich_there_are_lines(self, terminal, monkeypatch):
        monkeypatch.setitem(sys.modules, "rich.console", None)
        with terminal:
            run = quick(epochs=2, progress=True)
        assert f"f-kde: epoch 2: loss {run.history[-1]['loss']:.4f}" in terminal.text

    def test_silence_when_asked(self, terminal):
        with terminal:
            quick(epochs=1, progress=False)
        assert terminal.text == ""


class TestNothingIsLeftBehind:
    @staticmethod
    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    @staticmethod
    def descriptors():
        folder = Path("/proc/self/fd")
        if not folder.exists():
            pytest.skip("this system does not list open files")
        return len(list(folder.iterdir()))

    @pytest.mark.parametrize("method", ["f-kde", "svgd"])
    def test_a_hundred_steps_keep_no_tensor(self, method):
        counts = {}

        def count(event):
            if event.epoch in (5, 25):
                counts[event.epoch] = self.tensors()

        quick(both, method=method, steps=100, callbacks=[count])
        assert counts[25] == counts[5] > 0

    def test_a_run_that_nobody_holds_is_forgotten(self):
        ensemble = quick(both, epochs=1).ensemble
        skeletons = [group.skeleton for group in ensemble.groups]
        parameters = [weight for skeleton in skeletons for weight in skeleton.parameters()]
        kept = [ensemble, *skeletons, *parameters, *ensemble.state.values()]
        memories = [weakref.ref(thing) for thing in kept]
        del ensemble, skeletons, parameters, kept
        gc.collect()
        assert [memory() for memory in memories if memory() is not None] == []

    def test_many_runs_leave_no_file_open(self, tmp_path):
        before = self.descriptors()
        for number in range(12):
            quick(both, epochs=1, out=tmp_path / str(number), save_every=0)
        assert self.descriptors() == before

    def test_a_stopped_run_lets_go_of_everything(self, tmp_path):
        def stop(event):
            raise RuntimeError

        ensemble = shoal_of(plain)
        before = self.descriptors()
        for number in range(3):
            with pytest.raises(RuntimeError):
                quick(ensemble, out=tmp_path / str(number), callbacks=[stop])
        assert self.descriptors() == before
        assert not list(tmp_path.rglob("lock"))
