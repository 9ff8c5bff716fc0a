"""Tables and the figure of the pre-trained study, from whatever rows there are.

Numbers are means over seeds with 95 % intervals by Student's t. Differences are paired by seed:
a seed that only one of the two methods has is left out.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import (
    holm,
    mean_and_error,
    paired_difference,
    paired_p_value,
    t_quantile,
)
from studies.common import Column, read_csv

__all__ = ["COLUMNS", "Column", "Rows", "differences", "draw", "read", "write"]

Rows = dict[tuple[str, int, str], dict[int, float]]
"""Values by method, training images (0 is all) and metric; then by seed."""

NAMES = {
    "fine-tuned-1": "1 fine-tuned network",
    "fine-tuned-5": "5 fine-tuned networks",
    "lora": "5 LoRA members",
    "lora-repelled": "5 LoRA members, repelled",
    "heads": "100 heads",
    "heads-repelled": "100 heads, repelled",
    "laplace": "last-layer Laplace, 100 samples",
}
PAIRS = (
    ("heads-repelled", "heads"),
    ("lora-repelled", "lora"),
    ("laplace", "heads"),
    ("fine-tuned-5", "fine-tuned-1"),
    ("lora", "fine-tuned-5"),
)
"""A method and what it is compared with: the plain ensemble of the same kind comes first."""
SIZES = {1000: "1,000", 0: "16,000"}
DEVICES = {"cpu": "two cores", "cuda": "H200"}
ALONE = ("auroc_mutual_information", "auroc_disagreement", "apart_from_mean")
"""Metrics that compare members, so that one network has none."""


def _labelled(split: str) -> list[Column]:
    return [
        Column(f"{split}_accuracy", "accuracy, %", 100, 2),
        Column(f"{split}_nll", "NLL", digits=4),
        Column(f"{split}_ece", "ECE", digits=4),
        Column(f"{split}_brier", "Brier score", digits=4),
        Column(f"{split}_apart_from_mean", "other label than the mean, %", 100, 2),
    ]


COLUMNS = {
    "Summary": [
        Column("test_accuracy", "accuracy, %", 100, 2),
        Column("test_apart_from_mean", "other label than the mean, %", 100, 2),
        Column("corrupted_nll", "corrupted NLL", digits=4),
        Column("corrupted_ece", "corrupted ECE", digits=4),
        Column("auroc_entropy", "AUROC, entropy", digits=4),
        Column("auroc_mutual_information", "AUROC, mutual information", digits=4),
    ],
    "Clean test images": _labelled("test"),
    "Nineteen corruptions": _labelled("corrupted"),
    "OOD detection: AUROC of SVHN against clean test images": [
        Column("auroc_entropy", "predictive entropy", digits=4),
        Column("auroc_mutual_information", "mutual information", digits=4),
        Column("auroc_disagreement", "disagreement", digits=4),
    ],
}
COST = [
    Column("training_seconds", "shortest training, s", digits=1),
    Column("stored_bytes", "stored, MB", 1e-6, 1),
    Column("peak_bytes", "peak of the device, GB", 1e-9, 2),
    Column("force_ratio", "force ratio", digits=4),
]


def read(folder: Path) -> tuple[Rows, dict[tuple[str, int], str]]:
    """All values of raw*.csv, and the devices of each method."""
    found: Rows = {}
    devices: dict[tuple[str, int], str] = {}
    for file in sorted(folder.glob("raw*.csv")):
        for row in read_csv(file):
            case = row["method"], int(row["images"])
            found.setdefault((*case, row["metric"]), {})[int(row["seed"])] = float(row["value"])
            devices[case] = row["device"]
    lonely = [key for key in found if key[0] == "fine-tuned-1" and key[2].endswith(ALONE)]
    return {key: row for key, row in found.items() if key not in lonely}, devices


def write(folder: Path) -> None:
    """Write tables.md and results.png into the folder of the raw rows."""
    rows, devices = read(folder)
    parts = []
    for title, columns in COLUMNS.items():
        parts += [f"## {title}", _values(rows, columns), differences(rows, columns)]
    parts += ["## Cost", _cost(rows, devices), _choices(folder)]
    (folder / "tables.md").write_text("\n\n".join(part for part in parts if part) + "\n")
    (folder / "results.png").write_bytes(draw(rows))


def _cases(rows: Rows) -> list[tuple[int, str]]:
    there = {key[:2] for key in rows}
    return [(size, method) for size in SIZES for method in NAMES if (method, size) in there]


def _values(rows: Rows, columns: Sequence[Column]) -> str:
    lines = []
    for size, method in _cases(rows):
        found = [rows.get((method, size, column.metric), {}) for column in columns]
        cells = [_mean(row, column) for row, column in zip(found, columns, strict=True)]
        lines.append([SIZES[size], NAMES[method], max(map(len, found)), *cells])
    return markdown_table(["images", "method", "seeds", *(c.title for c in columns)], lines)


def _mean(row: dict[int, float], column: Column) -> str:
    if not row:
        return ""
    mean, half = interval(row.values())
    beside = f" ± {column.scale * half:.{column.digits}f}" if math.isfinite(half) else ""
    return f"{column.scale * mean:.{column.digits}f}{beside}"


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Mean and half width of the 95 % interval; NaN for one value."""
    numbers = list(values)
    mean, error = mean_and_error(numbers)
    return mean, t_quantile(0.975, len(numbers) - 1) * error if len(numbers) > 1 else math.nan


