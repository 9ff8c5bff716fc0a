"""A member that stops being finite is left out, and the others never notice."""

import warnings

import pytest
import torch
from small_runs import (
    STEPS_PER_EPOCH,
    assert_equal_trees,
    assert_one_sentence,
    assert_same_run,
    both,
    frozen,
    plain,
    points,
    quick,
    shoal_of,
)
from torch import nn

import shoal
from shoal.core.errors import DataError, ShoalWarning
from shoal.interaction.methods import METHODS

DEAD = 1
LIVING = [0, 2]
POISONS = {"nan": float("nan"), "inf": float("inf")}


def poison(ensemble, value=float("nan"), member=DEAD):
    with torch.no_grad():
        for tensor in ensemble.weights.values():
            tensor[member] = value


def mask(ensemble, member=DEAD):
    """Declare a member dead, whatever its weights are."""
    ensemble.alive[member] = False


def after_epoch(number, action):
    """A callback that does something to the ensemble once."""

    def callback(event):
        if event.epoch == number:
            action(event.run.ensemble)

    return callback


def survivors(run):
    return {
        name: tensor[LIVING] for name, tensor in frozen(run.ensemble).items() if name != "alive"
    }


def run_with(action, when, method="f-kde", **options):
    """A run whose member is harmed before the first step, or after an epoch."""
    ensemble = shoal_of(both)
    if when == 0:
        action(ensemble)
        return quick(ensemble, epochs=3, method=method, **options)
    return quick(
        ensemble, epochs=3, method=method, callbacks=[after_epoch(when, action)], **options
    )


