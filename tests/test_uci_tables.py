"""The tables of the UCI study: choices on held-out data, pairs by split, Holm's correction."""

import csv

from studies import RESULTS
from studies.uci import tables

FOLDER = RESULTS / "uci"


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_the_strength_of_lowest_held_out_nll_is_chosen(tmp_path):
    nll = {("f-kde", 1.0): (2.0, 4.0), ("f-kde", 10.0): (3.0, 2.0), ("kde", 10.0): (9.0, 9.0)}
    rows = [
        {"problem": "wine", "split": split, "column": f"{method} {strength:g}",
         "strength": strength, "nll": value}
        for (method, strength), values in nll.items()
        for split, value in enumerate(values)
    ]  # fmt: skip
    write(tmp_path / "strengths.csv", rows)
    assert tables.strengths(tmp_path) == {("wine", "f-kde"): 10.0, ("wine", "kde"): 10.0}
    assert tables.strengths(tmp_path / "nothing") == {}


def test_candidates_are_compared_on_splits_that_all_of_them_have(tmp_path):
    """Problems weigh the same, whatever their number of splits."""
    values = [
        ("boston", 0, "a", 1.0), ("boston", 0, "b", 2.0),
        ("boston", 1, "a", 3.0), ("boston", 1, "b", 2.0),
        ("boston", 2, "a", -99.0),
        ("yacht", 0, "a", 5.0), ("yacht", 0, "b", 4.0),
    ]  # fmt: skip
    keys = "problem", "split", "column", "nll"
    write(
        tmp_path / "settings.csv",
        [dict(zip(keys, row, strict=True)) | {"rmse": 1} for row in values],
    )
    assert tables.candidates(tmp_path) == [("b", 3.0, 0.0), ("a", 3.5, 0.0)]


def test_a_difference_is_paired_by_split_and_bold_if_it_survives_holm():
    found = {
        ("boston", "uci", "nll"): {0: 1.0, 1: 2.01, 2: 3.02, 9: 50.0},
        ("boston", "before", "nll"): {0: 2.0, 1: 3.0, 2: 4.0},
        ("yacht", "uci", "nll"): {0: 1.0, 1: 2.0, 2: 3.0},
        ("yacht", "before", "nll"): {0: 2.0, 1: 1.5, 2: 3.25},
        ("wine", "uci", "nll"): {0: 1.0, 1: 2.0},
        ("wine", "before", "nll"): {0: 2.0, 1: 3.0},
    }
    lines = tables.differences(found, "nll").splitlines()
    boston, yacht = (next(x for x in lines if x.startswith(f"| {p}")) for p in ("boston", "yacht"))
    assert "**-0.990 (" in boston
    assert "-0.250 (" in yacht and "**" not in yacht
    assert not any("(" in line for line in lines if line.startswith("| wine"))  # two splits


def test_the_page_of_tables_is_what_the_raw_files_give():
    assert tables.page(FOLDER) == (FOLDER / "tables.md").read_text()
