"""Where is it wrong? Confusion and scores by class; residuals and coverage over the prediction."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shoal import plots
from shoal.core.display.text import counted, number, percent
from shoal.page.blocks import Block, Figure, Section, Table, TableCell, folded, rest_folded, section
from shoal.page.report_data import ReportData, SeedGroup
from shoal.plots.errors import PredictionBins
from shoal.prediction import metrics

__all__ = ["errors_section", "lead_confusion"]

_PAIRS = 10
"""Most frequent confusions in a table, where a matrix is too large to read."""

_MOST = 12
"""Classes up to which a matrix can be read."""


@section("errors", order=15)
def errors_section(report_data: ReportData) -> Section | None:
    """The errors of the lead on the test set: by class, or over the prediction."""
    if report_data.assessment.about.has_classes:
        return _of_columns(report_data) or _of_classes(report_data)
    return _of_numbers(report_data)


def _of_classes(report_data: ReportData) -> Section | None:
    counts = lead_confusion(report_data.lead)
    if counts is None:
        return None
    names = report_data.class_names(len(counts))
    wrong = counts.clone().fill_diagonal_(0)
    blocks: list[Block] = [
        Figure(
            plots.confusion(counts, names),
            "Confusion matrix",
            "Rows are true classes, columns predicted classes. Colour: share of the true class. "
            f"Right predictions are on the diagonal.{_pooled(report_data.lead, ' Numbers are')}",
        ),
        folded(_by_class(names, counts, _pooled(report_data.lead, " Points are"))),
    ]
    if len(counts) > _MOST and int(wrong.sum()):
        blocks.append(_pairs(names, counts, wrong))
    return Section("Where is it wrong?", _answer(names, counts, wrong), blocks)


def lead_confusion(group: SeedGroup) -> Tensor | None:
    """Confusion matrix [C, C] of all seeds together; None where predictions are not stored."""
    evaluations = [record.assessment for record in group.entries if record.assessment is not None]
    stored = [evaluation.split_samples("test") for evaluation in evaluations]
    stored = [values for values in stored if {"label", "prediction"} <= values.keys()]
    if not stored:
        return None
    label, prediction = (
        torch.cat([values[key].long() for values in stored]) for key in ("label", "prediction")
    )
    known = len(evaluations[0].scores["data"].get("classes") or [])
    seen = 1 + max(int(label.max()), int(prediction.max()))
    return metrics.confusion(label, prediction, max(known, seen, 2))


def _pooled(group: SeedGroup, subject: str) -> str:
    seeds = len(group.entries)
    return f"{subject} sums over {seeds} seeds." if seeds > 1 else ""


def _answer(names: list[str], counts: Tensor, wrong: Tensor) -> str:
    """The class with the lowest F1, and the most frequent confusion."""
    if not int(wrong.sum()):
        return "Every prediction on the test set is right."
    f1 = metrics.class_scores(counts)[2].nan_to_num(math.inf)
    worst = int(f1.argmin())
    true, predicted = divmod(int(wrong.argmax()), len(counts))
    many = int(wrong[true, predicted])
    return (
        f"Class {names[worst]} has the lowest F1, {float(f1[worst]):.3g}. The most frequent "
        f"confusion is {names[true]} predicted as {names[predicted]}, {counted(many, 'time')}."
    )


def _by_class(names: list[str], counts: Tensor, more: str) -> Table:
    scores = torch.stack(metrics.class_scores(counts), -1)
    return _scores("class", names, scores, counts.sum(1), more)


def _scores(what: str, names: list[str], scores: Tensor, points: Tensor, more: str = "") -> Table:
    """One row per class: precision, recall, F1 [C, 3], and its number of points."""
    rows = [
        [TableCell(name, name), *map(_score, row), TableCell(f"{many:,}", many)]
        for name, row, many in zip(names, scores.tolist(), points.tolist(), strict=True)
    ]
    return Table(
        f"Scores by {what}",
        [what, "precision", "recall", "F1", "points"],
        rows,
        f"Precision: share of the predictions of a {what} that are right. Recall: share of its "
        f"points that are found. F1: harmonic mean of both.{more}",
    )


def _score(value: float) -> TableCell:
    return TableCell("–" if math.isnan(value) else f"{value:.3f}", "" if value != value else value)


def _pairs(names: list[str], counts: Tensor, wrong: Tensor) -> Table:
    order = wrong.flatten().argsort(descending=True, stable=True)[:_PAIRS].tolist()
    rows = []
    for true, predicted in (divmod(place, len(counts)) for place in order):
        many, total = int(wrong[true, predicted]), int(counts[true].sum())
        if many:
            cells = [TableCell(names[k], names[k]) for k in (true, predicted)]
            share = many / total
            rows.append([*cells, TableCell(f"{many:,}", many), TableCell(percent(share), share)])
    columns = ["true class", "predicted class", "points", "share of the true class"]
    return Table("Most frequent confusions", columns, rows)


def _of_columns(report_data: ReportData) -> Section | None:
    """Several yes-or-no labels per data point: scores by column."""
    evaluation = report_data.assessment
    test, count = evaluation.split_samples("test"), evaluation.scores["data"]["counts"]["test"]
    if "label" not in test or "binary" not in evaluation.about.kinds:
        return None
    columns = len(test["label"]) // max(count, 1)
    if columns < 2 or len(test["label"]) != columns * count:
        return None
    label, predicted = (test[key].long().reshape(count, columns) for key in ("label", "prediction"))
    names = report_data.class_names(columns)
    tables = [metrics.confusion(label[:, k], predicted[:, k], 2) for k in range(columns)]
    scores = torch.stack([torch.stack(metrics.class_scores(t))[:, 1] for t in tables])
    points = torch.stack([t[1].sum() for t in tables])
    table = _scores("label", names, scores, points)
    return Section("Where is it wrong?", f"{columns} labels per data point.", [folded(table)])


def _of_numbers(report_data: ReportData) -> Section | None:
    test = report_data.assessment.split_samples("test")
    if not {"mean", "y", "stddev"} <= test.keys() or not len(test["y"]):
        return None
    shown = rest_folded(_number_figures(report_data, test), "The other target columns", 4)
    return Section("Where is it wrong?", _numbers_answer(test), [*shown])


def _number_figures(report_data: ReportData, test: dict[str, Tensor]) -> Iterator[Figure]:
    mean, y, stddev = (_columns(test[key]) for key in ("mean", "y", "stddev"))
    several = len(mean) > 1
    for column in range(len(mean)):
        of = f", target {column + 1}" if several else ""
        yield Figure(
            plots.residuals(mean[column], y[column], stddev[column], report_data.lead.label),
            f"Residuals over the prediction{of}",
            "Residuals should scatter around 0, and nine of ten should lie in the band. A mean "
            "away from 0 is a bias. A band that is too narrow in places calls for noise that "
            "depends on the input.",
        )
        curves = report_data.of_peers(
            lambda evaluation, k=column: _coverage(evaluation.split_samples("test"), k)
        )
        if curves:
            bars = " Bars are 95 % intervals." if len(curves) == 1 else ""
            yield Figure(
                plots.coverage_over_prediction(curves),
                f"Coverage over the prediction{of}",
                "Share of the targets inside their 90 % interval, in bins of equal number. On the "
                f"dotted line, intervals are right. Below it, they are too narrow.{bars}",
            )


def _columns(values: Tensor) -> Tensor:
    """One row per target column [K, B]."""
    return values.reshape(len(values), -1).T.double()


def _coverage(test: dict[str, Tensor], column: int) -> tuple[Tensor, Tensor] | None:
    if not {"mean", "pit"} <= test.keys() or test["mean"].shape != test["pit"].shape:
        return None
    return _columns(test["mean"])[column], _columns(test["pit"])[column]


def _numbers_answer(test: dict[str, Tensor]) -> str:
    """The mean residual, and where the error is largest."""
    mean, y = (_columns(test[key])[0] for key in ("mean", "y"))
    residual = y - mean
    bias = float(residual.mean())
    noise = float(residual.std(correction=0)) / math.sqrt(len(residual))
    text = f"The mean residual is {number(bias, noise)}"
    text += ": no significant bias." if abs(bias) <= 2 * noise else f" ± {number(noise, noise)}."
    bins = PredictionBins.of(mean)
    if len(bins.rows) < 3:
        return text
    errors = [float(residual[rows].square().mean().sqrt()) for rows in bins.rows]
    k = max(range(len(errors)), key=lambda index: errors[index])
    width = float(bins.edges[-1] - bins.edges[0]) / 20
    low, high = (number(float(edge), width) for edge in bins.edges[k : k + 2])
    return f"{text} RMSE is largest for predictions from {low} to {high}: {errors[k]:.3g}."
