"""Coverage of `conformal=True` on three tables; writes tables.csv and tables.md.

python -m studies.cross_conformal [--splits 5] [--preset fast]

A second call goes on where the first one stopped.

Plan, written before the runs. Tables: diabetes, concrete, breast cancer. Splits 0 to 4, each with a
fifth of the points as test set, drawn by the split's number, which is also the model's seed.
Models: `EnsembleRegressor(conformal=True)` and `EnsembleClassifier(conformal=True)`, with the
presets "default" and "fast" and nothing else set. Levels: 0.8, 0.9, 0.95. Measures: the share of
test targets inside, the mean width in standard deviations of y or the mean size of the sets, and
the same of the central interval of the predictive distribution, or of the smallest set of classes
with this probability. The rule keeps its word if the mean coverage over splits is at least
level - 0.02 on every table.
"""

import argparse

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import train_test_split

from shoal.sklearn import EnsembleClassifier, EnsembleRegressor
from studies import RESULTS
from studies.common import append_rows, read_csv
from studies.sklearn import concrete

PLACE = RESULTS / "decisions"
HEADER = ["preset", "table", "split", "level", "rule", "coverage", "size"]
LEVELS, MARGIN = (0.8, 0.9, 0.95), 0.02
TABLES = {
    "diabetes": (EnsembleRegressor, lambda: load_diabetes(return_X_y=True)),
    "concrete": (EnsembleRegressor, concrete),
    "breast cancer": (EnsembleClassifier, lambda: load_breast_cancer(return_X_y=True)),
}

TEXT = """# Do cross-conformal intervals cover on real tables?

`python -m studies.cross_conformal` writes this page and [tables.csv](tables.csv). Each split
holds out a fifth of the points. The models are `EnsembleRegressor(conformal=True)` and
`EnsembleClassifier(conformal=True)`, with nothing set but the preset. Widths are in standard
deviations of y, sizes in classes. "Central" is the interval of the predictive distribution, for
classes the smallest set with this probability. Numbers are means over splits ± standard errors.

{table}

{verdict}
"""


def covered(model, X, y, level):
    """Coverage and size of the conformal rule and of the predictive distribution."""
    if isinstance(model, EnsembleRegressor):
        unit = y.std()
        for low, high in (model.predict_interval(X, level), model.predictive(X).interval(level)):
            low, high = np.asarray(low), np.asarray(high)
            yield ((low <= y) & (y <= high)).mean(), (high - low).mean() / unit
        return
    places = np.searchsorted(model.classes_, y)
    probs = model.predict_proba(X)
    order = np.argsort(-probs, axis=1)
    ranked = np.take_along_axis(probs, order, 1)
    smallest = np.zeros(probs.shape, dtype=bool)
    np.put_along_axis(smallest, order, ranked.cumsum(1) - ranked < level, 1)
    for inside in (model.predict_set(X, level), smallest):
        yield inside[np.arange(len(y)), places].mean(), inside.sum(1).mean()


def rows(preset, name, split):
    """One row per level and rule."""
    kind, load = TABLES[name]
    X, y = load()
    stratify = y if kind is EnsembleClassifier else None
    data = train_test_split(X, y, test_size=0.2, random_state=split, stratify=stratify)
    X_train, X_test, y_train, y_test = data
    model = kind(preset=preset, conformal=True, random_state=split).fit(X_train, y_train)
    for level in LEVELS:
        rules = zip(("conformal", "central"), covered(model, X_test, y_test, level), strict=True)
        for rule, (share, size) in rules:
            yield preset, name, split, level, rule, f"{share:.6f}", f"{size:.6f}"


def shown(found, key, digits):
    values = np.array([float(row[key]) for row in found])
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1) / len(values) ** 0.5:.{digits}f}"


def page(found):
    """The page of all rows."""
    lines = [
        "| preset | table | splits | level | coverage | size | central coverage | central size |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups = {}
    for row in found:
        groups.setdefault((row["preset"], row["table"], float(row["level"])), []).append(row)
    kept = 0
    for (preset, name, level), mine in sorted(groups.items()):
        both = [[r for r in mine if r["rule"] == rule] for rule in ("conformal", "central")]
        cells = [shown(own, key, d) for own in both for key, d in (("coverage", 3), ("size", 2))]
        facts = [preset, name, str(len(both[0])), f"{level:g}", *cells]
        lines.append(f"| {' | '.join(facts)} |")
        kept += np.mean([float(r["coverage"]) for r in both[0]]) >= level - MARGIN
    verdict = (
        f"In {kept} of {len(groups)} rows the mean coverage is at least the level - {MARGIN:g}."
    )
    return TEXT.format(table="\n".join(lines), verdict=verdict)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--preset", default="default")
    asked = parser.parse_args()
    place = PLACE / "tables.csv"
    known = read_csv(place, missing_ok=True)
    done = {(row["preset"], row["table"], int(row["split"])) for row in known}
    for split in range(asked.splits):
        for name in TABLES:
            cell = asked.preset, name, split
            if cell not in done:
                append_rows(place, HEADER, list(rows(*cell)))
                print(*cell, flush=True)
    text = page(read_csv(place))
    (PLACE / "tables.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
