"""What repulsion adds on tables: arms beside plain members of equal cost, and the arm that
out-of-fold scores choose.

A ratio is that of the mean scores over splits, set by set. Its geometric mean over the sets has a
95 % interval by Student's t on the logarithms.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from shoal.core.display.text import markdown_table
from studies.tables.results import FIRST, SECONDS
from studies.tables.sets import SPLITS

PLAIN = "plain 8"
EQUAL = {"kde": "plain 12", "f-kde": "plain 12", "forde": "plain 16"}
"""Plain members of equal cost, by method."""

MOST = "plain 16"
"""Plain members beside the choice among all methods."""


class Ratio(NamedTuple):
    """Geometric mean of the ratios of some sets, its interval, and how many are below 1."""

    mean: float
    low: float
    high: float
    lower: int
    sets: int

    def __str__(self):
        if self.sets < 2:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(values):
    """The ratio of a set of ratios."""
    logs = np.log(np.asarray(values, float))
    mean, count = logs.mean(), len(logs)
    half = stats.t.ppf(0.975, count - 1) * logs.std(ddof=1) / math.sqrt(count) if count > 1 else 0
    low, high = np.exp([mean - half, mean + half])
    return Ratio(float(np.exp(mean)), float(low), float(high), int((logs < 0).sum()), count)


class Arms:
    """The rows of the arms, on the splits of each set that all of them have."""

    def __init__(self, raw):
        self.raw = raw
        self.names = raw.arms()
        self.first = {name: FIRST[task] for task in FIRST for name in raw.sets(task)}
        self.splits = {name: self._whole(name) for name in self.first}
        self.sets = [name for name, splits in self.splits.items() if splits]

    def _whole(self, name):
        each = [self.raw.values(name, arm, self.first[name]) for arm in self.names]
        return [split for split in SPLITS if all(split in values for values in each)]

    def of(self, method):
        """The strengths of a method."""
        return [arm for arm in self.names if arm.rpartition(" ")[0] == method]

    def score(self, name, arm, split, score):
        """A score of a fit; None is that of the task."""
        return self.raw.values(name, arm, score or self.first[name])[split]

    def chosen(self, name, split, among):
        """The arm with the lowest out-of-fold score."""
        return min(among, key=lambda arm: self.score(name, arm, split, "oof"))

    def beside(self, among, base, score=None):
        """The ratio of an arm, or of the chosen one of several, to a base."""
        return ratio(
            [
                sum(
                    self.score(name, self.chosen(name, split, among), split, score)
                    for split in self.splits[name]
                )
                / sum(self.score(name, base, split, score) for split in self.splits[name])
                for name in self.sets
            ]
        )

    def rows(self):
        """Title, arms among which is chosen, and the plain members beside, of every row."""
        plain = [(arm, [arm], PLAIN) for arm in self.of("plain") if arm != PLAIN]
        each = [(f"`{arm}`", [arm], EQUAL[m]) for m in EQUAL for arm in self.of(m)]
        by_method = [
            (f"`{m}`, chosen out-of-fold", [PLAIN, *self.of(m)], EQUAL[m])
            for m in EQUAL
            if self.of(m)
        ]
        every = [PLAIN, *(arm for m in EQUAL for arm in self.of(m))]
        return [*plain, *each, *by_method, ("all, chosen out-of-fold", every, MOST)]


def section(raw):
    """The table, and whether repulsion pays."""
    arms = Arms(raw)
    missing = [name for name in arms.first if name not in arms.sets]
    lines, verdicts, harms = [], [], []
    for title, among, equal in arms.rows():
        here, there = arms.beside(among, PLAIN), arms.beside(among, equal)
        noisy = arms.beside(among, equal, "noisy")
        cost = str(round(arms.beside(among, PLAIN, SECONDS).mean, 2)) if len(among) == 1 else "-"
        beside = [equal, str(there), f"{there.lower} of {there.sets}", str(noisy)]
        lines.append([title, cost, str(here), *(beside if equal != PLAIN else ["-"] * 4)])
        if len(among) > 1:
            verdicts.append((title.partition(",")[0], there, noisy))
        elif there.low > 1:
            harms.append(title)
    heads = [
        "arm",
        f"CPU seconds / {PLAIN}",
        f"score / {PLAIN}",
        "equal cost",
        "score / equal cost",
    ]
    heads += ["lower on", "score on noisy inputs / equal cost"]
    count = sum(map(len, arms.splits.values()))
    text = (
        f"Ratios of CRPS or log-loss on {len(arms.sets)} sets ({count} splits of them), below 1 "
        "where an arm is better: geometric means over the sets with 95 % intervals. All fits are "
        "in `repulsion.csv`. A choice also costs the trainings it compares, which are not counted."
    )
    text += f" Worse by themselves, beyond the interval: {', '.join(harms)}." if harms else ""
    text += f" Not complete: {', '.join(missing)}." if missing else ""
    return [" ".join(said(verdicts)), text, markdown_table(heads, lines)]


def said(verdicts):
    """One sentence per place where scores were measured."""
    for where, place in (("On the test points", 1), ("On noisy inputs", 2)):
        pays = [found[0] for found in verdicts if found[place].high < 1]
        harms = [found[0] for found in verdicts if found[place].low > 1]
        words = [f"{', '.join(pays)} chosen out-of-fold pays"] if pays else ["no method pays"]
        words += [f"{', '.join(harms)} does harm"] if harms else []
        yield f"**{where}, {' and '.join(words)} beside plain members of equal cost.**"
