"""Callbacks: what they see, in which order, and how they end a run."""

import pytest
import torch
from small_runs import STEPS_PER_EPOCH as STEPS
from small_runs import assert_one_sentence, assert_same_run, both, frozen, points, quick, shoal_of

import shoal
from shoal.core.errors import ConfigError


class Recorder(shoal.Callback):
    """Remembers the events, in order."""

    def __init__(self):
        self.events = []

    def run_begin(self, event):
        self.events.append(event)

    def step_end(self, event):
        self.events.append((event, event.measures()))

    def epoch_end(self, event):
        self.events.append(event)

    def run_end(self, event):
        self.events.append(event)

    def of(self, kind):
        found = [each[0] if isinstance(each, tuple) else each for each in self.events]
        return [each for each in found if isinstance(each, kind)]

    @property
    def measures(self):
        return [each[1] for each in self.events if isinstance(each, tuple)]


class StopAt(shoal.Callback):
    def __init__(self, step, why=""):
        self.step, self.why = step, why

    def step_end(self, event):
        if event.step == self.step:
            event.stop(self.why)


def test_the_order_of_events():
    recorder = Recorder()
    quick(epochs=2, callbacks=[recorder])
    kinds = [type(each[0] if isinstance(each, tuple) else each) for each in recorder.events]
    epoch = [shoal.StepEnd] * STEPS + [shoal.EpochEnd]
    assert kinds == [shoal.RunBegin, *epoch, *epoch, shoal.RunEnd]
    steps = recorder.of(shoal.StepEnd)
    assert [each.step for each in steps] == list(range(1, 9))
    assert [each.epoch for each in steps] == [1] * STEPS + [2] * STEPS
    assert {each.steps for each in steps} == {8}
    assert recorder.of(shoal.RunBegin)[0].run.history == []
    assert [each.epoch for each in recorder.of(shoal.EpochEnd)] == [1, 2]
    (end,) = recorder.of(shoal.RunEnd)
    assert end.finished and len(end.run.history) == 2


@pytest.mark.parametrize("method", ["ensemble", "f-kde"])
def test_measures_of_steps_have_the_means_of_the_history_row(method):
    recorder = Recorder()
    run = quick(both, epochs=1, method=method, callbacks=[recorder])
    (row,) = run.history
    for name in ("loss", "drive", "push", "h2", "effective"):
        mean = sum(each[name] for each in recorder.measures) / STEPS
        assert mean == pytest.approx(row[name], rel=1e-5), name
    members = torch.tensor([each["member_loss"] for each in recorder.measures])
    torch.testing.assert_close(members.mean(0), torch.tensor(row["member_loss"]))
    assert recorder.measures[0]["lr"] == pytest.approx(row["lr"])


def test_looking_at_steps_does_not_change_the_run():
    assert_same_run(quick(both, callbacks=[Recorder()]), quick(both))


@pytest.mark.parametrize("step", [2, STEPS, 6])
def test_a_callback_ends_the_run_after_a_step(tmp_path, step):
    run = quick(both, epochs=3, out=tmp_path, callbacks=[StopAt(step, "it is late")])
    assert run.history[-1]["step"] == step
    assert any("it is late" in note and f"step {step}" in note for note in run.notes)
    assert_same_run(shoal.load(tmp_path, both), run)
    # A run that has ended is finished: resuming it takes no step.
    again = quick(both, epochs=3, out=tmp_path, resume=True)
    assert_same_run(again, run)


def test_the_weights_are_those_of_the_step_at_which_the_run_ended():
    ended = quick(both, epochs=3, callbacks=[StopAt(STEPS)])
    short = quick(both, epochs=1)
    assert all(map(torch.equal, frozen(ended.ensemble).values(), frozen(short.ensemble).values()))


def test_a_function_ends_the_run_after_an_epoch():
    def enough(event):
        if event.row["epoch"] == 2:
            event.stop()

    run = quick(epochs=5, callbacks=[enough])
    assert len(run.history) == 2 and any("callback" in note for note in run.notes)


def test_the_first_reason_stays():
    run = quick(callbacks=[StopAt(1, "first"), StopAt(1, "second")])
    assert any("first" in note for note in run.notes)
    assert not any("second" in note for note in run.notes)


def test_an_error_ends_the_run_and_callbacks_are_told():
    recorder = Recorder()

    def fail(event):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        quick(epochs=3, callbacks=[recorder, fail])
    (end,) = recorder.of(shoal.RunEnd)
    assert not end.finished and len(end.run.history) == 1


def test_a_resumed_run_begins_with_its_history(tmp_path):
    def fail(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quick(epochs=2, out=tmp_path, save_every=0, callbacks=[fail])
    recorder = Recorder()
    quick(epochs=2, out=tmp_path, resume=True, callbacks=[recorder])
    assert recorder.of(shoal.StepEnd)[-1].step == 2 * STEPS
    assert len(recorder.of(shoal.EpochEnd)[-1].run.history) == 2


@pytest.mark.parametrize("wrong", [None, 5, "print", [5], [shoal.Callback]])
def test_what_cannot_be_called_is_refused_before_training(wrong):
    ensemble = shoal_of()
    before = frozen(ensemble)
    with pytest.raises(ConfigError) as error:
        quick(ensemble, points(), callbacks=wrong)
    assert_one_sentence(error.value, "callbacks")
    assert all(torch.equal(frozen(ensemble)[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("wrong", [None, 5, "csv", [5]])
def test_what_cannot_log_is_refused_before_training(wrong):
    with pytest.raises(ConfigError) as error:
        quick(loggers=wrong)
    assert_one_sentence(error.value, "loggers")
