"""What is one more member worth? Predicted and realised gains: python -m studies.worth

Twenty plain members are trained on every set and seed. Blocks of 3, 5 or 10 of them predict what
the others bring. gains.csv has every prediction beside what came, stops.csv where
`until="worth it"` stops. Sets and seeds that are in the files are not trained again. It then draws
gains.png and prints the tables of README.md; --draw uses the rows that are there. plan.md was
written before the runs.
"""

import argparse
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

import numpy as np

import shoal
from shoal.core.display.text import markdown_table
from shoal.plots.figure import blank, legend, png
from shoal.prediction.metrics import registry
from shoal.prediction.predictive import Predictive
from shoal.prediction.statistics import t_quantile
from shoal.prediction.worth import SizeCurve, size_curves
from studies import RESULTS
from studies.auto.problems import CHEAP, SCIKIT_LEARN, problem
from studies.common import append_rows, read_csv

FOLDER = RESULTS / "worth"
GAINS, STOPS = FOLDER / "gains.csv", FOLDER / "stops.csv"
SETS = (*CHEAP, *SCIKIT_LEARN)
SEEDS, MEMBERS = 5, 20
BLOCKS = {3: (1, 2, 5, 10), 5: (1, 2, 5, 10), 10: (1, 2, 5, 10)}
"""Members that predict, and numbers of new members."""
PRICES = (0.001, 0.003, 0.01)
START = 5

HEADER = ["set", "seed", "score", "members", "block", "more", "gain", "error", "low", "high"]
HEADER += ["realised", "others", "seconds"]
STOP_HEADER = ["set", "seed", "price", "block", "stopped", "oracle", "next", "last", "seconds"]


def some(pred: Predictive, members: Any) -> Predictive:
    """The prediction of some members."""
    return replace(pred, members=pred.members[list(members)])


def realised(score: str, pred: Predictive, y: Any, ood: Predictive, old: list, new: list) -> float:
    """What adding members brought to a score; positive is better."""
    kind = f"auroc_{pred.likelihood.about.uncertainty}" if score.startswith("auroc") else score
    metric, sign = registry[kind], -1 if registry[kind].better == "lower" else 1
    before, after = (
        metric(some(pred, members), some(ood, members) if metric.ood else y)
        for members in (old, old + new)
    )
    return sign * (after - before)


def gains(pred: Predictive, y: Any, ood: Predictive) -> Iterator[list]:
    """Every prediction of a block of members, beside what its next members and all others bring."""
    for count, steps in BLOCKS.items():
        for first in range(0, MEMBERS - count + 1, count):
            order = [(first + k) % MEMBERS for k in range(MEMBERS)]
            old, new = order[:count], order[count:]
            found = size_curves(some(pred, old), y, ood={"ood": some(ood, old)})
            rest = size_curves(some(pred, new), y)
            for score, curve in found.items():
                for more in steps:
                    gain = curve.gain(more)
                    came = realised(score, pred, y, ood, old, new[:more])
                    fields = (gain.value, gain.error, gain.low, gain.high)
                    size = count + more
                    known = score in rest and size <= len(new)
                    others = difference(rest[score], count, size) if known else math.nan
                    yield [score, count, first, more, *fields, came, others]


def difference(curve: SizeCurve, few: int, many: int) -> float:
    """The gain of an average ensemble of `many` members over one of `few`; positive is better."""
    change = curve.at(few) - curve.at(many)
    return -change if curve.score == "accuracy" else change


def stops(pred: Predictive, y: Any) -> Iterator[list]:
    """Where growing from five members stops, by one half of the points; the other half judges."""
    halves = [np.arange(len(pred)) % 2 == k for k in (0, 1)]
    choose, judge = (np.flatnonzero(half) for half in halves)
    whole = size_curves(pred[judge], y[judge], scores=["nll"])["nll"]
    for price in PRICES:
        best = next(
            (m for m in range(START, MEMBERS) if difference(whole, m, m + 1) < price), MEMBERS
        )
        for first in range(0, MEMBERS, START):
            order, size = [(first + k) % MEMBERS for k in range(MEMBERS)], START
            while size < MEMBERS:
                members = some(pred[choose], order[:size])
                curve = size_curves(members, y[choose], scores=["nll"])["nll"]
                more = curve.members_worth(price, min(5, MEMBERS - size))
                if not more:
                    break
                size += more
            after = difference(whole, size, size + 1) if size < MEMBERS else math.nan
            before = difference(whole, size - 1, size) if size > START else math.nan
            yield [price, first, size, best, after, before]


def cell(name: str, seed: int) -> tuple[list[list], list[list]]:
    """The rows of one set and seed for both files."""
    data = problem(name, seed)
    ensemble = shoal.Ensemble.init(data.build, members=MEMBERS, seed=seed)
    options = {**data.options, "seed": seed, "progress": False}
    run = shoal.fit(ensemble, (data.x, data.y), method="ensemble", **options)
    x, y = data.test
    spent = run.provenance["seconds"]
    pred, ood = shoal.predict(run, x), shoal.predict(run, data.ood)
    rows = [[name, seed, *row, f"{spent:.2f}"] for row in gains(pred, y, ood)]
    return rows, [[name, seed, *row, f"{spent:.2f}"] for row in stops(pred, y)]


