"""What the studies share."""

from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from studies import common, own_batches, worth
from studies.fidelity import samplers


def inverse(number):
    return 1 / number


def test_every_cell_comes_with_its_result():
    found = dict(common.finished([(1,), (2,), (4,)], inverse, jobs=2, within=1e9))
    assert found == {(1,): 1.0, (2,): 0.5, (4,): 0.25}


def test_a_cell_that_fails_is_named_and_the_others_run(capfd):
    found = dict(common.finished([(0,), (2,)], inverse, jobs=1, within=1e9))
    assert found == {(2,): 0.5}
    printed = capfd.readouterr()
    assert "0 failed" in printed.out and "ZeroDivisionError" in printed.err


def test_no_cell_starts_that_would_end_too_late_by_others_of_its_kind(monkeypatch):
    # The clock is read at the start, before and after the first cell, which takes ten seconds.
    clock = chain([0, 0, 0, 10], repeat(10))
    monkeypatch.setattr(common, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    cells = [(1,), (3,), (2,)]
    found = common.finished(cells, inverse, jobs=1, within=15, kind=lambda cell: cell[0] % 2)
    assert [cell for cell, _ in found] == [(1,), (2,)]


def test_without_time_nothing_starts():
    assert not list(common.finished([(1,)], inverse, jobs=1, within=-1.0))


def test_the_page_of_own_batches_has_the_tables_of_its_raw_files():
    page = (own_batches.FOLDER / "README.md").read_text(encoding="utf-8")
    tables = own_batches.table, own_batches.compared_table, own_batches.steps_table
    assert all(table() in page for table in tables)


def test_the_page_of_one_more_member_has_the_tables_of_its_raw_files():
    page = (worth.FOLDER / "README.md").read_text(encoding="utf-8")
    tables = worth.coverage_table, worth.ratio_table, worth.stops_table
    assert all(table() in page for table in tables)
    assert all(f"{worth.correlation(members):.2f}" in page for members in worth.FEW)


def test_the_page_of_active_learning_has_the_tables_of_its_raw_files():
    pytest.importorskip("ase", reason="ase is not installed")
    from studies import active_learning

    page = (active_learning.FOLDER / "README.md").read_text(encoding="utf-8")
    tables = (
        active_learning.arms_table,
        active_learning.differences_table,
        active_learning.curve_table,
        active_learning.same_data_table,
    )
    assert all(table() in page for table in tables)


def test_the_page_of_fidelity_has_the_tables_of_the_samplers():
    page = (samplers.FOLDER / "README.md").read_text(encoding="utf-8")
    assert samplers.table() in page
