"""Tables and figure of the study, from raw.csv alone.

Differences are paired by seed, with 95 % intervals by Student's t. A star marks a difference whose
p value is below 0.05 after Holm's correction over the rows of its column. Runs of the seed
`CHOOSING` choose the strengths, and count nowhere else.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import holm, paired_difference, paired_p_value
from studies.cifar10_methods.arms import SIZES, named, parsed
from studies.common import Column, read_csv

__all__ = [
    "CANDIDATES",
    "CHOOSING",
    "COLUMNS",
    "PAIRS",
    "Column",
    "Row",
    "maps",
    "read",
    "strengths",
    "write",
]

Row = dict[str, Any]


COLUMNS = (
    Column("accuracy", "accuracy, %", 100, 2),
    Column("nll", "NLL"),
    Column("ece", "ECE"),
    Column("corrupted_accuracy", "corrupted accuracy, %", 100, 2),
    Column("corrupted_nll", "corrupted NLL"),
    Column("corrupted_ece", "corrupted ECE"),
    Column("auroc_entropy", "AUROC, entropy"),
    Column("auroc_mutual_information", "AUROC, mutual information"),
)
INSIDE = (
    Column("validation_nll", "validation NLL"),
    Column("ratio", "force ratio", 1, 6),
    Column("noise_accuracy", "accuracy under noise, %", 100, 2),
    Column("other_accuracy", "accuracy, other corruptions, %", 100, 2),
    Column("disagreement", "pairwise disagreement, %", 100, 1),
    Column("gradient_cosine", "cosine of input gradients"),
    Column("h2_first", "h², first epoch", 1, 4),
    Column("h2_last", "h², last epoch", 1, 4),
    Column("h2_least", "least h²", 1, 4),
)
PAIRS = (
    ("forde:FORDE", "ensemble+members=11", "equal cost"),
    ("forde", "ensemble+members=11", "equal cost"),
    ("kde:KDE", "ensemble+members=11", "five members against eleven"),
    ("forde:FORDE", "forde-identity:FORDE", "components against pixels"),
    ("forde:FORDE", "forde-dct:FORDE", "components against cosines"),
    ("forde:FORDE", "forde-tuned:FORDE", "components against tuned"),
    ("forde:FORDE", "lit:LIT", "FoRDE against LIT"),
    ("kde+laplace:KDE", "kde:KDE", "Laplace against RBF"),
    ("kde+linear-kernel:KDE", "kde:KDE", "linear kernel against RBF"),
    ("forde:FORDE", "hyper", "FoRDE against hyper-deep"),
    ("kde:KDE", "hyper", "repelled weights against hyper-deep"),
    ("hyper", "ensemble+members=11", "hyper-deep (12 trainings) against eleven"),
    ("kde+hyperbolic:KDE", "kde:KDE", "annealed against not"),
    ("kde", "f-kde", "weights against outputs"),
    ("kde:KDE", "f-kde:F-KDE", "weights against outputs"),
    ("forde:FORDE", "ensemble+own-batches", "FoRDE against own batches"),
    ("hyper", "ensemble+own-batches", "hyper-deep against own batches"),
    ("lit:LIT", "ensemble+own-batches", "LIT against own batches"),
    ("forde:FORDE", "ensemble+nodes", "FoRDE against shared weights"),
    *((*pair, f"FoRDE against plain, {size} members") for size, pair in SIZES.items()),
)
"""Two arms, and what their difference tests; `arms.named` explains strengths in capitals."""
CHOOSING = 100
CANDIDATES = (
    *(f"kde:{strength}" for strength in (100, 1000, 10000)),
    *(f"f-kde:{strength}" for strength in (10, 30, 100)),
    *(f"forde:{strength}" for strength in (4, 16, 64)),
    *(f"lit:{strength}" for strength in (8, 32, 128)),
)
"""Arms of the seed that chooses strengths; their force ratios are above 0.001."""
USUAL = {"kde": 1000.0, "f-kde": 30.0, "forde": 16.0, "lit": 128.0}
"""Strengths if no run chooses them."""


def maps(rows: Sequence[Row]) -> list[str]:
    """Fields of the class-activation maps, from the largest maps to the smallest."""
    found = {key for row in rows for key in row if key.startswith("cam_")}
    return sorted(found, key=lambda key: -int(key.removeprefix("cam_")))


def strengths(rows: Sequence[Row]) -> dict[str, float]:
    """The strength of the lowest validation NLL, by method."""
    tried = [row for row in rows if row["seed"] == CHOOSING and math.isfinite(row["nll"])]
    found = {}
    for row in sorted(tried, key=lambda row: row["validation_nll"]):
        arm = parsed(row["method"])
        found.setdefault(arm.method, arm.strength)
    return USUAL | found


def read(path: Path) -> list[Row]:
    """The rows of earlier calls; a field that an older row does not have is NaN."""
    known = dict.fromkeys((*(column.metric for column in (*COLUMNS, *INSIDE)), "jobs"), math.nan)
    rows = read_csv(path, missing_ok=True)
    return [known | {k: _value(k, text) for k, text in row.items()} for row in rows]


def _value(key: str, text: str | None) -> Any:
    if key == "method":
        return text
    return int(text or 0) if key == "seed" else float(text or "nan")


def write(folder: Path, rows: list[Row]) -> None:
    """Write tables.md and differences.png."""
    known = strengths(rows)
    tried = [row for row in rows if row["seed"] == CHOOSING]
    rows = [row for row in rows if row["seed"] != CHOOSING]
    names = list(dict.fromkeys(row["method"] for row in rows))
    others = [(name, "ensemble") for name in names if name != "ensemble"]
    parts = [
        "## Means, and differences to the plain ensemble",
        _means(rows, names, others),
        "## Pairs of arms: the first minus the second",
        _pairs(rows, known),
        "## Inside the runs: means over seeds",
        _inside(rows, names),
        "## Price",
        _price(rows, names),
    ]
    if tried:
        parts += [f"## Choice of strengths, seed {CHOOSING}", _choice(tried, known)]
    (folder / "tables.md").write_text("\n\n".join(part.strip() for part in parts) + "\n")
    if any(len(compared(rows, *pair, "nll")[0]) > 1 for pair in others):
        (folder / "differences.png").write_bytes(draw(rows, others))


def compared(rows: list[Row], first: str, second: str, metric: str) -> tuple[list, list]:
    """Values of both arms in the seeds that both have."""
    values = [
        {row["seed"]: row.get(metric, math.nan) for row in rows if row["method"] == name}
        for name in (first, second)
    ]
    seeds = [s for s in values[0] if s in values[1]]
    seeds = [s for s in seeds if all(math.isfinite(v[s]) for v in values)]
    return [values[0][s] for s in seeds], [values[1][s] for s in seeds]


def _differences(
    rows: list[Row], pairs: Sequence[tuple[str, ...]], column: Column
) -> dict[tuple[str, str], str]:
    """Difference, interval and star of every pair with at least two seeds."""
    found = {}
    for first, second, *_ in pairs:
        a, b = compared(rows, first, second, column.metric)
        if len(a) > 1:
            found[first, second] = (a, b)
    adjusted = holm([paired_p_value(*both) for both in found.values()])
    cells = {}
    for (pair, both), p in zip(found.items(), adjusted, strict=True):
        values = paired_difference(*both)
        mean, low, high = (f"{column.scale * v:+.{column.digits}f}" for v in values)
        cells[pair] = f"{mean} ({low} to {high}){'*' if p < 0.05 else ''}"
    return cells


def _mean(rows: list[Row], name: str, column: Column) -> str:
    values = [row.get(column.metric, math.nan) for row in rows if row["method"] == name]
    values = [value for value in values if math.isfinite(value)]
    return f"{column.scale * sum(values) / len(values):.{column.digits}f}" if values else ""


def _means(rows: list[Row], names: list[str], pairs: Sequence[tuple[str, str]]) -> str:
    changes = {column: _differences(rows, pairs, column) for column in COLUMNS}
    lines = []
    for name in names:
        mine = [row for row in rows if row["method"] == name]
        if all(math.isnan(row["nll"]) for row in mine):
            lines.append([f"`{name}`", "diverged", *("" for _ in COLUMNS)])
            continue
        cells = [
            f"{_mean(rows, name, column)} {changes[column].get((name, 'ensemble'), '')}".strip()
            for column in COLUMNS
        ]
        lines.append([f"`{name}`", str(len(mine)), *cells])
    return markdown_table(["", "seeds", *(column.title for column in COLUMNS)], lines)


def _pairs(rows: list[Row], known: dict[str, float]) -> str:
    pairs = [(named(first, known), named(second, known), what) for first, second, what in PAIRS]
    changes = {column: _differences(rows, pairs, column) for column in COLUMNS}
    lines = []
    for first, second, what in pairs:
        seeds = len(compared(rows, first, second, "nll")[0])
        if seeds > 1:
            cells = [changes[column].get((first, second), "") for column in COLUMNS]
            lines.append([what, f"`{first}` - `{second}`", str(seeds), *cells])
    titles = ["question", "arms", "seeds", *(column.title for column in COLUMNS)]
    return markdown_table(titles, lines) if lines else "No pair has two seeds."


def _choice(tried: list[Row], known: dict[str, float]) -> str:
    lines = []
    for row in tried:
        arm = parsed(row["method"])
        cells = [f"{row['validation_nll']:.4f}", f"{row['ratio']:.2g}"]
        chosen = "chosen" if known.get(arm.method) == arm.strength else ""
        lines.append([f"`{row['method']}`", *cells, chosen])
    return markdown_table(["", "validation NLL", "force ratio", ""], lines)


def _inside(rows: list[Row], names: list[str]) -> str:
    columns = list(INSIDE)
    for key in maps(rows):
        size = key.removeprefix("cam_")
        columns.append(Column(key, f"CAM diversity, {size} x {size}"))
    lines = [[f"`{n}`", *(_mean(rows, n, column) for column in columns)] for n in names]
    return markdown_table(["", *(column.title for column in columns)], lines)


def _price(rows: list[Row], names: list[str]) -> str:
    """Training seconds of runs that had the device alone."""
    lines = []
    for name in names:
        alone = [r for r in rows if r["method"] == name and r["jobs"] == 1]
        # Rows without a number of jobs are of the first version, which had one process.
        alone += [r for r in rows if r["method"] == name and math.isnan(r["jobs"])]
        times = [row["seconds"] for row in alone if math.isfinite(row["seconds"])]
        if times:
            lines.append([f"`{name}`", f"{min(times):.1f}", str(len(times))])
    return markdown_table(["", "shortest training, s", "runs with the device alone"], lines)


def draw(rows: list[Row], pairs: Sequence[tuple[str, str]]) -> bytes:
    """Differences to the plain ensemble of every arm, as PNG bytes."""
    import matplotlib

    from shoal.plots.figure import COLOURS, png, rc

    shown = [c for c in COLUMNS if c.metric in ("nll", "corrupted_nll", "auroc_entropy")]
    arms = [first for first, second in pairs if len(compared(rows, first, second, "nll")[0]) > 1]
    settings: Any = rc() | {"font.size": 10, "axes.labelsize": 10.5}
    with matplotlib.rc_context(settings):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 1.2 + 0.28 * len(arms)), layout="constrained")
        every = figure.subplots(1, len(shown), sharey=True)
        for axes, column in zip(every, shown, strict=True):
            axes.axvline(0, color=COLOURS["ensemble"], linewidth=1)
            for place, name in enumerate(arms):
                mean, low, high = paired_difference(
                    *compared(rows, name, "ensemble", column.metric)
                )
                method = parsed(name).method
                other = "ensemble" if method == "hyper" else "forde"
                colour = COLOURS.get(method, COLOURS[other])
                axes.errorbar([mean], [place], xerr=[[mean - low], [high - mean]], fmt="o",
                              color=colour, capsize=3)  # fmt: skip
            axes.set(xlabel=f"{column.title}, difference", ylim=(len(arms) - 0.5, -0.5))
            axes.locator_params(axis="x", nbins=4)
        every[0].set_yticks(range(len(arms)), arms)
        return png(figure, 100)
