"""The table of docs/reliability.md names tests that exist, and shows the figures on record."""

from pathlib import Path

import pytest
from reliability import MEASURES
from reliability_table import NOT_MEASURED, ROWS, cells, table, write

HOME = Path(__file__).parents[1]
RESULTS = HOME / "docs" / "results" / "reliability"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_tests_of_a_row_exist(row):
    for test in row.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (HOME / "tests" / file).read_text(encoding="utf-8"), test


def test_the_page_shows_the_figures_on_record():
    assert table(RESULTS) in (HOME / "docs" / "reliability.md").read_text(encoding="utf-8")


def test_every_measure_is_on_record():
    sources = {row.source for row in ROWS}
    for name in MEASURES:
        assert name in sources and (RESULTS / f"{name}.json").exists()
    shown = {row.source: cells(row, RESULTS)[-1] for row in ROWS if row.source}
    assert all(NOT_MEASURED not in shown[name] for name in MEASURES)


def test_a_row_without_figures_says_so(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nOUTDATED\n<!-- end of table -->\nafter\n")
    write(page, tmp_path)
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "OUTDATED" not in text
    assert text.count(NOT_MEASURED) == sum(row.figure is not None for row in ROWS)