@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("value", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("method", list(METHODS))
def test_the_others_are_those_of_a_run_in_which_it_was_masked(method, value, when):
    step = when * STEPS_PER_EPOCH
    with pytest.warns(ShoalWarning, match=f"Member 1 diverged at step {step} "):
        poisoned = run_with(lambda ensemble: poison(ensemble, value), when, method)
    with pytest.warns(ShoalWarning, match=f"Member 1 diverged at step {step} "):
        masked = run_with(mask, when, method)
    assert poisoned.ensemble.alive.tolist() == [True, False, True]
    assert_equal_trees(survivors(poisoned), survivors(masked))
    for one, other in zip(poisoned.history, masked.history, strict=True):
        for key in ("loss", "drive", "push", "ratio", "h2", "effective", "alive"):
            assert one[key] == other[key], key
    assert all(tensor.isfinite().all() for tensor in survivors(poisoned).values())


@pytest.mark.parametrize("legacy", [True])
@pytest.mark.parametrize("method", list(METHODS))
def test_the_published_methods_do_not_spread_it_either(method, legacy):
    with pytest.warns(ShoalWarning, match="Member 1"):
        run = run_with(poison, 1, method, legacy=legacy)
    assert all(tensor.isfinite().all() for tensor in survivors(run).values())


@pytest.mark.parametrize(
    "options",
    [
        {"adversarial": 0.1},
        {"adversarial": {"epsilon": 0.1, "shared": True}},
        {"clip": 0.1},
        {"engine": "loop"},
        {"engine": "chunk:2"},
        {"optimizer": {"name": "sgd", "momentum": 0.9}},
        {"optimizer": {"name": "sgd", "momentum": 0.9}, "noise": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["f-kde", "svgd"])
def test_nor_does_anything_else_that_members_share(method, options):
    with pytest.warns(ShoalWarning, match="Member 1"):
        poisoned = run_with(poison, 1, method, **options)
    with pytest.warns(ShoalWarning, match="Member 1"):
        masked = run_with(mask, 1, method, **options)
    assert_equal_trees(survivors(poisoned), survivors(masked))
    assert all(tensor.isfinite().all() for tensor in survivors(poisoned).values())


def test_plain_members_do_not_know_of_each_other_at_all():
    with pytest.warns(ShoalWarning, match="Member 1"):
        poisoned = run_with(poison, 1, "ensemble")
    assert_equal_trees(survivors(poisoned), survivors(run_with(lambda _: None, 1, "ensemble")))


class TestWhatIsSaid:
    def test_once_with_member_and_step_and_where_fit_was_called(self):
        with pytest.warns(ShoalWarning) as caught:
            run = run_with(poison, 1)
        assert len(caught) == 1 and caught[0].filename.endswith("small_runs.py")
        assert sum(note.startswith("Member 1 diverged at step 4 ") for note in run.notes) == 1
        assert [row["alive"] for row in run.history] == [3, 2, 2]

    def test_history_has_no_number_for_it(self):
        with pytest.warns(ShoalWarning):
            rows = run_with(poison, 1).history
        assert rows[0]["member_loss"][DEAD] > 0
        assert rows[1]["member_loss"][DEAD] is None and rows[2]["member_loss"][DEAD] is None
        assert rows[2]["loss"] == pytest.approx(sum(rows[2]["member_loss"][i] for i in LIVING) / 2)

    def test_death_by_the_last_step_is_found(self):
        ensemble = shoal_of(lambda: nn.Linear(3, 1), members=2)
        poison(ensemble, 0.0, member=0)
        poison(ensemble, 9.0, member=1)
        data = torch.ones(20, 3), torch.zeros(20)
        last = {"schedule": lambda step, steps: 1e38 if step == steps - 1 else 0.0, "lr": 1.0}
        options = {"optimizer": "sgd", "prior": "flat", "method": "ensemble", "epochs": 1}
        with pytest.warns(ShoalWarning, match="Member 1 diverged at step 1 "):
            run = quick(ensemble, data, likelihood="gaussian", **options, **last)
        assert run.ensemble.alive.tolist() == [True, False]
        assert run.history[-1]["alive"] == 1

    def test_when_none_is_left_there_is_no_run(self):
        ensemble = shoal_of()
        for member in range(3):
            poison(ensemble, member=member)
        with pytest.warns(ShoalWarning, match="Member"), pytest.raises(DataError) as caught:
            quick(ensemble)
        assert_one_sentence(caught.value, "all members diverged", "learning rate")
        assert caught.value.exit_status == 65

    def test_a_learning_rate_beyond_all_measure_ends_in_a_sentence(self):
        with pytest.warns(ShoalWarning, match="Member"), pytest.raises(DataError) as caught:
            quick(optimizer="sgd", lr=1e15, epochs=3)
        assert_one_sentence(caught.value, "all members diverged")


class TestAfterwards:
    @pytest.fixture
    def run(self, tmp_path):
        with pytest.warns(ShoalWarning, match="Member 1"):
            return run_with(poison, 1, out=tmp_path / "run")

    def test_predictions_leave_it_out_with_a_warning(self, run):
        x, _ = points(seed=5)
        with pytest.warns(ShoalWarning, match="members 1 of 3"):
            pred = shoal.predict(run, x)
        assert len(pred.members) == 2 and pred.probs.isfinite().all()
        torch.testing.assert_close(pred.members, run.ensemble(x).detach()[LIVING])

    def test_the_folder_remembers(self, run):
        loaded = shoal.load(run.folder, both)
        assert loaded.ensemble.alive.tolist() == [True, False, True]
        assert_same_run(loaded, run)
        assert loaded.notes == run.notes
        with pytest.warns(ShoalWarning, match="members 1 of 3"):
            assert len(shoal.predict(loaded, points()[0]).members) == 2

    def test_resuming_the_finished_run_does_not_warn_again(self, run):
        again = quick(both, out=run.folder, epochs=3, resume=True)
        assert again.notes == run.notes
        assert_same_run(again, run)

    def test_training_on_keeps_it_out(self, run):
        with pytest.warns(ShoalWarning, match="Member 1 diverged at step 0 "):
            more = quick(run.ensemble)
        assert more.ensemble.alive.tolist() == [True, False, True]


def test_it_stays_dead_through_a_resume(tmp_path):
    class Enough(Exception):
        pass

    def stop(event):
        if event.epoch == 2:
            raise Enough

    with pytest.warns(ShoalWarning, match="Member 1"):
        whole = run_with(poison, 1)
    with pytest.warns(ShoalWarning, match="Member 1"), pytest.raises(Enough):
        quick(both, epochs=3, out=tmp_path, save_every=0, callbacks=[after_epoch(1, poison), stop])
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        resumed = quick(both, epochs=3, out=tmp_path, resume=True)
    assert_same_run(resumed, whole)


def test_a_poisoned_data_point_is_refused_before_any_member_can_die():
    x, y = points()
    x = x.clone()
    x[7, 2] = float("nan")
    with pytest.raises(DataError) as caught:
        quick(plain, (x, y))
    assert_one_sentence(caught.value, "x[7, 2]")
