"""Which columns matter? Importances of a table's columns, and how predictions follow them."""

import numpy as np

from shoal import plots
from shoal.core.display.text import counted, number
from shoal.evaluation.columns import Explanation, PartialDependence
from shoal.page.blocks import Block, Figure, Section, Statement, Table, TableCell, folded, section
from shoal.page.report_data import ReportData
from shoal.plots.columns import BARS, LINES

__all__ = ["columns_section"]

_SCORES = {"crps": "CRPS", "nll": "NLL"}
_NAMED = 3
"""Columns with a sentence of their own."""


@section("columns", order=16)
def columns_section(report_data: ReportData) -> Section | None:
    """The columns of the first run's table, if its evaluation has them."""
    evaluation = report_data.assessment
    found = Explanation.read(evaluation.scores["data"], evaluation.samples)
    if found is None:
        return None
    method = report_data.lead.label
    classes = evaluation.scores["data"].get("classes") if evaluation.about.has_classes else None
    blocks: list[Block] = [*_statements(found, classes)]
    blocks.append(_bars(found, method))
    blocks += [_curve(each, classes, method) for each in found.dependences]
    blocks.append(folded(_table(found), rows=6))
    return Section("Which columns matter?", _answer(found), blocks)


def _answer(found: Explanation) -> str:
    """How many columns matter, and by which measure."""
    importances = found.importances
    score, low = _SCORES[importances.score], importances.interval()[0]
    many = int((low > 0).sum())
    verb = "lowers" if many == 1 else "lower"
    text = f"{many} of {counted(len(low), 'column')} {verb} the {score} significantly."
    if not many:
        text = f"No column lowers the {score} significantly."
    return f"{text} Each column was permuted among {importances.points} test points."


def _statements(found: Explanation, classes: list[str] | None) -> list[Statement]:
    """One sentence for each of the strongest columns."""
    importances = found.importances
    low, high = importances.interval()
    known = {each.column: each for each in found.dependences}
    shown = []
    for j in np.argsort(-importances.mean, kind="stable")[:_NAMED].tolist():
        error, name = float(importances.error[j]), importances.columns[j]
        if low[j] <= 0:
            break
        ends = f"{number(float(low[j]), error)} to {number(float(high[j]), error)}"
        score = _SCORES[importances.score]
        text = f"Permuting {name} raises the {score} by {ends} (95 % interval)."
        if name in known:
            text += _course(known[name], classes)
        shown.append(Statement(name, f"+{number(float(importances.mean[j]), error)}", text))
    return shown


def _what(each: PartialDependence, classes: list[str] | None) -> str:
    if classes is None:
        return "mean prediction"
    one = each.mean.ndim == 1 and len(classes) == 2
    return f"mean probability of {classes[1]}" if one else "mean probability"


def _course(each: PartialDependence, classes: list[str] | None) -> str:
    """Where the mean prediction is lowest and highest; nothing for several curves."""
    if each.mean.ndim > 1:
        return ""
    scale = float(np.ptp(each.mean)) / 20
    low, high = (
        f"at {_value(each, int(k))} ({number(float(each.mean[k]), scale)})"
        for k in (each.mean.argmin(), each.mean.argmax())
    )
    return f" The {_what(each, classes)} is lowest {low} and highest {high}."


def _value(each: PartialDependence, k: int) -> str:
    value = each.grid[k]
    if each.kind == "numbers":
        return number(float(value), float(np.ptp(each.grid)) / 20)
    return str(value).partition("T")[0] if each.kind == "dates" else f"“{value}”"


def _bars(found: Explanation, method: str) -> Figure:
    importances = found.importances
    arrays = importances.columns, importances.mean, importances.error
    score, base = _SCORES[importances.score], number(importances.baseline)
    unit = "in units of the targets" if importances.score == "crps" else "in nats"
    return Figure(
        plots.importances(*arrays, score, method),
        "Importance of the columns",
        f"Increase of the {score}, {unit}, when the values of a column are permuted. Lines are "
        f"95 % intervals. Without a permutation the {score} is {base}. Columns that say the same "
        f"share their importance.{_part(len(importances.columns), BARS, 'columns')}",
    )


def _part(count: int, shown: int, what: str) -> str:
    """That a figure has a part of the columns, categories or curves."""
    return f" The figure has {shown} of {count} {what}." if count > shown else ""


def _curve(each: PartialDependence, classes: list[str] | None, method: str) -> Figure:
    mean, low, high = each.mean, each.low, each.high
    names, more = [], ""
    if mean.ndim > 1:
        count = mean.shape[1]
        moves = np.sort(np.argsort(-np.ptp(mean, axis=0), kind="stable")[:LINES])
        known = classes or [f"target {k + 1}" for k in range(count)]
        names, more = [known[k] for k in moves], _part(count, LINES, "curves")
        mean, low, high = (part[:, moves] for part in (mean, low, high))
    if each.kind == "categories":
        more += _part(len(each.grid), BARS, "categories")
    if each.noise is not None and each.noise.ndim == 1:
        ends = dict.fromkeys(f"{float(end):.2g}" for end in (each.noise.min(), each.noise.max()))
        size = " to ".join(ends)
        more += f" The noise of the targets is apart from it: a standard deviation of {size}."
    what = _what(each, classes)
    return Figure(
        plots.dependence(each.column, each.grid, mean, low, high, what, names, method),
        f"Predictions over {each.column}",
        f"Mean prediction if all test points have this value of {each.column}. The band is 1.64 "
        f"standard deviations over members: where it is wide, members disagree.{more}",
    )


def _table(found: Explanation) -> Table:
    importances = found.importances
    low, high = importances.interval()
    rows = []
    for j in np.argsort(-importances.mean, kind="stable").tolist():
        error = float(importances.error[j])
        values = [float(v[j]) for v in (importances.mean, low, high, importances.spread)]
        cells = [TableCell(number(value, error), value) for value in values]
        rows.append([TableCell(importances.columns[j], importances.columns[j]), *cells])
    header = ["column", "importance", "95 % from", "to", "std over members"]
    return Table("All columns", header, rows)
