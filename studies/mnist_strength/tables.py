"""Tables and figures of the strengths on MNIST, from raw.csv alone.

Differences are to the plain ensemble of the same size, paired by seed, with 95 % intervals. Bold
ones are significant after Holm's correction over the rows of their column. Two seeds are never
bold: they may agree by the number of test images alone.
"""

import csv
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import holm, mean_and_error, paired_difference, paired_p_value
from studies.common import Column, read_csv

__all__ = ["RULES", "choices", "read", "write"]

Row = dict[str, Any]
Runs = dict[tuple[str, int, int], Row]
"""Rows by method, members and seed."""


COLUMNS = (
    Column("test_accuracy", "accuracy, %", 100, 2),
    Column("test_nll", "NLL", digits=4),
    Column("test_ece", "ECE", digits=4),
    Column("rotated_nll", "NLL, rotated by 30°", digits=3),
    Column("auroc_entropy_letters", "AUROC, letters", digits=3),
    Column("auroc_entropy_clothes", "AUROC, clothes", digits=3),
    Column("auroc_entropy_characters", "AUROC, characters", digits=3),
)
SWEPT = ("kde", "f-kde", "svgd", "f-svgd")
STRENGTHS = ("", ":100", ":1000", ":10000", ":100000", ":1000000")
HALF_A_POINT = 0.005
CAPTIONS = {
    "strength": "AUROC of three OOD sets and test NLL against the strength, 17 members. Error bars "
    "are standard errors over seeds.",
    "entropy-by-size": "Predictive entropy on test digits (filled), letters (outline), by method "
    "and ensemble size, seed 0. One member is the plain network.",
    "accuracy-by-confidence": "Accuracy of predictions above each confidence, 17 members, mean of "
    "seeds. Below the dotted line the ensemble is overconfident.",
    "low-and-high-disagreement": "Images with the lowest and highest disagreement of 17 members, "
    "`kde`, seed 0.",
}
LISTS = ("entropy", "low", "high", "above", "kept")


def read(path: Path) -> Runs:
    """The rows of raw.csv; numbers as numbers, lists as lists."""
    found: Runs = {}
    for row in read_csv(path):
        made = {key: _value(key, value) for key, value in row.items()}
        found[row["method"], int(row["members"]), int(row["seed"])] = made
    return found


def _value(key: str, text: str) -> Any:
    if key == "method":
        return text
    if key.startswith(("test_", "letters_", "turned_")) and key.rpartition("_")[2] in LISTS:
        return [float(each) for each in text.split()]
    return float(text) if text else math.nan


def _held_nll(row: Row, plain: Row) -> float:
    return -row["held_nll"]


def _noisy_nll(row: Row, plain: Row) -> float:
    """The NLL of noisy copies; the clean NLL may not rise by more than a hundredth of a nat."""
    return -row["noisy_nll"] if row["held_nll"] < plain["held_nll"] + 0.01 else -math.inf


def _made_auroc(row: Row, plain: Row) -> float:
    """The AUROC of shuffled copies, if held-out accuracy is within half a point of the plain."""
    near = row["held_accuracy"] > plain["held_accuracy"] - HALF_A_POINT
    return row["auroc_entropy_shuffled"] if near else -math.inf


RULES: Mapping[str, Callable[[Row, Row], float]] = {
    "NLL of held-out images": _held_nll,
    "NLL of noisy held-out images": _noisy_nll,
    "AUROC of shuffled held-out images": _made_auroc,
}
"""Each rule takes the strength, or the plain ensemble, with the highest value."""


def choices(runs: Runs, rule: str, method: str, members: int) -> dict[int, str]:
    """What a rule chooses for each seed, by held-out training images alone."""
    found = {}
    for seed in sorted({key[2] for key in runs if key[1] == members}):
        plain = runs.get(("ensemble", members, seed))
        names = ["ensemble", *(method + strength for strength in STRENGTHS)]
        rows = {n: runs[n, members, seed] for n in names if (n, members, seed) in runs}
        if plain is None or len(rows) < len(names):
            continue
        sound = [name for name, row in rows.items() if not row["diverged"]]
        scores = {name: RULES[rule](rows[name], plain) for name in sound}
        found[seed] = max(sound, key=scores.__getitem__)
    return found


def _differences(cases: Mapping[str, list[tuple[Row, Row]]]) -> list[list[str]]:
    """One line per case: its name, its seeds, and a cell per column."""
    cells: dict[str, list[str]] = {name: [name, str(len(p))] for name, p in cases.items()}
    for column in COLUMNS:
        values = {
            name: ([a[column.metric] for a, _ in pairs], [b[column.metric] for _, b in pairs])
            for name, pairs in cases.items()
        }
        tested = holm([paired_p_value(*p) if len(p[0]) > 2 else 1.0 for p in values.values()])
        for (name, pair), p in zip(values.items(), tested, strict=True):
            change, low, high = (column.scale * x for x in paired_difference(*pair))
            mean = column.scale * mean_and_error(pair[0])[0]
            digits = column.digits
            text = f"{change:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
            text = f"**{text}**" if p < 0.05 else text
            cells[name].append(f"{mean:.{digits}f}, {text}")
    return list(cells.values())


