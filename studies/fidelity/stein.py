"""Stein discrepancies of trained weights: python -m studies.fidelity.stein

The study `shoal fidelity` keeps no weights. This script trains the methods of `worse.py` again,
with the same seeds and budget, and appends the unbiased squared discrepancy, with the width of the
posterior's draws, to stein.csv. Rows that are already there are left out.
"""

from pathlib import Path

import torch

from shoal.analysis.fidelity.study import Budget, Row, Study
from studies import RESULTS
from studies.common import append_rows, read_csv

FILE = RESULTS / "fidelity/stein.csv"
PROBLEMS = ("linear", "regression", "classification", "digits")
METHODS = ("ensemble", "f-svgd:calibrated", "f-kde:calibrated", "kde:calibrated", "kde:legacy",
           "svgd:legacy")  # fmt: skip
SEEDS = 5


def main(path: Path = FILE) -> None:
    """Train what is missing, and append its rows."""
    torch.set_num_threads(1)
    found = read_csv(path, missing_ok=True)
    done = [Row(row["problem"], row["method"], int(row["seed"]), {}) for row in found]

    def keep(row: Row) -> None:
        value = f"{row.distances['stein']:.6g}"
        cells = [row.problem, row.method, row.seed, "stein", value]
        append_rows(path, ["problem", "method", "seed", "distance", "value"], [cells])

    for count in range(len(METHODS) + 1):  # each method on all problems: a part is of use
        done = [*done, *Study(PROBLEMS, METHODS[:count], SEEDS, Budget()).run(keep, done)]


if __name__ == "__main__":
    main()
