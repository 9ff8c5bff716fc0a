"""The promises of decisions in 1,000 simulated repetitions, within binomial intervals."""

import pytest

from studies import decisions

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("rows, repetitions", [("conformal_rows", 1000), ("alarm_rows", 1000)])
def test_promises_hold_within_the_binomial_interval(rows, repetitions):
    for row in getattr(decisions, rows)(repetitions):
        assert row.kept, row


def test_the_error_of_selective_answers_is_kept():
    (row,) = decisions.selective_rows(300)
    assert row.kept and "answers 0.0%" not in row.size, row


def test_a_broken_promise_is_noticed():
    row = decisions.Row("sets", "contains", 0.9, 850, 1000, True, "")
    assert not row.kept
    assert not row._replace(held=990).kept
    assert row._replace(held=990, bounded_above=False).kept
