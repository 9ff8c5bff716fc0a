"""The promises of decisions in 1,000 simulated repetitions, within binomial intervals."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "results" / "decisions" / "make.py"


@pytest.fixture(scope="module")
def simulation():
    spec = importlib.util.spec_from_file_location("decision_simulation", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rows, repetitions", [("conformal_rows", 1000), ("alarm_rows", 1000)])
def test_promises_hold_within_the_binomial_interval(simulation, rows, repetitions):
    for row in getattr(simulation, rows)(repetitions):
        assert row.kept, row


def test_the_error_of_selective_answers_is_kept(simulation):
    (row,) = simulation.selective_rows(300)
    assert row.kept and "answers 0.0%" not in row.size, row


def test_a_broken_promise_is_noticed(simulation):
    row = simulation.Row("sets", "contains", 0.9, 850, 1000, True, "")
    assert not row.kept
    assert not row._replace(held=990).kept
    assert row._replace(held=990, bounded_above=False).kept
