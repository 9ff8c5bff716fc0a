"""Tables and figure of the UCI study, from its CSV files alone."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import holm, mean_and_error, paired_difference, paired_p_value
from studies.common import read_csv

__all__ = ["PUBLISHED", "strengths", "write"]

OVERLAP = 1 / 9
"""Test points / training points of a published split; see `standard_error`."""
PUBLISHED = {
    "boston": (3.28, 1.00, 2.41, 0.25),
    "concrete": (6.03, 0.58, 3.06, 0.18),
    "energy": (2.09, 0.29, 1.38, 0.22),
    "wine": (0.64, 0.04, 0.94, 0.12),
    "yacht": (1.58, 0.48, 1.18, 0.21),
    "kin8nm": (0.09, 0.00, -1.20, 0.02),
    "power": (4.11, 0.17, 2.79, 0.04),
    "naval": (0.00, 0.00, -5.63, 0.05),
    "protein": (4.71, 0.06, 2.83, 0.02),
}
"""RMSE and NLL with their deviations: table 1 of Lakshminarayanan et al. (2017)."""


def strengths(*folders: Path) -> dict[tuple[str, str], float]:
    """Strength of lowest NLL on held-out training data, by problem and method."""
    found: dict[tuple[str, str], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for folder in dict.fromkeys(folders):
        for row in read_csv(folder / "strengths.csv", missing_ok=True):
            method = row["column"].split()[0]
            found[row["problem"], method][float(row["strength"])].append(float(row["nll"]))
    return {
        key: min(values, key=lambda strength: np.mean(values[strength]))
        for key, values in found.items()
    }


Scores = dict[tuple[str, str, str], dict[int, float]]
"""Values by problem, column and metric, and by split."""

UNITS = {"kin8nm": 10.0, "naval": 1e4}
"""RMSE of these problems is small, and tables multiply it."""
ENOUGH = 5
"""Splits of a column that may be the best one."""
FEWEST = 3
"""Splits of a difference."""
COLUMNS = ("uci", "uci-published", "gaussian", "f-kde", "kde", "before", "bde")


def scores(folder: Path) -> Scores:
    """All test scores."""
    found: Scores = defaultdict(dict)
    files = (folder / name for name in ("raw.csv", "bde.csv"))
    for row in [row for file in files for row in read_csv(file, missing_ok=True)]:
        for metric in ("rmse", "nll", "gaussian_nll", "coverage_90", "seconds"):
            if row.get(metric):
                split = int(row["split"])
                found[row["problem"], row["column"], metric][split] = float(row[metric])
    return found


def measured(found: Scores, *columns: str) -> list[str]:
    """Those of the columns that have runs."""
    known = {column for _, column, _ in found}
    return [column for column in columns if column in known]


def candidates(folder: Path) -> list[tuple[str, float, float]]:
    """Candidates with NLL and log RMSE on held-out data, means over problems; lowest NLL first.

    Means over the splits of a problem come first, so that every problem has the same weight.
    """
    values: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in read_csv(folder / "settings.csv", missing_ok=True):
        both = float(row["nll"]), float(np.log(float(row["rmse"])))
        values[row["problem"], row["split"]][row["column"]].append(both)
    names = list(dict.fromkeys(name for row in values.values() for name in row))
    whole = {case: row for case, row in values.items() if len(row) == len(names)}
    found = []
    for name in names:
        problems: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for (problem, _), row in whole.items():
            problems[problem] += row[name]
        nll, rmse = np.mean([np.mean(each, 0) for each in problems.values()], 0)
        found.append((name, float(nll), float(rmse)))
    return sorted(found, key=lambda entry: entry[1])


def table(found: Scores, metric: str) -> str:
    """Mean ± standard error over splits, the printed numbers; the lowest is bold."""
    lines, columns = [], measured(found, *COLUMNS)
    for problem, published in PUBLISHED.items():
        unit = UNITS.get(problem, 1.0) if metric == "rmse" else 1.0
        rows = {c: found[problem, c, metric] for c in columns if (problem, c, metric) in found}
        whole = {c: np.mean([*r.values()]) for c, r in rows.items() if len(r) >= ENOUGH}
        best = min(whole, key=lambda c: whole[c], default=None)
        cells = [_mean(rows.get(column), unit, column == best) for column in columns]
        mean, deviation = published[:2] if metric == "rmse" else published[2:]
        scale = f" x {unit:g}" if unit != 1 else ""
        shown = f"{unit * mean:.2f} ± {unit * deviation:.2f}"
        lines.append([problem + scale, *cells[:2], shown, *cells[2:]])
    return markdown_table(["problem", *columns[:2], "printed (SD)", *columns[2:]], lines)


def _mean(row: dict[int, float] | None, unit: float, best: bool) -> str:
    if not row:
        return ""
    mean, error = mean_and_error([unit * value for value in row.values()])
    text = f"{mean:.2f} ± {error:.2f}" if len(row) > 1 else f"{mean:.2f}"
    text += f" (n = {len(row)})" if len(row) < ENOUGH else ""
    return f"**{text}**" if best else text


def differences(found: Scores, metric: str) -> str:
    """`uci` minus each column, paired by split; bold: significant after Holm's correction."""
    others = measured(found, *COLUMNS[1:])
    cases = [(problem, column) for problem in PUBLISHED for column in others]
    pairs: dict[tuple[str, str], tuple[Sequence[float], Sequence[float]]] = {}
    for problem, column in cases:
        ours = found.get((problem, "uci", metric), {})
        other = found.get((problem, column, metric), {})
        common = sorted(ours.keys() & other.keys())
        if len(common) >= FEWEST:
            unit = UNITS.get(problem, 1.0) if metric == "rmse" else 1.0
            pairs[problem, column] = (
                [unit * ours[s] for s in common],
                [unit * other[s] for s in common],
            )
    adjusted = dict(
        zip(pairs, holm([paired_p_value(*pair, OVERLAP) for pair in pairs.values()]), strict=True)
    )
    lines = []
    for problem in PUBLISHED:
        cells = []
        for column in others:
            pair = pairs.get((problem, column))
            if pair is None:
                cells.append("")
                continue
            mean, low, high = paired_difference(*pair, overlap=OVERLAP)
            text = f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
            cells.append(f"**{text}**" if adjusted[problem, column] < 0.05 else text)
        lines.append([problem, *cells])
    return markdown_table(["problem", *(f"minus {column}" for column in others)], lines)


