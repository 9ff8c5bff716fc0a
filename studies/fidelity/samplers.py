"""Samplers on the known posteriors: python -m studies.fidelity.samplers [--table]

Twenty plain members are trained as in `shoal fidelity`, and each begins a chain. A sampler keeps 50
draws of each chain, after about 1,500 gradients of all data. Rows of a sampler are those of all
1,000 draws; rows of `NAME, 20 draws` have the last draw of each chain, as many as there are
members. Rows are appended to samplers.csv; those that are there are left out. `--table` prints the
tables of README.md, with members from results.csv and stein.csv.
"""

import argparse
import time
from pathlib import Path

import torch

from shoal.analysis.fidelity import problems
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.study import Budget, distances_of, fitted, sampled
from shoal.core.display.text import markdown_table, plus_minus
from shoal.prediction.statistics import mean_and_error
from studies import RESULTS
from studies.common import append_rows, read_csv

FOLDER = RESULTS / "fidelity"
FILE = FOLDER / "samplers.csv"
PROBLEMS = ("linear", "regression", "classification", "digits")
SAMPLERS = ("mclmc", "hmc", "sghmc", "sgld")
BESIDE = ("posterior draws", "ensemble", "kde:legacy", "svgd:legacy", "kde:calibrated",
          "f-kde:calibrated", "f-svgd:calibrated")  # fmt: skip
SHOWN = {"frechet": PROBLEMS, "tv": PROBLEMS, "stein": PROBLEMS, "weights/sliced": ("linear",)}
SEEDS = 3
HEADER = ["problem", "method", "seed", "distance", "value"]


def run(path: Path = FILE, names: tuple[str, ...] = PROBLEMS, seeds: int = SEEDS) -> None:
    """Draw what is missing, and append its rows, seed by seed."""
    done = {(r["problem"], r["method"], int(r["seed"])) for r in read_csv(path, missing_ok=True)}
    for seed in range(seeds):
        for name in names:
            missing = [label for label in SAMPLERS if (name, label, seed) not in done]
            if not missing:
                continue
            problem = problems.make(name)
            reference = references.load(problem)
            start = fitted(problem, "ensemble", Budget(), seed)
            for label in missing:
                began = time.process_time()
                flat = sampled(problem, label, start, seed)
                found = distances_of(problem, reference, flat)
                found["cpu_seconds"] = time.process_time() - began
                few = distances_of(problem, reference, flat[-Budget().members :])
                rows = {f"{label}, 20 draws": few, label: found}
                append_rows(path, HEADER, [
                    [name, method, seed, distance, f"{value:.6g}"]
                    for method, values in rows.items() for distance, value in values.items()
                ])  # fmt: skip


def table(path: Path = FILE) -> str:
    """Means and standard errors over seeds of each distance: samplers, then members."""
    found: dict[tuple[str, str, str], list[float]] = {}
    members = [*read_csv(FOLDER / "results.csv"), *read_csv(FOLDER / "stein.csv")]
    for row in [*read_csv(path), *members]:
        key = row["distance"], row["problem"], row["method"]
        found.setdefault(key, []).append(float(row["value"]))
    methods = (*(m for s in SAMPLERS for m in (s, f"{s}, 20 draws")), *BESIDE)
    parts = []
    for distance, names in SHOWN.items():
        cells = {m: [found.get((distance, name, m)) for name in names] for m in methods}
        lines = [
            [m, *("" if c is None else plus_minus(*mean_and_error(c)) for c in row)]
            for m, row in cells.items()
            if any(row)
        ]
        parts.append(markdown_table([distance, *names], lines))
    return "\n\n".join(parts)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="print the table")
    if parser.parse_args().table:
        print(table())
        return
    torch.set_num_threads(1)
    run()


if __name__ == "__main__":
    main()
