"""Rows of the study on disk, and the table they make."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.analysis.fidelity.contestants import Budget
from shoal.analysis.fidelity.study import ALWAYS, Row, summarise
from shoal.app.outcome import table
from shoal.core.errors import ConfigError
from shoal.core.files import read_json, write_json

__all__ = ["FILE", "closest", "read_rows", "results_csv", "results_text", "write_rows"]

FILE = "fidelity.json"
"""Where a folder keeps its rows."""


def write_rows(folder: Path, budget: Budget, rows: Sequence[Row]) -> None:
    """All rows, with the budget they were made under."""
    value = {"budget": asdict(budget), "rows": [asdict(row) for row in rows]}
    write_json(folder / FILE, value)


def read_rows(folder: Path, budget: Budget | None = None) -> list[Row]:
    """The rows of a folder; none where there is no file, and an error for another budget."""
    path = folder / FILE
    if not path.is_file():
        return []
    value = read_json(path)
    if budget is not None and value["budget"] != asdict(budget):
        raise ConfigError(
            f"{path} was made with {value['budget']}, not {asdict(budget)}; give another folder"
        )
    return [Row(**row) for row in value["rows"]]


def results_csv(rows: Sequence[Row]) -> str:
    """One number a line."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["problem", "method", "seed", "distance", "value"])
    for row in rows:
        for name, value in row.distances.items():
            writer.writerow([row.problem, row.method, row.seed, name, f"{value:.6g}"])
    return stream.getvalue()


def results_text(rows: Sequence[Row], distance: str = "frechet") -> str:
    """Methods by problems: mean and standard error of one distance, the closest method first."""
    summary = summarise(rows)
    problems = list(dict.fromkeys(problem for problem, _ in summary))
    methods = list(dict.fromkeys(method for _, method in summary))

    def cell(problem: str, method: str) -> str:
        found = summary.get((problem, method), {}).get(distance)
        if found is None:
            return "–"
        mean, error = found
        return f"{mean:.3f}" if error != error else f"{mean:.3f} ± {error:.3f}"

    order = sorted(methods, key=lambda method: _overall(summary, problems, method, distance))
    lines = [[method, *(cell(problem, method) for problem in problems)] for method in order]
    return table(lines, ["method", *problems])


def _overall(summary: Mapping, problems: Sequence[str], method: str, distance: str) -> float:
    """Mean over problems of the distance, as a share of the plain ensemble's where it is known."""
    shares = []
    for problem in problems:
        mine = summary.get((problem, method), {}).get(distance, (float("inf"),))[0]
        plain = summary.get((problem, "ensemble"), {}).get(distance, (1.0,))[0]
        shares.append(mine / plain)
    return sum(shares) / len(shares)


def closest(rows: Sequence[Row], distance: str = "frechet") -> dict[str, dict[str, Any]]:
    """For each problem, the closest calibrated method and the closest of all the others."""
    summary = summarise(rows)
    found = {}
    for problem in dict.fromkeys(problem for problem, _ in summary):
        means = {m: d[distance][0] for (p, m), d in summary.items() if p == problem and m != ALWAYS}
        ours = {m: v for m, v in means.items() if "calibrated" in m}
        others = {m: v for m, v in means.items() if m not in ours}
        if ours and others:
            best, rival = min(ours, key=ours.__getitem__), min(others, key=others.__getitem__)
            found[problem] = {
                "calibrated": best, "distance": ours[best],
                "other": rival, "other_distance": others[rival],
            }  # fmt: skip
    return found