def differences(rows: Rows, columns: Sequence[Column]) -> str:
    """Paired differences; bold ones are significant after Holm's correction over the rows."""
    cases = [(size, pair) for size in SIZES for pair in PAIRS]
    cells: dict[tuple[int, int], str] = {}
    seeds: dict[int, int] = {}
    for j, column in enumerate(columns):
        found = {}
        for i, (size, pair) in enumerate(cases):
            a, b = (rows.get((method, size, column.metric), {}) for method in pair)
            if common := sorted(a.keys() & b.keys()):
                found[i] = [a[s] for s in common], [b[s] for s in common]
                seeds[i] = max(seeds.get(i, 0), len(common))
        tested = {i: paired_p_value(*values) for i, values in found.items() if len(values[0]) > 1}
        sure = dict(zip(tested, holm([*tested.values()]), strict=True))
        for i, values in found.items():
            text = _difference(values[0], values[1], column)
            cells[i, j] = f"**{text}**" if sure.get(i, 1.0) < 0.05 else text
    lines = [
        [SIZES[cases[i][0]], " − ".join(NAMES[name] for name in cases[i][1]), seeds[i]]
        + [cells.get((i, j), "") for j in range(len(columns))]
        for i in sorted(seeds)
    ]
    titles = ["images", "difference", "seeds", *(column.title for column in columns)]
    return markdown_table(titles, lines) if lines else ""


def _difference(a: list[float], b: list[float], column: Column) -> str:
    mean, low, high = (column.scale * x for x in paired_difference(a, b))
    beside = f" ({low:+.{column.digits}f} to {high:+.{column.digits}f})" if len(a) > 1 else ""
    return f"{mean:+.{column.digits}f}{beside}"


def _cost(rows: Rows, devices: dict[tuple[str, int], str]) -> str:
    """Means over seeds, but the shortest time: other work on a machine only adds to times."""
    lines = []
    for size, method in _cases(rows):
        found = [rows.get((method, size, column.metric), {}) for column in COST]
        if not method.endswith("repelled"):
            found[-1] = {}
        cells = [
            f"{column.scale * _typical(row, column.metric):.{column.digits}f}" if row else ""
            for row, column in zip(found, COST, strict=True)
        ]
        lines.append([SIZES[size], NAMES[method], DEVICES[devices[method, size]], *cells])
    return markdown_table(["images", "method", "device", *(c.title for c in COST)], lines)


def _typical(row: dict[int, float], metric: str) -> float:
    return min(row.values()) if metric.endswith("seconds") else mean_and_error([*row.values()])[0]


def _choices(folder: Path) -> str:
    """What every choice gave on held-out images."""
    shown = [
        Column("held_accuracy", "held-out accuracy, %", 100, 2),
        Column("held_apart_from_mean", "other label than the mean, %", 100, 2),
        Column("shifted_nll", "NLL, rotated", digits=4),
        Column("auroc_entropy", "AUROC, entropy", digits=4),
        Column("auroc_mutual_information", "AUROC, mutual information", digits=4),
        Column("force_ratio", "force ratio", digits=4),
    ]
    found: dict[tuple[str, int], dict[str, float]] = {}
    for file in sorted(folder.glob("choice-*.csv")):
        for row in read_csv(file):
            case = found.setdefault((row["method"], int(row["images"])), {})
            case[row["metric"]] = float(row["value"])
    lines = []
    for (name, size), row in found.items():
        kind, _, choice = name.partition("/")
        points, _, strength = choice.partition(":")
        cells = [f"{c.scale * row[c.metric]:.{c.digits}f}" for c in shown]
        lines.append([SIZES[size], kind, points, strength, *cells])
    titles = ["images", "members", "points", "strength", *(c.title for c in shown)]
    return "## Choices on held-out images\n\n" + markdown_table(titles, lines) if lines else ""


def draw(rows: Rows) -> bytes:
    """AUROC and corrupted NLL of every method, as PNG bytes."""
    import matplotlib

    from shoal.plots.figure import COLOURS, png, rc

    methods = [name for name in NAMES if any(key[0] == name for key in rows)]
    panels = {
        "auroc_entropy": "OOD AUROC, predictive entropy",
        "auroc_mutual_information": "OOD AUROC, mutual information",
        "corrupted_nll": "corrupted NLL (lower is better)",
    }
    styles = {1000: ("1,000 images", COLOURS["f-kde"], "D"), 0: ("16,000 images", "#0078a8", "o")}
    settings: Any = rc() | {"font.size": 10, "axes.labelsize": 10.5}
    with matplotlib.rc_context(settings):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 1.3 + 0.36 * len(methods)), layout="constrained")
        every = figure.subplots(1, len(panels), sharey=True)
        for axes, (metric, title) in zip(every, panels.items(), strict=True):
            for size, style in styles.items():
                _dots(axes, rows, [(method, size, metric) for method in methods], style)
            axes.set(xlabel=title, ylim=(len(methods) - 0.5, -0.5))
            axes.locator_params(axis="x", nbins=4)
        every[0].set_yticks(range(len(methods)), [NAMES[name] for name in methods])
        figure.legend(*every[0].get_legend_handles_labels(), ncols=2, loc="outside upper left")
        return png(figure, 100)


def _dots(axes: Any, rows: Rows, keys: list[tuple[str, int, str]], style: tuple) -> None:
    """One dot and interval per method, the two numbers of images a little apart."""
    label, colour, marker = style
    aside = -0.13 if keys[0][1] else 0.13
    places = [i for i, key in enumerate(keys) if key in rows]
    found = [interval(rows[keys[i]].values()) for i in places]
    axes.errorbar(
        [mean for mean, _ in found],
        [i + aside for i in places],
        xerr=[half if math.isfinite(half) else 0.0 for _, half in found],
        fmt=marker, markersize=6, capsize=3, linestyle="none", color=colour, label=label,
    )  # fmt: skip
