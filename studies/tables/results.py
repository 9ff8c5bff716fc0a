"""What the raw files of the suite say: means over splits, ranks, ratios and tests."""

import copy
import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from studies.common import read_csv
from studies.tables.sets import SPLITS, SUITE

FIRST = {"regression": "crps", "classification": "log_loss"}
"""The score that ranks, by task."""

SECONDS = "cpu_seconds"
"""Of fit and predictions: other work on the machine changes them less than seconds of the clock."""

OURS = "shoal"
DEFAULTS = (
    *(OURS, "catboost", "catboost-virtual", "lightgbm", "ngboost", "forest", "gp"),
    *("realmlp", "tabm", "bde"),
)
TUNED = "catboost-tuned", "lightgbm-tuned"
LABELS = {
    "shoal": "Shoal",
    "catboost": "CatBoost",
    "catboost-virtual": "CatBoost, virtual",
    "lightgbm": "LightGBM",
    "ngboost": "NGBoost",
    "forest": "random forest",
    "gp": "Gaussian process",
    "realmlp": "RealMLP",
    "tabm": "TabM",
    "bde": "bde",
    "catboost-tuned": "CatBoost, usual settings",
    "lightgbm-tuned": "LightGBM, usual settings",
    "shoal-fast": 'Shoal, `preset="fast"`',
    "shoal-best": 'Shoal, `preset="best"`',
    "shoal-conformal": "Shoal, `conformal=True`",
}


def label(model: str) -> str:
    """The name of a model on the page; arms of a file of settings have their own."""
    return LABELS.get(model, model)


class Raw:
    """The rows of some files, by set, model and split; of a row that is there twice, the last."""

    def __init__(self, pattern, folder):
        self.folder, listed = folder, read_csv(SUITE / "sets.csv")
        self.about = {row["name"]: row for row in listed}
        self.rows = {}
        for path in sorted(folder.glob(pattern)):
            for row in read_csv(path):
                self.rows[row["set"], row["model"], int(row["split"])] = row

    def at(self, split):
        """The rows of one split."""
        part = copy.copy(self)
        part.rows = {key: row for key, row in self.rows.items() if key[2] == split}
        return part

    def sets(self, task):
        """Sets of a task that have rows, in the order of the list."""
        there = {name for name, _, _ in self.rows}
        return [n for n, row in self.about.items() if row["task"] == task and n in there]

    def models(self, names):
        """Those of the names that have rows."""
        there = {model for _, model, _ in self.rows}
        return [name for name in names if name in there]

    def arms(self):
        """Names of further settings of Shoal."""
        there = dict.fromkeys(model for _, model, _ in self.rows)
        return [name for name in there if name not in (*DEFAULTS, *TUNED)]

    def has(self, name, model):
        """Whether a model has a row, good or bad, of any split."""
        return any((name, model, split) in self.rows for split in SPLITS)

    def complete(self, model, sets):
        """Whether a model has a row, good or bad, for every split that was run.

        These are the splits of Shoal's default; three, if it has none.
        """
        asked = {(n, split) for n, m, split in self.rows if m == OURS and n in sets}
        asked = asked or {(name, split) for name in sets for split in SPLITS}
        return all((name, model, split) in self.rows for name, split in asked)

    def values(self, name, model, score):
        """Values by split; none at all if a fit failed or has no such score."""
        rows = {split: self.rows.get((name, model, split)) for split in SPLITS}
        found = {split: float(row.get(score) or "nan") for split, row in rows.items() if row}
        return found if all(map(math.isfinite, found.values())) else {}

    def mean(self, name, model, score):
        """Mean over the splits that there are; NaN without them."""
        return _mean(self.values(name, model, score).values())

    def ratio(self, name, model, base, score):
        """Mean of a model over mean of a base, on the splits that both have; NaN without them."""
        mine, other = (self.values(name, each, score) for each in (model, base))
        both = mine.keys() & other.keys()
        return _mean(mine[k] for k in both) / _mean(other[k] for k in both)

    def ratios(self, sets, model, base, score):
        """These ratios, set by set."""
        return np.array([self.ratio(name, model, base, score) for name in sets])

    def largest_ratio(self, name, score):
        """The ratio of ours to the best other default model, and that model; NaN without ours."""
        others = {m: self.ratio(name, OURS, m, score) for m in self.models(DEFAULTS) if m != OURS}
        there = {model: ratio for model, ratio in others.items() if math.isfinite(ratio)}
        best = max(there, key=lambda model: there[model], default="")
        return there.get(best, math.nan), best

    def means(self, sets, models, score):
        """Means [sets, models]."""
        return np.array([[self.mean(name, m, score) for m in models] for name in sets])

    def failures(self):
        """Set, model and reason of every model that has no mean, once.

        A fit that took too long by the clock may have had little of the CPU.
        """
        found = {}
        for (name, model, _), row in self.rows.items():
            if row["status"] != "ok":
                cpu = f" ({float(row[SECONDS]):.0f} s of the CPU)" if row[SECONDS] else ""
                found.setdefault((name, model), row["status"] + cpu)
        return found


def _mean(values):
    values = list(values)
    return sum(values) / len(values) if values else math.nan


class Ranks(NamedTuple):
    """Mean ranks of models, Friedman's p-value and Nemenyi's critical difference at 5 %."""

    models: list[str]
    mean: np.ndarray
    sets: int
    p_value: float
    critical: float


def ranks(table, models):
    """Ranks of means [sets, models], lower first; a missing mean is last. Demšar (2006)."""
    filled = np.where(np.isnan(table), np.inf, table)
    by_set = stats.rankdata(filled, axis=1)
    count, kinds = by_set.shape
    p_value = float(stats.friedmanchisquare(*by_set.T).pvalue) if kinds > 2 else math.nan
    q = stats.studentized_range.ppf(0.95, kinds, np.inf) / math.sqrt(2)
    critical = float(q * math.sqrt(kinds * (kinds + 1) / (6 * count)))
    return Ranks(list(models), by_set.mean(0), count, p_value, critical)


def cliques(found):
    """Ends of the longest groups of models that do not differ by the critical difference."""
    order = np.sort(found.mean)
    ends = [order[order <= low + found.critical][-1] for low in order]
    groups, reach = [], -math.inf
    for low, high in zip(order, ends, strict=True):
        if high > reach and high > low:
            groups.append((low, high))
        reach = max(reach, high)
    return groups


def geometric(ratios):
    """Geometric mean of the ratios that there are."""
    ratios = np.asarray(ratios, float)
    ratios = ratios[np.isfinite(ratios)]
    return float(np.exp(np.log(ratios).mean())) if len(ratios) else math.nan
