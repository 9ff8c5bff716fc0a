"""Encodings of numbers for tables: every value of `numbers` in `EnsembleRegressor`.

python -m studies.tables.encodings          trains what raw.csv has not yet, then writes the page
python -m studies.tables.encodings page     writes the page alone
"""

import math
import sys
import time
import warnings
from collections import defaultdict
from itertools import product

import numpy as np
import torch

import shoal
from shoal.core.display.text import markdown_table
from shoal.integrations.sklearn import NUMBERS
from shoal.prediction.statistics import holm, paired_difference, paired_p_value
from shoal.sklearn import EnsembleRegressor
from studies import RESULTS
from studies.common import append_rows, read_csv, test_of

FOLDER = RESULTS / "tables"
RAW, AFTER = FOLDER / "raw.csv", FOLDER / "after.csv"
PROBLEMS = ("boston", "concrete", "energy", "yacht", "wine")
SPLITS = {RAW: (0, 1, 2), AFTER: (3, 4, 5)}
LARGEST, OVERLAP = 3000, 1 / 9
METRICS = {"crps": "CRPS", "nll": "NLL", "rmse": "RMSE", "coverage": "Coverage of 90 % intervals"}
HEADER = ["problem", "split", "numbers", *METRICS, "epochs", "seconds"]

PLAN = """# Encodings of numbers for tables

`EnsembleRegressor(numbers=...)` with every other setting at its default.
`python -m studies.tables.encodings` trains what `raw.csv` has not yet, on one CPU core that other
work may share, and writes this page. The other defaults are those before presets: five members and
no folds. [The suite](suite/README.md) compares today's estimators with other libraries.

## Plan, written before the runs

- Arms: `standard` (standardised numbers), `robust` (heavy tails on a logarithmic scale first),
  `piecewise` (as `robust`, and bins by quantiles beside the numbers), `periodic` (as `robust`, and
  learned sines and cosines).
- Data: boston, concrete, energy, yacht and wine of UCI, published splits 0 to 2, training sets of
  at most 3,000 points. The seed is the split.
- Metrics: CRPS in the units of the target first, then NLL. RMSE, coverage and seconds inform.
- Differences to `standard` are paired by split. Their 95 % intervals are corrected for overlapping
  splits (Nadeau & Bengio, 2003). Holm's correction is over all differences of a table.
- The default changes to the arm with the lowest geometric mean of CRPS / CRPS of `standard`, if
  that arm has a lower mean CRPS on at least four of the five problems, a lower mean NLL on at least
  three, and on no problem a mean CRPS that is more than 5 % higher. Otherwise it stays `standard`.
- The scale of the first frequencies of `periodic`, 0.3, was chosen among 0.01, 0.03, 0.1 and 0.3 on
  split 3 of power, kin8nm and naval, which have no part here."""

AMENDMENT = """## Amendment, written after the splits 0 to 2 and before the splits 3 to 5

On yacht, the rule took a column of few values for a heavy tail, and `robust` was worse there.
Since then a column of at most 17 values has no tails. `raw.csv` has the rule before, so today's
code gives other numbers for some tables. The splits 3 to 5 in `after.csv` have the rule of today.
They judge `piecewise` by the conditions of the plan again. If it fails there, the default of the
regressor stays `standard`."""


def arrays(problem, split):
    """Training and test data in the units of the target."""
    data = shoal.data.load({"name": "uci", "problem": problem, "split": split})
    assert data.scaling is not None
    pairs = [
        (part.x, data.scaling.original(part.y.flatten())) for part in (data.train, test_of(data))
    ]
    (x, y), test = [(x.double().numpy(), y.double().numpy()) for x, y in pairs]
    if len(x) > LARGEST:
        rows = np.random.default_rng(split).choice(len(x), LARGEST, replace=False)
        x, y = x[rows], y[rows]
    return x, y, *test


def measured(problem, split, numbers):
    """The row of one model."""
    x, y, x_test, y_test = arrays(problem, split)
    start = time.perf_counter()
    model = EnsembleRegressor(numbers=numbers, random_state=split).fit(x, y)
    seconds = time.perf_counter() - start
    found = shoal.evaluate(model.predictive(x_test), y_test)
    low, high = model.predict_interval(x_test, level=0.9)
    inside = float(((low <= y_test) & (y_test <= high)).mean())
    scores = [f"{found[name]:.6g}" for name in ("crps", "nll", "rmse")]
    return [problem, split, numbers, *scores, f"{inside:.4f}", model.n_iter_, f"{seconds:.1f}"]


