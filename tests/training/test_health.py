"""A run that is sick says so, once, with what to do; a healthy run says nothing."""

import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from small_runs import Noisy, assert_same_run, both, plain, points, quick, shoal_of
from torch import nn

import shoal
from shoal.core.errors import ShoalWarning
from shoal.interaction.methods import METHODS
from shoal.models import MLP, Blueprint
from shoal.training.loop import messages as health
from shoal.training.loop import session
from shoal.training.loop.messages import (
    Watchdog,
    _straggler,
    constant_members,
    is_new,
    straggler_sentence,
)

SICK = ("explodes", "collapsed", "predicts the same", "stalls", "diverged at step", "straggles")


def after(epoch, action):
    """A callback that harms the ensemble once."""

    def callback(event):
        if event.epoch == epoch:
            with torch.no_grad():
                action(event.run.ensemble)

    return callback


def sick_notes(run):
    return [note for note in run.notes if any(word in note for word in SICK)]


def harmed(match, **options):
    """A run that warns exactly once, and whose note is the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = quick(**options)
    texts = [str(warned.message) for warned in caught]
    assert {warned.category for warned in caught} == {ShoalWarning}
    assert sick_notes(run) == texts
    (text,) = [text for text in texts if match in text]
    assert text.endswith(".") and ";" in text
    assert caught[texts.index(text)].filename == quick.__code__.co_filename
    return run, text


def equal(ensemble, noise=0.0):
    """All members the same, but for a little noise."""
    for weight in ensemble.weights.values():
        weight.copy_(weight[:1].expand_as(weight) + noise * torch.randn_like(weight))


def kill_units(ensemble, member=1):
    """A member whose rectified units never fire."""
    for name, weight in ensemble.weights.items():
        if name.endswith("0.bias"):
            weight[member] = -1e6


def rectified():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))


def test_a_diverged_member_is_named_with_what_to_do():
    def poison(ensemble):
        for weight in ensemble.weights.values():
            weight[1] = float("nan")

    _, text = harmed("diverged", epochs=3, callbacks=[after(1, poison)])
    assert "Member 1 diverged at step 4" in text and "learning rate" in text


@pytest.mark.parametrize("method", ["f-kde", "kde", "f-svgd"])
def test_a_push_that_explodes(method):
    _, text = harmed("explodes", method=method, strength=1e7, epochs=6, lr=0.1)
    assert "lower strength" in text


def test_constant_predictions_of_one_member():
    _, text = harmed("same", ensemble=rectified, epochs=4, callbacks=[after(2, kill_units)])
    assert "Member 1 predicts the same for every input (epoch 4)" in text


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_a_bandwidth_that_collapses(noise):
    def collapse(ensemble):
        equal(ensemble, noise)

    options = {"method": "kde", "lr": 1e-12, "epochs": 4}
    _, text = harmed("collapsed", **options, callbacks=[after(2, collapse)])
    assert "one function" in text and "seeds" in text


def test_members_that_never_differed():
    ensemble = shoal_of(plain)
    with torch.no_grad():
        equal(ensemble)
    harmed("collapsed", ensemble=ensemble, method="f-kde", epochs=3)


class Stalling:
    """Batches of which one comes only when the watchdog has barked."""

    def __init__(self, at=2):
        self.at, self.barked, self.read = at, threading.Event(), 0

    def __len__(self):
        return 4

    def __iter__(self):
        x, y = points()
        for rows in torch.arange(40).split(10):
            if self.read == self.at:
                assert self.barked.wait(30)
            self.read += 1
            yield x[rows], y[rows]


def test_a_loader_that_stalls_is_reported_while_it_stalls(monkeypatch):
    loader = Stalling(at=6)
    monkeypatch.setattr(
        health.warnings, "warn", lambda text, *_, **__: told.append(text) or loader.barked.set()
    )
    told = []
    monkeypatch.setattr(session, "STALL_AFTER", 0.05)
    run = quick(data=loader, epochs=3)
    (note,) = sick_notes(run)
    assert told == [note] and "no batch for" in note and "num_workers=0" in note


def test_a_watchdog_barks_once_per_stall_and_ends_with_its_block():
    told, barked = [], threading.Semaphore(0)

    def report(sentence):
        told.append(sentence)
        barked.release()

    def slow():
        for number in range(4):
            if number % 2:
                assert barked.acquire(timeout=30)
            yield number

    with Watchdog(0.02, report) as dog:
        assert list(dog.watch(slow())) == [0, 1, 2, 3]
        thread = dog._thread
    assert len(told) == 2 and "after batch 1" in told[0] and "after batch 3" in told[1]
    assert not thread.is_alive()


def test_an_error_of_the_loader_passes_the_watchdog():
    def broken():
        yield 1
        raise OSError("gone")

    with Watchdog(60, print) as dog, pytest.raises(OSError, match="gone"):
        list(dog.watch(broken()))


def test_a_straggling_rank():
    assert "Rank 1 straggles" in straggler_sentence([0.1, 0.9, 0.12, 0.1])
    assert "Rank 0 straggles" in straggler_sentence([0.9, 0.1])
    assert straggler_sentence([0.1, 0.12, 0.15]) is None
    assert straggler_sentence([0.1]) is None


@pytest.mark.parametrize("seconds, found", [(12.0, True), (8.0, False)])
def test_processes_compare_long_epochs_without_their_exchanges(seconds, found):
    said = []

    def texts(own):
        said.append(float(own))
        return [own, "0.9"]

    mesh = SimpleNamespace(waited=seconds - 3.0, texts=texts)
    rows = [{"step": 50, "seconds": 20.0}, {"step": 150, "seconds": seconds}]
    sentence = _straggler(mesh, rows)
    assert said == [pytest.approx(0.03)] and mesh.waited == 0
    assert (sentence is not None and "Rank 1 straggles" in sentence) == found


def test_a_finding_is_told_once_though_its_numbers_change():
    notes = ["The bandwidth collapsed (epoch 3): h² fell."]
    assert not is_new("The bandwidth collapsed (epoch 5): h² fell more.", notes)
    assert is_new("The repulsive force explodes (epoch 5): x.", notes)


def test_a_resumed_run_does_not_repeat_itself(tmp_path):
    options = {"ensemble": rectified, "out": tmp_path / "run", "epochs": 4}
    harmed("same", **options, callbacks=[after(2, kill_units)])
    run = quick(**options, resume=True)
    assert len(sick_notes(run)) == 1


@pytest.mark.parametrize("build", [both, Noisy], ids=["statistics and masks", "own noise"])
def test_the_checks_change_nothing(build, monkeypatch):
    checked = quick(build, epochs=4)
    monkeypatch.setattr("shoal.training.loop.messages.health_warnings", lambda trainer: [])
    assert_same_run(checked, quick(build, epochs=4))


@pytest.mark.parametrize("options", [{"frozen": 1}, {"engine": "loop"}, {"cache": True}], ids=str)
def test_the_checks_leave_every_layer_in_its_mode(options, monkeypatch):
    trunk = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval().requires_grad_(False)

    def build():
        return nn.Sequential(
            trunk, nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4)
        )

    checked = quick(build, epochs=4, **options)
    monkeypatch.setattr("shoal.training.loop.messages.health_warnings", lambda trainer: [])
    assert_same_run(checked, quick(build, epochs=4, **options))


def test_inputs_that_are_all_the_same_tell_nothing():
    assert constant_members(shoal_of(plain), torch.ones(5, 3)) == []
    assert constant_members(shoal_of(plain), points(1)[0]) == []


USUAL = ("ensemble", "kde", "f-kde", "f-svgd", "forde")
OTHERS = [method for method in METHODS if method not in USUAL]


@pytest.mark.parametrize("method", list(METHODS))
def test_no_false_alarm_on_points(method):
    assert sick_notes(quick(both, method=method, epochs=8, lr=0.01)) == []


@pytest.mark.parametrize(
    "options",
    [
        *({"method": method} for method in USUAL),
        *(pytest.param({"method": method}, marks=pytest.mark.nightly) for method in OTHERS),
        {"method": "f-kde", "strength": 100.0},
        {"method": "kde", "annealing": "linear"},
        {"method": "f-kde", "optimizer": "sgd", "lr": 0.1},
        {"method": "f-kde", "lr": 0.03},
    ],
    ids=str,
)
def test_no_false_alarm_on_digits(options):
    pytest.importorskip("sklearn")
    digits = shoal.data.registry["digits"]()
    build = Blueprint(MLP((32,)), digits.input_shape, digits.outputs)
    run = quick(shoal_of(build), digits, **{"epochs": 10, "batch_size": 128} | options)
    assert sick_notes(run) == []


@pytest.mark.parametrize(
    "method", [*USUAL, *(pytest.param(method, marks=pytest.mark.nightly) for method in OTHERS)]
)
def test_no_false_alarm_on_a_line(method):
    x = torch.linspace(-1, 1, 64).unsqueeze(-1)
    build = Blueprint(MLP((16,), "tanh"), (1,), 1)
    run = quick(shoal_of(build), (x, x.sin()[:, 0]), method=method, epochs=12, lr=0.01)
    assert sick_notes(run) == []
