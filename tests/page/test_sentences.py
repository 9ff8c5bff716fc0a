"""The sentences agree with the numbers and say which differences are not significant."""

import math

import pytest

from shoal.core.display import text as words
from shoal.page import sentences
from shoal.training.folder.history import NEGLIGIBLE


@pytest.mark.parametrize(
    ("says", "right", "noise", "end"),
    [
        (0.97, 0.975, 0.006, "gap not significant."),
        (0.97, 0.957, 0.006, "overconfident by 1.3 points."),
        (0.95, 0.99, 0.006, "underconfident by 4 points."),
        (0.5, 0.5, 0.0, "gap not significant."),
    ],
)
def test_the_gap_is_compared_with_its_standard_error(says, right, noise, end):
    assert sentences.calibration_sentence(says, right, noise).endswith(end)


def test_predictions_near_ninety_percent_confidence_come_first():
    text = sentences.calibration_sentence(0.97, 0.975, 0.006, (0.9, 0.91))
    assert text.startswith("Predictions with about 90 % confidence have an accuracy of 91 %.")


@pytest.mark.parametrize(
    ("found", "count", "end"),
    [(0.85, 100, "gap not significant."), (0.85, 1000, "too narrow."), (0.95, 1000, "too wide.")],
)
def test_coverage_is_compared_with_its_standard_error(found, count, end):
    assert sentences.coverage_sentence(0.9, found, count).endswith(end)


@pytest.mark.parametrize(
    ("method", "ratio", "words"),
    [
        ("kde", 0.0002, "0.02 % of the force: negligible"),
        ("kde", NEGLIGIBLE * 1.01, "weak"),
        ("kde", 1.0, "50 % of the force"),
        ("ensemble", 0.0, "trained without repulsion"),
        ("ensemble (legacy)", 0.0, "trained without repulsion"),
        ("kde", math.nan, "did not record"),
    ],
)
def test_repulsion_is_a_share_of_the_force(method, ratio, words):
    assert words in sentences.repulsion_sentence(method, ratio)


@pytest.mark.parametrize(
    ("members", "effective", "ood", "text"),
    [
        (1, 1.0, {}, "single member"),
        (10, 1.02, {}, "functions is 1 on the test set"),
        (10, 6.4, {}, "functions is 6.4 on"),
        (20, 12.4, {"letters": 15.0}, "and 15 on letters (20 members)"),
    ],
)
def test_members_are_counted_as_functions(members, effective, ood, text):
    assert text in sentences.members_sentence(members, effective, ood)


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ({}, "No OOD data were given"),
        ({"noise": math.nan}, "No OOD data were given"),
        ({"noise": 1.1}, "Predictive entropy on noise is 1.1 times that on the test set."),
        ({"noise": 1.0}, "Predictive entropy on noise is about 1 time that on the test set."),
        ({"noise": 0.5}, "Predictive entropy on noise is only 0.5 times that on the test set."),
        (
            {"a": 2.0, "b": 3.0},
            "Predictive entropy on a is 2 times that on the test set, on b 3 times.",
        ),
    ],
)
def test_entropy_on_ood_data(ratios, text):
    assert sentences.entropy_sentence(ratios).startswith(text)


def test_halves():
    assert "not larger" in sentences.halves_sentence(0.5, 0.4)
    assert "2 times" in sentences.halves_sentence(0.5, 1.0)
    assert "should grow" in sentences.halves_sentence(0.0, 1.0)


@pytest.mark.parametrize(
    ("mean", "error", "text"),
    [
        (0.96432, 0.0021, "0.964 ± 0.002"),
        (0.96432, 0.0016, "0.9643 ± 0.0016"),
        (1234.5, 20.0, "1234 ± 20"),
        (0.5, 0.0, "0.5 ± 0"),
        (math.nan, 0.1, "–"),
        (-0.5, math.nan, "−0.5"),
        (math.inf, math.nan, "∞"),
    ],
)
def test_digits_follow_the_noise(mean, error, text):
    assert words.plus_minus(mean, error) == text


def test_nothing_is_minus_zero():
    assert words.number(-0.0001, 0.02) == "0.00"