def _table(title: str, cases: Mapping[str, list[tuple[Row, Row]]]) -> str:
    kept = {name: pairs for name, pairs in cases.items() if len(pairs) > 1}
    titles = ["", "seeds", *(column.title for column in COLUMNS)]
    return f"## {title}\n\n" + markdown_table(titles, _differences(kept))


def _pairs(runs: Runs, method: str, plain: str, members: int) -> list[tuple[Row, Row]]:
    found = []
    for name, size, seed in runs:
        other = runs.get((plain, size, seed))
        row = runs[name, size, seed]
        if (name, size) == (method, members) and other and not row["diverged"]:
            found.append((row, other))
    return found


def _plain(runs: Runs, members: Sequence[int]) -> str:
    lines = []
    for method, size in [(m, s) for s in members for m in ("ensemble", "published/ensemble")]:
        rows = [row for key, row in runs.items() if key[:2] == (method, size)]
        if rows:
            cells = []
            for column in COLUMNS:
                mean, error = mean_and_error([row[column.metric] for row in rows])
                cells.append(
                    f"{column.scale * mean:.{column.digits}f} ± "
                    f"{column.scale * error:.{column.digits}f}"
                )
            lines.append([method, size, len(rows), *cells])
    titles = ["", "members", "seeds", *(column.title for column in COLUMNS)]
    return "## Plain ensembles, mean ± standard error\n\n" + markdown_table(titles, lines)


def _chosen(runs: Runs, members: int) -> str:
    cases, picked = {}, []
    for rule in RULES:
        for method in SWEPT:
            found = choices(runs, rule, method, members)
            if not found:
                continue
            cases[f"{method}, {rule}"] = [
                (runs[name, members, seed], runs["ensemble", members, seed])
                for seed, name in found.items()
            ]
            words = ", ".join(name.partition(":")[2] or name for name in found.values())
            picked.append([method, rule, words])
    title = f"Strength chosen on held-out images inside each seed, {members} members"
    named = markdown_table(["method", "rule", "strengths by seed"], picked)
    return f"{_table(title, cases)}\n\n{named}"


def _answer(runs: Runs) -> str:
    """Gains of `kde` with 17 members at the strength that the last rule chooses."""
    found = choices(runs, list(RULES)[-1], "kde", 17)
    if len(found) < 2:
        return "Too few seeds for an answer."
    cells = []
    for column in COLUMNS:
        strong, plain = (
            [column.scale * runs[name, 17, seed][column.metric] for seed, name in chosen.items()]
            for chosen in (found, dict.fromkeys(found, "ensemble"))
        )
        change = paired_difference(strong, plain)
        mean, low, high = (f"{value:+.{column.digits}f}" for value in change)
        cells.append(f"{column.title} {mean} ({low} to {high})")
    picked = ", ".join(dict.fromkeys(found.values()))
    return (
        f"**`kde`, 17 members, strength by the AUROC of shuffled held-out images ({picked}; "
        f"{len(found)} seeds), minus the plain ensemble:** {'; '.join(cells)}."
    )


def write(folder: Path) -> None:
    """Write tables.md and the figures."""
    from studies.mnist_strength.figures import draw_all

    runs = read(folder / "raw.csv")
    parts = ["# Strengths on MNIST: tables and figures", _answer(runs), _plain(runs, (1, 5, 17))]
    for members in (17, 5):
        names = [m + s for m in SWEPT for s in STRENGTHS]
        sweep = {n: _pairs(runs, n, "ensemble", members) for n in names}
        parts.append(_table(f"Strengths, {members} members, minus the plain ensemble", sweep))
        parts.append(_chosen(runs, members))
    compared = {}
    for members in (5, 17):
        for name, plain in (
            ("sge", "ensemble"),
            ("ssge", "ensemble"),
            ("f-sge", "ensemble"),
            ("f-ssge", "ensemble"),
            ("kde+laplace", "kde"),
            ("ensemble+adversarial", "ensemble"),
            ("published/kde", "published/ensemble"),
            ("published/f-kde", "published/ensemble"),
            ("published/kde+laplace", "published/kde"),
            ("published/ensemble+adversarial", "published/ensemble"),
        ):
            pairs = _pairs(runs, name, plain, members)
            compared[f"{name} minus {plain}, {members} members"] = pairs
    parts.append(_table("What the published study compares", compared))
    parts += [f"![{name}]({name}.png)\n\n*{words}*" for name, words in CAPTIONS.items()]
    (folder / "tables.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    _write_chosen(runs, folder / "chosen.csv")
    draw_all(runs, folder)


def _write_chosen(runs: Runs, path: Path) -> None:
    """What every rule chose in every seed, and how that is judged."""
    metrics = [column.metric for column in COLUMNS]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["rule", "method", "members", "seed", "chosen", *metrics])
        for rule, method, members in itertools.product(RULES, SWEPT, (5, 17)):
            for seed, name in choices(runs, rule, method, members).items():
                row = runs[name, members, seed]
                values = [row[metric] for metric in metrics]
                writer.writerow([rule, method, members, seed, name, *values])
