"""The suite of tables: its sets and halves, its scores, its runner and its page."""

import csv
import json

import numpy as np
import pandas as pd
import pytest

from studies.tables import sets

UCI = {"boston", "concrete", "energy", "kin8nm", "power", "protein", "wine", "yacht"}


def test_the_halves_share_no_set_and_the_eight_problems_judge():
    halves = {half: [s for s in sets.sets() if s.half == half] for half in sets.HALVES}
    names = {half: {s.name for s in found} for half, found in halves.items()}
    assert not names["development"] & names["judging"] and names["judging"] >= UCI
    sources = [s.source for s in sets.sets()]
    assert len(set(sources)) == len(sources) == sum(map(len, names.values()))
    for found in halves.values():
        assert {s.task for s in found} == {"regression", "classification"}
    with (sets.SUITE / "sets.csv").open() as file:
        listed = {(row["name"], row["half"]) for row in csv.DictReader(file)}
    assert listed == {(s.name, s.half) for s in sets.sets()}


@pytest.fixture
def folder(tmp_path):
    """Two sets as sets.py writes them: numbers with a gap, categories with a gap."""
    rng = np.random.default_rng(0)
    x, codes = rng.normal(size=(60, 2)), rng.integers(0, 3, (60, 1)).astype(np.int16)
    x[3, 0], codes[5, 0] = np.nan, -1
    rows = {
        f"{part}_{k}": np.arange(60)[(np.arange(60) % 10 == k) ^ (part == "train")]
        for part in ("train", "test")
        for k in sets.SPLITS
    }
    columns = {"a": None, "colour": ["blue", "green", "red"], "b": None}
    targets = {"regression": x[:, 1] + codes[:, 0], "classification": np.arange(60) % 2}
    for task, y in targets.items():
        about = json.dumps(
            {"task": task, "classes": 2 * (task == "classification"), "columns": columns}
        )
        np.savez(
            tmp_path / f"{task}.npz", about=np.array(about), numbers=x, codes=codes, y=y, **rows
        )
    return tmp_path


def test_a_split_has_numbers_categories_and_gaps_in_the_order_of_the_columns(folder):
    table = sets.load(folder, "regression", 1)
    assert list(table.x) == ["a", "colour", "b"] and (len(table.y), len(table.y_test)) == (54, 6)
    assert np.isnan(table.x["a"][2]) and table.x["colour"].isna().tolist().index(True) == 4
    assert set(table.x["colour"].cat.categories) == {"blue", "green", "red"}


def test_a_name_of_the_row_and_a_copy_of_the_target_are_found():
    rng = np.random.default_rng(0)
    y, rows = rng.normal(size=400), pd.Categorical(np.arange(400).astype(str))
    x = pd.DataFrame({"a": y + rng.normal(size=400), "copy": 2 * y, "name": rows})
    found = sets.leaks(x, y, "regression")
    assert [text.split()[0] for text in found] == ["copy", "name"]


def test_larger_sets_are_cut_by_the_seed_and_whole_ones_are_not():
    y = np.random.default_rng(0).normal(size=5000)
    a_set = sets.Set("a", "judging", "regression", "keel:a")
    cut, again = (sets.points(a_set, y, None, 1) for _ in range(2))
    assert [len(rows) for rows in cut.values()] == [3000, 500]
    assert all((cut[part] == again[part]).all() for part in cut)
    assert not set(cut["train_1"]) & set(cut["test_1"])
    assert len(sets.points(a_set._replace(whole=True), y, None, 1)["train_1"]) == 4500