def train(file):
    """Train what is missing; rows that are there stay."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    there = {(r["problem"], int(r["split"]), r["numbers"]) for r in read_csv(file, missing_ok=True)}
    for split, problem, numbers in product(SPLITS[file], PROBLEMS, NUMBERS):
        if (problem, split, numbers) not in there:
            row = measured(problem, split, numbers)
            append_rows(file, HEADER, [row])
            print(*row, flush=True)


def scores(file, metric):
    """Values over the splits, by problem and arm."""
    found = defaultdict(dict)
    for row in read_csv(file):
        found[row["problem"], row["numbers"]][int(row["split"])] = float(row[metric])
    return {key: [values[split] for split in sorted(values)] for key, values in found.items()}


def means(file, metric):
    """Mean over splits of every arm."""
    found = scores(file, metric)
    lines = [
        [problem, *(f"{np.mean(found[problem, numbers]):.3g}" for numbers in NUMBERS)]
        for problem in PROBLEMS
    ]
    return markdown_table(["problem", *NUMBERS], lines)


def differences(file, metric):
    """Every arm minus `standard`, with intervals; bold: significant after Holm's correction."""
    found, others = scores(file, metric), NUMBERS[1:]
    pairs = {
        (problem, numbers): (found[problem, numbers], found[problem, NUMBERS[0]])
        for problem, numbers in product(PROBLEMS, others)
    }
    chances = holm([paired_p_value(*pair, OVERLAP) for pair in pairs.values()])
    cells = {}
    for (key, pair), chance in zip(pairs.items(), chances, strict=True):
        mean, low, high = paired_difference(*pair, overlap=OVERLAP)
        text = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
        cells[key] = f"**{text}**" if chance < 0.05 else text
    lines = [[problem, *(cells[problem, numbers] for numbers in others)] for problem in PROBLEMS]
    return markdown_table(["problem", *others], lines)


def verdict(file):
    """What the plan's rule says of every arm, and the default that follows."""
    crps, nll = scores(file, "crps"), scores(file, "nll")
    lines, allowed = [], {}
    for numbers in NUMBERS[1:]:
        ratio = [np.mean(crps[p, numbers]) / np.mean(crps[p, NUMBERS[0]]) for p in PROBLEMS]
        lower = sum(np.mean(nll[p, numbers]) < np.mean(nll[p, NUMBERS[0]]) for p in PROBLEMS)
        wins, mean = sum(r < 1 for r in ratio), math.exp(np.mean(np.log(ratio)))
        allowed[numbers] = mean, wins >= 4 and lower >= 3 and max(ratio) <= 1.05
        cells = [f"{mean:.3f}", wins, lower, f"{max(ratio):.3f}"]
        lines.append([numbers, *cells, "yes" if allowed[numbers][1] else "no"])
    best = min(allowed, key=lambda numbers: allowed[numbers][0])
    chosen = best if allowed[best][1] and allowed[best][0] < 1 else NUMBERS[0]
    heads = ["arm", "geometric mean of CRPS ratios", "problems with lower CRPS", "with lower NLL"]
    table = markdown_table([*heads, "largest CRPS ratio", "meets the conditions"], lines)
    return f"{table}\n\nBy the rule of the plan, `{chosen}` is the best choice."


def results(file):
    """All tables of a raw file; nothing before its last run."""
    if len(read_csv(file, missing_ok=True)) < len(PROBLEMS) * len(SPLITS[file]) * len(NUMBERS):
        return []
    parts = [f"## Splits {SPLITS[file][0]} to {SPLITS[file][-1]}", verdict(file)]
    parts += ["Tables have means over the splits. Bold: significant."]
    for metric in ("crps", "nll"):
        title = METRICS[metric]
        parts += [f"{title}:", means(file, metric)]
        parts += [f"{title} minus that of `standard`:", differences(file, metric)]
    for metric in ("rmse", "coverage", "seconds"):
        parts += [f"{METRICS.get(metric, 'Seconds')}:", means(file, metric)]
    return parts


def page():
    """The plan, its amendment, and the results of finished files."""
    parts = [PLAN, AMENDMENT, *results(RAW), *results(AFTER)]
    (FOLDER / "README.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    for missing in SPLITS if sys.argv[1:] != ["page"] else ():
        train(missing)
    page()
