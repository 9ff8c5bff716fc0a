"""What is one more member worth? Predicted and realised gains: python -m studies.worth

Twenty plain members are trained on every set and seed. Blocks of 3, 5 or 10 of them predict what
the others bring. gains.csv has every prediction beside what came, stops.csv where
`until="worth it"` stops. Sets and seeds that are in the files are not trained again. README.md is
written from them, with gains.png; --draw uses the rows that are there. plan.md was written before.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import shoal
from shoal.prediction.metrics import registry
from shoal.prediction.predictive import Predictive
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


def main() -> None:
    """Train, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="*", default=[*SETS])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if not options.draw:
        train(options.sets, options.seeds)


if __name__ == "__main__":
    main()
