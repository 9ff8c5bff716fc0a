"""Does repulsion weigh anything beside the data? `fit` says so when it does not."""

import pytest
from small_runs import Fuse, assert_same_run, quick, shoal_of, story

import shoal
from shoal.core.errors import ShoalWarning
from shoal.models import MLP, Blueprint
from shoal.training.folder.history import NEGLIGIBLE, balance_sentence, has_diverged


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("sklearn")
    return shoal.data.registry["digits"]()


def trained(digits, **options):
    build = Blueprint(MLP((32,)), digits.input_shape, digits.outputs)
    return quick(shoal_of(build), digits, epochs=3, batch_size=128, **options)


class TestDigits:
    def test_weight_space_repulsion_of_unit_strength_is_negligible_and_it_says_so(self, digits):
        run = trained(digits, method="kde")
        (note,) = run.notes
        assert note.startswith("The force ratio") and "in effect a plain ensemble" in note
        assert "strength" not in note and "temperature" not in note
        assert all(row["ratio_max"] < NEGLIGIBLE for row in run.history)

    @pytest.mark.parametrize("options", [{"method": "ensemble"}, {"temperature": 0.0}], ids=str)
    def test_who_asks_for_no_repulsion_hears_nothing(self, digits, options):
        run = trained(digits, **({"method": "kde"} | options))
        assert run.notes == []
        assert all(row["ratio"] == row["push"] == 0 for row in run.history)


def test_a_single_member_hears_nothing():
    assert quick(shoal_of(members=1), method="kde").notes == []


def test_the_ratio_is_kept_for_every_epoch():
    rows = quick(epochs=3, strength=10.0).history
    assert all(0 < row["ratio"] <= row["ratio_max"] for row in rows)
    assert [row["epoch"] for row in rows] == [1, 2, 3]


def test_a_run_that_begins_with_repulsion_alone_has_no_ratio_there():
    rows = quick(annealing="linear", epochs=2).history
    assert rows[0]["ratio_max"] is None and rows[1]["ratio_max"] > 0
    assert story(rows) == story(quick(annealing="linear", epochs=2).history)


class TestTheSentence:
    @staticmethod
    def rows(*ratios):
        return [{"ratio": ratio, "ratio_max": ratio} for ratio in ratios]

    def test_nothing_to_say(self):
        assert balance_sentence(self.rows(0.1, 0.01)) is None
        assert balance_sentence([]) is None

    def test_throughout(self):
        assert "at most 2e-05 in every epoch" in balance_sentence(self.rows(1e-5, 2e-5))

    def test_in_part(self):
        sentence = balance_sentence(self.rows(1e-5, 0.5, 1e-4))
        assert "at most 0.0001 in 2 of 3 epochs" in sentence

    def test_epochs_without_a_drive_are_not_quiet(self):
        rows = [{"ratio": None, "ratio_max": None}, *self.rows(0.5)]
        assert balance_sentence(rows) is None


class TestDivergence:
    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_a_run_that_diverged_says_so_and_nothing_of_its_forces(self, optimizer):
        with pytest.warns(ShoalWarning, match="Training diverged") as caught:
            run = quick(method="kde", optimizer=optimizer, lr=300.0, epochs=3, strength=1e-9)
        (note,) = run.notes
        assert run.warnings == (note,) == (str(caught[0].message),) and "diverged" in repr(run)
        assert note.startswith("Training diverged") and "learning rate" in note
        assert has_diverged(run.history)

    def test_where_training_began_is_kept_once(self):
        rows = quick(epochs=3).history
        assert ["initial_loss" in row for row in rows] == [True, False, False]
        assert rows[0]["initial_loss"] == pytest.approx(quick(steps=1).history[0]["loss"])

    def test_and_over_a_stop_in_the_first_epoch(self, tmp_path):
        one = quick(schedule=Fuse(), epochs=2)
        with pytest.raises(Fuse.Blown):
            quick(schedule=Fuse(2), epochs=2, out=tmp_path, save_every=0.0)
        two = quick(shoal_of(seed=7), schedule=Fuse(), epochs=2, out=tmp_path, resume=True)
        assert_same_run(one, two)
        assert "initial_loss" in two.history[0]

    @pytest.mark.parametrize(
        ("losses", "diverged"),
        [
            ([2.3, 3e19], True),
            ([2.3, 1.0, 4.7], True),
            ([2.3, None], True),
            ([-1.0, 0.5], True),
            ([2.3, 3.0], False),
            ([0.01, 0.05], False),
            ([-5.0, -4.0], False),
            ([1e9, 1e8], False),
            ([], False),
        ],
    )
    def test_a_loss_far_above_where_it_began(self, losses, diverged):
        assert has_diverged([{"loss": loss} for loss in losses]) is diverged
