"""Tables and figures of the evidence study, from raw.csv and prior.csv alone."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal import plots
from shoal.core.display.text import markdown_table
from shoal.plots.figure import COLOURS, INK, blank
from shoal.prediction.statistics import mean_and_error, paired_difference, t_quantile
from studies.common import read_csv

METHODS: dict[str, dict[str, Any]] = {
    "ensemble": {"method": "ensemble"},
    "f-kde x 1": {"method": "f-kde"},
    "f-kde x 10": {"method": "f-kde", "strength": 10.0},
    "f-kde x 100": {"method": "f-kde", "strength": 100.0},
    "kde x 1,000": {"method": "kde", "strength": 1000.0},
    "kde x 10,000": {"method": "kde", "strength": 10000.0},
}
"""Repulsion only varies the diversity here; none of these strengths was chosen by a score."""

__all__ = ["write"]

Rows = dict[tuple[str, str, str], dict[int, float]]
"""Values by data, method and metric; then by seed."""

DATA = ("digits", "mnist", "heads", "uci-concrete", "uci-energy", "uci-yacht")
PRIORS = (
    "Gaussians at the members, last layer",
    "Gaussians at the members, all layers, diagonal",
    "flow, last layer",
    "Gaussians at zero, last layer",
    "Gaussians at zero, all layers, diagonal",
)
POINT, FEW = "point masses", "prior, curvature of 500 points"


def read(path: Path) -> Rows:
    """All rows of raw.csv."""
    found: Rows = {}
    for row in read_csv(path):
        key = row["data"], row["method"], row["metric"]
        found.setdefault(key, {})[int(row["seed"])] = float(row["value"])
    return found


def write(folder: Path) -> None:
    """Write tables.md, prior.png and diversity.png."""
    rows = read(folder / "raw.csv")
    parts = {
        "Evidence and weights of plain ensembles": _weights(rows),
        "Log evidence of learned priors minus that of point masses": _priors(rows, "log evidence"),
        "The same with the curvature of 500 points and the gradient of all": _few(rows),
        "NLL of learned priors minus that of point masses": _priors(rows, "NLL"),
        "Repulsion and the evidence": _repelled(rows),
        "Laplace's evidence minus the exact integral": _exact(rows),
        "Correlation of diversity and NLL": _correlations(rows),
    }
    text = "\n\n".join(f"## {title}\n\n{table}" for title, table in parts.items())
    (folder / "tables.md").write_text(text + "\n")
    (folder / "prior.png").write_bytes(plots.png(_prior_figure(folder / "prior.csv"), 130))
    (folder / "diversity.png").write_bytes(plots.png(_diversity_figure(rows), 130))


def _there(rows: Rows) -> list[str]:
    return [data for data in DATA if (data, "ensemble", "test NLL") in rows]


def _mean(found: dict[int, float] | None, digits: int = 2) -> str:
    """Mean and 95 % interval."""
    if not found:
        return "–"
    mean, error = mean_and_error(list(found.values()))
    if not math.isfinite(error):
        return f"{mean:.{digits}f}"
    half = t_quantile(0.975, len(found) - 1) * error
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def _change(a: dict[int, float] | None, b: dict[int, float] | None, digits: int = 2) -> str:
    """Paired difference with its 95 % interval; bold if significant on all data sets together."""
    if not a or not b:
        return "–"
    seeds = sorted(a.keys() & b.keys())
    pairs = [a[s] for s in seeds], [b[s] for s in seeds]
    found, strict = paired_difference(*pairs), paired_difference(*pairs, 1 - 0.05 / len(DATA))
    digits = 0 if abs(found.difference) > 1e4 else digits
    if max(abs(found.low), abs(found.high)) < 0.5 * 10**-digits:
        return "0"
    ends = f"{found.low:+,.{digits}f} to {found.high:+,.{digits}f}"
    words = f"{found.difference:+,.{digits}f} ({ends})"
    return f"**{words}**" if strict.low > 0 or strict.high < 0 else words


def _weights(rows: Rows) -> str:
    columns = {
        "N": ("points", 0), "log evidence": ("log evidence", 1),
        "range of log likelihoods": ("range of log likelihoods", 1), "ties": ("ties", 1),
        "effective members by evidence": ("weights/posterior/effective", 2),
        "total variation to uniform": ("weights/posterior/total variation", 3),
    }  # fmt: skip
    lines = []
    for data in _there(rows):
        cells = [
            _mean(rows.get((data, "ensemble", metric)), digits)
            for metric, digits in columns.values()
        ]
        uniform = rows.get((data, "ensemble", "weights/uniform/NLL"))
        changes = [
            _change(rows.get((data, "ensemble", f"weights/{name}/NLL")), uniform, 4)
            for name in ("posterior", "stacking")
        ]
        lines.append([data, len(uniform or {}), *cells, _mean(uniform, 4), *changes])
    titles = ["NLL, uniform", "by evidence minus uniform", "stacking minus uniform"]
    return markdown_table(["data", "seeds", *columns, *titles], lines)


def _priors(rows: Rows, metric: str) -> str:
    digits = 1 if metric == "log evidence" else 4
    lines = []
    for data in _there(rows):
        own = rows.get((data, "ensemble", f"prior/{POINT}/{metric}"))
        cells = [
            _change(rows.get((data, "ensemble", f"prior/{name}/{metric}")), own, digits)
            for name in PRIORS
        ]
        lines.append([data, _mean(own, digits), *cells])
    return markdown_table(["data", POINT, *PRIORS], lines)


def _few(rows: Rows) -> str:
    lines = []
    for data in _there(rows):
        own = rows.get((data, "ensemble", f"prior/{POINT}/log evidence"))
        names = [PRIORS[0], PRIORS[3]]
        few = [rows.get((data, "ensemble", f"{FEW}/{n}/log evidence")) for n in names]
        if any(few):
            lines.append([data, *(_change(each, own, 1) for each in few)])
    return markdown_table(["data", PRIORS[0], PRIORS[3]], lines)


def _repelled(rows: Rows) -> str:
    lines = []
    for data in _there(rows):
        own = rows.get((data, "ensemble", "log evidence"))
        for method in list(METHODS)[1:]:
            found = [rows.get((data, method, metric)) for metric in ("log evidence", "test NLL")]
            plain = rows.get((data, "ensemble", "test NLL"))
            effective = _mean(rows.get((data, method, "effective functions")), 3)
            changes = [_change(found[0], own, 1), _change(found[1], plain, 4)]
            lines.append([data, method, len(found[0] or {}), *changes, effective])
    header = ["data", "method", "seeds", "log evidence minus plain", "test NLL minus plain"]
    return markdown_table([*header, "effective functions"], lines)


def _exact(rows: Rows) -> str:
    names = sorted({key[0] for key in rows if key[0].startswith("exact")})
    lines = []
    for name in names:
        for centre in ("members", "zero"):
            gap = rows[name, "ensemble", f"{centre}/laplace minus exact"]
            error = max(rows[name, "ensemble", f"{centre}/sampling error"].values())
            worst = max(map(abs, gap.values()))
            shown = f"{worst:.0e}" if worst < 1e-6 else f"{worst:.3f}"
            width = _mean(rows[name, "ensemble", f"{centre}/width"], 4)
            words = "at the member" if centre == "members" else "at zero"
            mean = "0" if worst < 1e-6 else _mean(gap, 3)
            lines.append([name.removeprefix("exact "), words, width, mean, shown, f"{error:.3f}"])
    header = ["regression", "prior", "width", "difference, nats", "largest", "sampling error"]
    return markdown_table(header, lines)


def _fisher(values: Sequence[float]) -> str:
    """Mean correlation with a 95 % interval, by Fisher's transformation over seeds."""
    kept = [max(min(value, 0.9999), -0.9999) for value in values if math.isfinite(value)]
    if len(kept) < 2:
        return "–"
    mean, error = mean_and_error([math.atanh(value) for value in kept])
    reach = t_quantile(0.975, len(kept) - 1) * error
    words = [f"{math.tanh(z):+.2f}" for z in (mean, mean - reach, mean + reach)]
    text = f"{words[0]} ({words[1]} to {words[2]})"
    strict = t_quantile(1 - 0.025 / len(DATA), len(kept) - 1) * error
    return f"**{text}**" if abs(mean) > strict else text


