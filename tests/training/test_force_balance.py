"""Does repulsion weigh anything beside the data? `fit` says so when it does not."""

import pytest
from small_runs import quick, shoal_of, story

import shoal
from shoal.models import MLP, Blueprint
from shoal.training.history import NEGLIGIBLE, balance_sentence


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
        assert len(run.notes) == 1
        assert run.notes[0].startswith("Repulsion was at most")
        assert "a plain ensemble in effect" in run.notes[0] and "try strength=" in run.notes[0]
        assert all(row["ratio_max"] < NEGLIGIBLE for row in run.history)

    def test_what_it_advises_helps(self, digits):
        note = trained(digits, method="kde").notes[0]
        strength = float(note.split("try strength=")[1].split(",")[0])
        run = trained(digits, method="kde", strength=strength)
        assert run.notes == []
        assert all(row["ratio"] > 10 * NEGLIGIBLE for row in run.history)

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
        assert balance_sentence(self.rows(0.1, 0.01), 1.0) is None
        assert balance_sentence([], 1.0) is None

    def test_throughout(self):
        sentence = balance_sentence(self.rows(1e-5, 2e-5), 1.0)
        assert "at most 0.002 % of the drive throughout" in sentence
        assert "try strength=5000" in sentence

    def test_in_part(self):
        sentence = balance_sentence(self.rows(1e-5, 0.5, 1e-4), 2.0)
        assert "at most 0.01 %" in sentence and "in 2 of 3 epochs" in sentence
        assert "try strength=2000" in sentence

    def test_without_any_push_no_number_is_advised(self):
        assert "try a larger strength" in balance_sentence(self.rows(0.0), 1.0)

    def test_epochs_without_a_drive_are_not_quiet(self):
        rows = [{"ratio": None, "ratio_max": None}, *self.rows(0.5)]
        assert balance_sentence(rows, 1.0) is None
