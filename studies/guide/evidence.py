"""Numbers of the guide, from the raw files of docs/results and docs/benchmarks."""

import functools
import json
import re
from typing import NamedTuple

from shoal.prediction.statistics import (
    SIGNIFICANCE,
    holm,
    mean_and_error,
    paired_difference,
    paired_p_value,
)
from studies import DOCS, RESULTS
from studies.common import read_csv

BENCHMARKS = DOCS / "benchmarks"
PERCENT = {"scale": 100, "digits": 2, "unit": " points"}


@functools.cache
def rows(path):
    """The rows of a CSV file."""
    return read_csv(RESULTS / path)


def by_seed(path, metric: str, by: str = "seed", **where):
    """Values of a metric by seed, for the rows that agree with `where`; fails if there are none.

    `by` names another column than the seed, such as the split.
    A file has a column per metric, or the columns metric and value. `path` may be several files.
    Values that are not numbers, as those of a run that diverged, are left out.
    """
    found = {}
    for row in (
        rows(path) if isinstance(path, str) else [row for each in path for row in rows(each)]
    ):
        if all(row[key] == str(value) for key, value in where.items()):
            if row.get(metric, "nan") not in ("", "nan"):
                found[int(row[by])] = float(row[metric])
            elif metric in (row.get("metric"), row.get("distance")):
                found[int(row[by])] = float(row["value"])
    if not found:
        raise KeyError(f"{path} has no {metric} for {where}")
    return found


class Compared(NamedTuple):
    """A mean difference, its 95 % interval, its p value and the number of pairs."""

    difference: float
    low: float
    high: float
    p: float
    seeds: int


def difference(first, second, *, overlap=0.0):
    """Mean difference of two methods with its 95 % interval, over the seeds that both have.

    `overlap` is that of splits of one data set (see `shoal.prediction.statistics.standard_error`).
    """
    seeds = sorted(first.keys() & second.keys())
    a, b = [first[s] for s in seeds], [second[s] for s in seeds]
    found = paired_difference(a, b, overlap=overlap)
    return Compared(*found, paired_p_value(a, b, overlap), len(seeds))


def interval(found, scale=1.0, digits=3, unit=""):
    """A difference in words: `+3.38 points (+2.72 to +4.04⟦0.0005⟧)`; see `corrected`."""
    mean, low, high = (scale * value for value in found[:3])
    if found.seeds < 2:
        return f"{mean:+.{digits}f}{unit} (one seed)"
    return f"{mean:+.{digits}f}{unit} ({low:+.{digits}f} to {high:+.{digits}f}⟦{found.p!r}⟧)"


def size(found, scale=1.0, digits=3, unit=""):
    """The size of a difference in words, without its interval; see `corrected`."""
    mark = f"⟦{found.p!r}⟧" if found.seeds > 1 else ""
    return f"{abs(scale * found.difference):.{digits}f}{unit}{mark}"


MARK = re.compile(r"⟦([^⟧]*)⟧")


def corrected(texts, family=None):
    """Texts in which every interval says whether it is significant, by Holm over all of them.

    `family` are other texts to correct over, which have the same intervals.
    """
    marks = [float(p) for text in family or texts for p in MARK.findall(text)]
    adjusted = dict(zip(marks, holm(marks), strict=True))

    def words(match):
        p = float(match[1])
        if adjusted[p] < SIGNIFICANCE:
            return ""
        wide = ", not significant after correction over all findings"
        return wide if p < SIGNIFICANCE else ", not significant"

    return [MARK.sub(words, text) for text in texts]


def noise_share(path, method):
    """The share of a gain in corrupted accuracy that noise brings, and the gain without noise."""
    shifts = [key.split(".")[1] for key in rows(path)[0] if key.startswith("shifts.")]
    gains = {s: compared(path, f"shifts.{s}.accuracy", method).difference for s in shifts}
    noise = [gain for name, gain in gains.items() if "noise" in name]
    rest = [gain for name, gain in gains.items() if "noise" not in name]
    return sum(noise) / sum(gains.values()), sum(rest) / len(rest)


def mean(values, scale=1.0, digits=3):
    """Mean and standard error over seeds."""
    value, error = mean_and_error(list(values.values()))
    return f"{scale * value:.{digits}f} ± {scale * error:.{digits}f}"


def seeds(*values):
    """The number of seeds that all of these have."""
    return len(set.intersection(*(set(each) for each in values)))


def compared(path, metric, method, plain="ensemble", **where):
    """The paired difference of a method to the plain ensemble."""
    return difference(
        by_seed(path, metric, method=method, **where), by_seed(path, metric, method=plain, **where)
    )


def significant(differences, sign=0):
    """How many differences (of one sign) are significant, by Holm over all of them."""
    adjusted = zip(differences, holm([each.p for each in differences]), strict=True)
    return sum(p < 0.05 and sign * each.difference >= 0 for each, p in adjusted)


def largest(path, metric, methods, **where):
    """The largest absolute difference of these methods to the plain ensemble."""
    return max(abs(compared(path, metric, method, **where).difference) for method in methods)


def times_plain(file, method, model, engine="auto"):
    """Time of a step, as a multiple of the plain ensemble's in the same measurement."""
    return step_ms(file, method, model, engine) / step_ms(file, "ensemble", model, engine)


def step_ms(file, method, model, engine="auto"):
    """Milliseconds per step in a file of `shoal bench`."""
    steps = json.loads((BENCHMARKS / file).read_text(encoding="utf-8"))["steps"]
    times = [
        row["ms"]
        for row in steps
        if (row["model"], row["method"], row["engine"]) == (model, method, engine)
        and row["what"] == "shoal"
    ]
    if not times:
        raise KeyError(f"{file} has no {method} of {model} with {engine}")
    return times[0]


def strength_row(label, members):
    """One row of the strength sweep on MNIST: accuracy, NLL, ECE and two AUROCs, as printed."""
    for line in (RESULTS / "mnist/strength.txt").read_text(encoding="utf-8").splitlines():
        if match := re.match(rf"{re.escape(label)}\s+{members}\s+(.*)", line):
            return [cell.strip() for cell in re.findall(r"[\d.]+ ± [\d.]+", match[1])]
    raise KeyError(f"strength.txt has no {label} with {members} members")