def reproduction(found: Scores) -> str:
    """Mean ± standard deviation over splits beside the printed numbers."""
    lines = []
    for problem, (rmse, rmse_sd, nll, nll_sd) in PUBLISHED.items():
        cells = [f"{rmse:.2f} ± {rmse_sd:.2f}", f"{nll:.2f} ± {nll_sd:.2f}"]
        for column in ("uci-published", "lr 0.1"):
            for metric in ("rmse", "gaussian_nll"):
                values = [*found.get((problem, column, metric), {}).values()]
                shown = f"{np.mean(values):.3g} ± {np.std(values):.2g}" if values else ""
                cells.append(shown)
        lines.append([problem, *cells])
    names = ["RMSE printed", "NLL printed", "RMSE", "NLL", "RMSE at 0.1", "NLL at 0.1"]
    return markdown_table(["problem", *names], lines)


def write(folder: Path) -> None:
    """Write tables.md and results.png."""
    (folder / "tables.md").write_text(page(folder))
    draw(scores(folder), folder / "results.png")


def page(folder: Path) -> str:
    """All tables, as Markdown."""
    found = scores(folder)
    parts = ["# Tables\n\n`python -m studies.uci.make tables` makes this page."]
    for metric, title in (("rmse", "RMSE"), ("nll", "NLL, nats per point")):
        parts += [
            f"## {title}\n\nMean ± standard error over splits; n: their number, if it is below 5.",
            table(found, metric),
        ]
        parts += [
            f"### `uci` minus other columns, {title}\n\n95 % intervals, corrected for "
            "overlapping splits (Nadeau & Bengio, 2003). Bold: significant by Holm over the table.",
            differences(found, metric),
        ]
    parts += ["## Reproduction\n\nMean ± standard deviation over splits.", reproduction(found)]
    lines = [[name, f"{nll:.3f}", f"{rmse:.3f}"] for name, nll, rmse in candidates(folder)]
    heads = ["candidate", "mean NLL", "mean log RMSE"]
    parts += ["## Candidates, on held-out training data", markdown_table(heads, lines)]
    chosen = strengths(folder)
    methods, tried = ("f-kde", "kde"), {problem for problem, _ in chosen}
    lines = [[p, *(f"{chosen[p, m]:g}" for m in methods)] for p in PUBLISHED if p in tried]
    if lines:
        parts += ["## Chosen strengths", markdown_table(["problem", "f-kde", "kde"], lines)]
    return "\n\n".join(parts) + "\n"


def draw(found: Scores, path: Path) -> None:
    """NLL of each column less that of `uci`, by problem, with 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for place, column in enumerate(("uci-published", "gaussian", "before", "bde")):
        for row, problem in enumerate(PUBLISHED):
            ours = found.get((problem, "uci", "nll"), {})
            other = found.get((problem, column, "nll"), {})
            common = sorted(ours.keys() & other.keys())
            if len(common) > 1:
                mean, low, high = paired_difference(
                    [other[s] for s in common], [ours[s] for s in common], overlap=OVERLAP
                )
                axes.errorbar(
                    mean,
                    -row - 0.18 * place,
                    xerr=[[mean - low], [high - mean]],
                    fmt="os^D"[place],
                    color=f"C{place}",
                    label=column if row == 0 else None,
                    markersize=4,
                )
    axes.axvline(0, color="0.5", linewidth=1)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_yticks([-row - 0.27 for row in range(len(PUBLISHED))], list(PUBLISHED))
    axes.set_xlabel("NLL minus that of uci, nats per point (right: uci is better)")
    axes.legend(loc="lower left")
    figure.savefig(path, dpi=110)
    plt.close(figure)
