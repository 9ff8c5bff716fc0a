"""Point masses at the maximum of the last layers: python -m studies.evidence.maximum

The plain ensembles of the study are trained again from their seeds, since it keeps no weights. Rows
are appended to maximum.csv: the log evidence of point masses at the members, which must agree with
raw.csv, and of members whose last layers are moved to the maximum of the likelihood. The evidence
of every prior on the last layer is at most the latter: log ∫ L dπ ≤ max log L.
"""

import sys
import warnings
from pathlib import Path

import torch

import shoal
from shoal.analysis.evidence.members import log_likelihoods, modules_of, parts_of
from shoal.analysis.evidence.prior_comparison import MAXIMUM, PriorComparison
from shoal.core.display.text import markdown_table
from shoal.data.dataset import Split
from studies.common import append_rows, read_csv
from studies.evidence.make import FIELDS, FOLDER, MEMBERS, UCI, Cell, double, task

DATA = ("heads", "digits", *(f"uci-{name}" for name in reversed(UCI)), "mnist")
SEEDS = 5
SHOWN = (
    "point masses/log evidence", f"{MAXIMUM}/log evidence", "flow, last layer/log evidence",
    "Gaussians at the members, last layer/log evidence", "point masses/NLL", f"{MAXIMUM}/NLL",
)  # fmt: skip


def rows_of(cell: Cell, quick: bool = False) -> list[list[object]]:
    """Log evidence and NLL of both kinds of point masses."""
    data, build, options = task(cell.data, cell.seed, quick)
    ensemble = shoal.Ensemble.init(build, members=MEMBERS, seed=cell.seed)
    how = options | {"method": "ensemble", "seed": cell.seed, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", shoal.ShoalWarning)
        run = shoal.fit(ensemble, data, **how)
    parts, modules = parts_of(data), modules_of(run.ensemble, range(MEMBERS))
    assert parts.test is not None and parts.test.y is not None and parts.train.y is not None
    train, test = (Split(part.x.double(), double(part.y)) for part in (parts.train, parts.test))
    found = PriorComparison(modules, run.likelihood, train, test, log_likelihoods(run, parts.train))
    return [
        [*cell, f"prior/{prior.name}/{name}", f"{value:.10g}"]
        for prior in (*found.point_masses(), *found.maximum())
        for name, value in (("log evidence", prior.log_evidence), ("NLL", prior.nll))
    ]


def tables(path: Path) -> str:
    """Log evidence of four priors and NLL of two, means over the seeds of maximum.csv."""
    raw = read_csv(path.with_name("raw.csv"))
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in [*raw, *read_csv(path)]:  # the cells of raw.csv that were trained again
        if row["method"] == "ensemble":
            by_name = found.setdefault(row["data"], {}).setdefault(row["metric"], {})
            by_name[int(row["seed"])] = float(row["value"])
    rows = []
    for data, metrics in found.items():
        seeds = metrics.get(f"prior/{MAXIMUM}/NLL", {})
        cells = [[metrics[f"prior/{name}"][seed] for seed in seeds] for name in SHOWN if seeds]
        means = [f"{sum(values) / len(values):.2f}" for values in cells]
        rows += [[data, str(len(seeds)), *means]] if means else []
    return markdown_table(["data", "seeds", *SHOWN], rows)


def main(path: Path = FOLDER / "maximum.csv") -> None:
    """Compute the missing cells."""
    torch.set_num_threads(1)
    done = {(row["data"], int(row["seed"])) for row in read_csv(path, missing_ok=True)}
    for data in DATA:
        for seed in range(SEEDS):
            if (data, seed) not in done:
                append_rows(path, list(FIELDS), rows_of(Cell(data, "ensemble", seed)))
                print(data, seed, flush=True)


if __name__ == "__main__":
    print(tables(FOLDER / "maximum.csv")) if "--tables" in sys.argv else main()