def _correlations(rows: Rows) -> str:
    lines = []
    for data in _there(rows):
        subsets = [
            rows.get((data, "ensemble", f"subsets/{name}"), {}).values()
            for name in ("correlation", "correlation, equal members")
        ]
        across = []
        for seed in rows.get((data, "ensemble", "test NLL"), {}):
            pairs = [
                (rows[data, m, "effective functions"][seed], rows[data, m, "test NLL"][seed])
                for m in METHODS
                if seed in rows.get((data, m, "test NLL"), {})
            ]
            across += [spearman(*zip(*pairs, strict=True))] if len(pairs) > 2 else []
        lines.append([data, *(_fisher(list(each)) for each in (*subsets, across))])
    header = ["data", "subsets of three plain members", "the same, equal mean NLL of the three"]
    return markdown_table([*header, "methods and strengths"], lines)


def _prior_figure(path: Path):
    curves: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in read_csv(path):
        point = float(row["x"]), float(row["y"])
        curves.setdefault(row["prior"], {}).setdefault(int(row["draw"]), []).append(point)
    points = np.array(curves.pop("data")[0])
    figure, grid = blank(ncols=len(curves), sharey=True, squeeze=False)
    figure.set_figwidth(10)
    for axes, (name, draws) in zip(grid[0], curves.items(), strict=True):
        for draw in draws.values():
            x, y = np.array(draw).T
            axes.plot(x, y, color=COLOURS["kde"], alpha=0.5, linewidth=0.9)
        axes.plot(*points.T, ".", color=INK, markersize=4)
        low, high = points[:, 1].min(), points[:, 1].max()
        axes.set_ylim(low - (high - low), high + (high - low))
        axes.set(xlabel="input x", title=name)
    grid[0, 0].set(ylabel="y")
    return figure


def _diversity_figure(rows: Rows):
    there = _there(rows)
    lines = -(-len(there) // 3)
    figure, grid = blank(lines, height=0.3 + 0.7 * lines, ncols=min(3, len(there)), squeeze=False)
    figure.set_figwidth(10)
    for axes in list(grid.flat)[len(there) :]:
        axes.remove()
    for axes, data in zip(grid.flat, there, strict=False):
        for method in METHODS:
            found = rows.get((data, method, "effective functions"), {})
            losses = rows.get((data, method, "test NLL"), {})
            style = plots.look(method.partition(" ")[0]).colour
            shade = 0.3 + 0.14 * list(METHODS).index(method)
            seeds = sorted(found.keys() & losses.keys())
            axes.plot(
                [found[s] for s in seeds], [losses[s] for s in seeds], "o",
                color=style, alpha=min(shade, 1), label=method, markersize=4,
            )  # fmt: skip
        axes.set(title=data)
        axes.set(xlabel="effective number of functions")
    for axes in grid[:, 0]:
        axes.set(ylabel="test NLL")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=6, fontsize=9)
    return figure


def spearman(a: Any, b: Any) -> float:
    """Rank correlation."""
    first, second = _ranks(a), _ranks(b)
    if first.std() == 0 or second.std() == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Any) -> np.ndarray:
    numbers = np.round(np.asarray(values, float), 12)
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