def rounded(row: list) -> list:
    """A row with six digits of every number."""
    return [f"{value:.6g}" if isinstance(value, float) else value for value in row]


def train(sets: list[str], seeds: int) -> None:
    """Train what is not in both files."""
    known = {(row["set"], row["seed"]) for row in read_csv(STOPS, missing_ok=True)}
    for seed in range(seeds):
        for name in sets:
            if (name, str(seed)) in known:
                continue
            begun = time.monotonic()
            rows, ends = cell(name, seed)
            append_rows(GAINS, HEADER, map(rounded, rows))
            append_rows(STOPS, STOP_HEADER, map(rounded, ends))
            print(name, seed, f"{time.monotonic() - begun:.1f} s", flush=True)


TIES = 1e-9
"""Rounding: an interval of width 0 holds a gain that is equal."""


def rows_of(**wanted: Any) -> list[dict[str, str]]:
    """Rows of gains.csv with these values."""
    fits = {name: str(value) for name, value in wanted.items()}
    return [row for row in read_csv(GAINS) if all(row[k] == v for k, v in fits.items())]


def by_set(rows: list[dict[str, str]]) -> dict[str, list[dict[str, str]]]:
    """The rows of each set."""
    sets: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        sets.setdefault(row["set"], []).append(row)
    return sets


def holds(row: dict[str, str]) -> bool:
    """Whether the interval holds what came."""
    low, came, high = (float(row[name]) for name in ("low", "realised", "high"))
    return low - TIES <= came <= high + TIES


def coverage_table() -> str:
    """Shares of growths in their intervals, by score and number of predicting members."""
    lines = []
    for score in dict.fromkeys(row["score"] for row in read_csv(GAINS)):
        cells = []
        for members in BLOCKS:
            sets = by_set(rows_of(score=score, members=members)).values()
            shares = [mean(map(holds, rows)) for rows in sets]
            reach = t_quantile(0.975, len(shares) - 1) * stdev(shares) / math.sqrt(len(shares))
            cells.append(f"{mean(shares):.3f} ± {reach:.3f}")
        lines.append([score.replace("ood", "of OOD inputs"), len(sets), *cells])
    return markdown_table(["score", "sets", *(f"{m} members predict" for m in BLOCKS)], lines)


def ratio(members: int, rows: list[dict[str, str]]) -> float:
    """Sum of predicted over sum of averaged gains."""
    known = [row for row in rows if row["others"] != "nan" and int(row["members"]) == members]
    return sum(float(row["gain"]) for row in known) / sum(float(row["others"]) for row in known)


FEW = (3, 5)
"""Numbers of predicting members for which the others suffice for an average."""


def ratio_table() -> str:
    """Predicted over averaged gains in NLL of each set."""
    sets = by_set(rows_of(score="nll"))
    lines = [[name, *(f"{ratio(m, rows):.2f}" for m in FEW)] for name, rows in sets.items()]
    logs = [[math.log(ratio(m, rows)) for rows in sets.values()] for m in FEW]
    lines.append(["geometric mean", *(f"{math.exp(mean(each)):.2f}" for each in logs)])
    return markdown_table(["set", *(f"{m} members predict" for m in FEW)], lines)


def correlation(members: int) -> float:
    """Of predicted and averaged gains in NLL."""
    known = [row for row in rows_of(score="nll", members=members) if row["others"] != "nan"]
    gain, others = ([float(row[name]) for row in known] for name in ("gain", "others"))
    return float(np.corrcoef(gain, others)[0, 1])


def stops_table() -> str:
    """Where growing stops, beside the oracle, by price."""
    lines = []
    for price in PRICES:
        rows = [row for row in read_csv(STOPS) if float(row["price"]) == price]
        stopped, oracle = ([int(row[name]) for row in rows] for name in ("stopped", "oracle"))
        off = [a - b for a, b in zip(stopped, oracle, strict=True)]
        near = mean(abs(each) <= 2 for each in off)
        cells = (f"{mean(stopped):.1f}", f"{mean(oracle):.1f}", f"{mean(off):+.1f}", f"{near:.0%}")
        lines.append([price, *cells])
    header = ["price in nats", "stopped at", "oracle", "difference", "within two members"]
    return markdown_table(header, lines)


def draw() -> None:
    """Predicted against averaged gains in NLL, of every set and number of new members."""
    figure, axes = blank()
    marks = itertools.cycle("osD^vPX<>")
    for name, rows in by_set(rows_of(score="nll", members=5)).items():
        known = [row for row in rows if row["others"] != "nan"]
        steps = sorted({int(row["more"]) for row in known})
        means = [
            [mean(float(row[k]) for row in known if int(row["more"]) == step) for step in steps]
            for k in ("gain", "others")
        ]
        axes.plot(*means, next(marks), label=name, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="predicted gain (nats)", ylabel="what came (nats)")
    ends = axes.get_xlim()
    axes.plot(ends, ends, color="0.5", linewidth=0.8)
    legend(figure, axes)
    (FOLDER / "gains.png").write_bytes(png(figure, 110))


def main() -> None:
    """Train, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="*", default=[*SETS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if not options.draw:
        train(options.sets, options.seeds)
    draw()
    print(coverage_table(), ratio_table(), stops_table(), sep="\n\n")
    print({members: round(correlation(members), 2) for members in FEW})


if __name__ == "__main__":
    main()
