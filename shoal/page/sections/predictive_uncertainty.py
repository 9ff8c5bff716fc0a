"""Predictive uncertainty: histograms, accuracy against confidence, galleries."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shoal import plots
from shoal.core.display.text import percent
from shoal.evaluation.evaluate import Evaluation
from shoal.page import sentences
from shoal.page.advice import interface, report_again
from shoal.page.blocks import (
    Block,
    Figure,
    Fold,
    Heading,
    Remark,
    Section,
    Slider,
    SliderRow,
    rest_folded,
    section,
)
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData, SeedGroup
from shoal.prediction.decisions import clopper_pearson

__all__ = ["THRESHOLDS", "answering_slider", "uncertainty_section"]


_SHIFTS = 4
_MEASURES = {
    "disagreement": ("Lowest disagreement", "Highest disagreement"),
    "entropy": ("Lowest predictive entropy", "Highest predictive entropy"),
    "confidence": ("Lowest confidence", "Highest confidence"),
}


@section("uncertainty", order=30)
def uncertainty_section(report_data: ReportData) -> Section | None:
    """Uncertainty on the test set and on OOD data."""
    blocks = [
        *no_ood_data(report_data),
        *rest_folded(_histograms(report_data), "Uncertainty of the other methods"),
        *_by_sizes(report_data),
        *answering_slider(report_data),
        *_confident(report_data),
        *rest_folded(_toys(report_data), "Predictions of the other methods"),
        *_galleries(report_data),
    ]
    if not blocks:
        return None
    return Section("When does it know that it does not know?", answer(report_data), blocks)


def no_ood_data(report_data: ReportData) -> Iterator[Block]:
    """In place of OOD detection: that no OOD data were given, and the line that gives them."""
    if not report_data.assessment.ood:
        yield Remark(
            "No OOD data were given, so OOD detection is not known. "
            "Give inputs that differ in kind from the training data.",
            code=report_again(report_data.lead.first, "ood"),
        )


def answer(report_data: ReportData) -> str:
    """The entropy on OOD data, or the error on uncertain inputs."""
    if report_data.assessment.about.has_classes:
        names = report_data.assessment.ood
        ratios = {
            n: Measure("entropy_ratio", f"ood:{n}").summary(report_data.lead)[0] for n in names
        }
        return sentences.entropy_sentence(ratios)
    test = report_data.assessment.split_samples("test")
    if not {"mean", "y", "stddev"} <= test.keys():
        return sentences.halves_sentence(math.nan, math.nan)
    square = (test["mean"] - test["y"]).square().reshape(len(test["y"]), -1).mean(-1)
    order = _flat(test["stddev"]).argsort()
    halves = order.tensor_split(2)
    return sentences.halves_sentence(*(float(square[half].mean().sqrt()) for half in halves))


def _quantity(report_data: ReportData) -> str:
    about = report_data.assessment.about
    spread = "stddev" if "numbers" in about.kinds else "disagreement"
    return "entropy" if about.has_classes else spread


def _histograms(report_data: ReportData) -> Iterator[Figure]:
    quantity = _quantity(report_data)
    noun = "the standard deviation" if quantity == "stddev" else quantity
    for label, group in report_data.peers().items():
        uncertainties = _uncertainties(group, quantity)
        if uncertainties is not None:
            yield Figure(
                plots.uncertainty(*uncertainties, label, quantity),
                f"Uncertainty of {label}",
                "Test inputs should lie on the left, OOD inputs (outlines) on the right. "
                f"Where the histograms overlap, {noun} cannot separate them.",
            )


def _by_sizes(report_data: ReportData) -> Iterator[Block]:
    quantity = _quantity(report_data)
    sized = [
        block for label in report_data.peers() for block in _by_size(report_data, label, quantity)
    ]
    if sized:
        yield Fold("Uncertainty against ensemble size", sized)


def _by_size(report_data: ReportData, label: str, quantity: str) -> Iterator[Block]:
    same = sorted((g for g in report_data.groups if g.label == label), key=lambda g: g.members)
    uncertainties = {group.members: _uncertainties(group, quantity) for group in same}
    panels = {members: panel for members, panel in uncertainties.items() if panel is not None}
    if len(panels) > 1:
        yield Figure(
            plots.uncertainty_by_size(panels, label, quantity),
            f"Uncertainty of {label} by ensemble size",
            "With more members, OOD inputs (outlines) should move to the right. "
            "Test inputs should stay on the left.",
        )


def _uncertainties(group: SeedGroup, quantity: str) -> tuple[Tensor, dict[str, Tensor]] | None:
    """The uncertainty on the test set and on each OOD set, where both are known."""
    evaluation = group.first.assessment
    if evaluation is None or f"test/{quantity}" not in evaluation.samples:
        return None
    names = [name for name in evaluation.ood if f"ood:{name}/{quantity}" in evaluation.samples]
    known = {name: _flat(evaluation.samples[f"ood:{name}/{quantity}"]) for name in names}
    return (_flat(evaluation.samples[f"test/{quantity}"]), known) if known else None


def _flat(values: Tensor) -> Tensor:
    return values.mean(-1) if values.ndim > 1 else values


def _confident(report_data: ReportData) -> Iterator[Block]:
    """Accuracy of confident predictions: on the test set; in a fold, under shift and with OOD."""
    yield from _above(report_data, "test", "Accuracy of confident predictions", "")
    evaluation, rest = report_data.assessment, []
    for name in list(evaluation.shifts)[:_SHIFTS]:
        rest += _above(report_data, f"shift:{name}", f"Confident predictions, {name}", "")
    for name in evaluation.ood:
        pooled = f"Every prediction on {name} counts as wrong, so its confidence should be low. "
        rest += _above(
            report_data, f"pooled:{name}", f"Confident predictions, test set and {name}", pooled
        )
    if rest:
        yield Fold("Confident predictions under shift, and pooled with OOD data", rest)


def _above(report_data: ReportData, split: str, title: str, words: str) -> Iterator[Block]:
    curves = report_data.of_peers(lambda evaluation: evaluation.accuracy_confidence(split))
    if curves:
        yield Figure(
            plots.accuracy_confidence(curves),
            title,
            f"{words}Above: accuracy of predictions above each confidence; higher is better. "
            "Below: share of predictions above each confidence.",
        )


def _toys(report_data: ReportData) -> Iterator[Figure]:
    for label, group in report_data.peers().items():
        evaluation = group.first.assessment
        if evaluation is None:
            continue
        train, test, plane = (evaluation.split_samples(name) for name in ("train", "test", "plane"))
        # without stored training data, the evaluated points take their place
        which, points = ("training data", train) if "y" in train else ("test data", plane or test)
        data = (points["x"], points["y"]) if {"x", "y"} <= points.keys() else None
        if "entropy" in plane:
            yield Figure(
                plots.plane(plane["across"], plane["up"], plane["entropy"], data),
                f"Predictive entropy of {label} over the input plane",
                "Bright means high predictive entropy. Entropy should grow away from the data, not "
                "only between the classes.",
            )
        if "x" in test and test.get("mean", test["x"]).ndim == 1:
            yield Figure(
                plots.band(test["x"], test["mean"], test["stddev"], data, label, which=which),
                f"Prediction of {label}",
                "The band should be narrow near the data and wide away from them.",
            )
        elif "y" in test and test["y"].ndim == 1:
            yield Figure(
                plots.parity(test["y"], test["mean"], test["stddev"], label),
                f"Prediction of {label}",
                "Points should lie on the dotted line. Points far from it should have long bars.",
            )


def _galleries(report_data: ReportData) -> Iterator[Block]:
    evaluation = report_data.assessment
    for split in ["test", *(f"ood:{name}" for name in evaluation.ood)]:
        name = split.partition(":")[2] or "test images"
        if f"{split}/gallery/disagreement/low" not in evaluation.samples:
            continue
        yield Heading(f"{name[0].upper()}{name[1:]}")
        shown = {m: list(_gallery(evaluation, split, m)) for m in _MEASURES}
        yield from shown.pop("disagreement")
        rest = [block for blocks in shown.values() for block in blocks]
        yield Fold(f"More {name}, by predictive entropy and by confidence", rest)


def _gallery(evaluation: Evaluation, split: str, measure: str) -> Iterator[Block]:
    longest = max(map(len, _classes(evaluation)), default=1)
    columns, room = (6, 8) if longest <= 4 else (4, 13)
    for end, title in zip(("low", "high"), _MEASURES[measure], strict=True):
        key = f"{split}/gallery/{measure}/{end}"
        index = evaluation.samples[f"{key}/index"]
        captions, tips = _captions(evaluation, split, index, measure, room)
        yield Figure(
            plots.gallery(evaluation.samples[key], captions, columns, tips),
            title,
            _reading(split, measure, end),
        )


def _reading(split: str, measure: str, end: str) -> str:
    uncertain = (end == "high") != (measure == "confidence")
    caption = "Caption: predicted class, confidence" + (
        ", and the true class where they differ." if split == "test" else "."
    )
    if split == "test":
        expected = "should be hard for people, too" if uncertain else "should look typical"
        return f"{caption} These images {expected}."
    quantity = "predictive entropy" if measure == "entropy" else measure
    return f"{caption} These OOD inputs get {end} {quantity}{', as they should' * uncertain}."


def _captions(
    evaluation: Evaluation, split: str, index: Tensor, measure: str, room: int
) -> tuple[list[str], list[str]]:
    values, classes = evaluation.split_samples(split), _classes(evaluation)
    captions, tips = [], []
    for i in index.tolist():
        predicted = _class(classes, int(values["prediction"][i]))
        truth = _class(classes, int(values["label"][i])) if "label" in values else predicted
        confidence = percent(round(float(values["confidence"][i]), 2))
        captions.append(f"{_caption(predicted, truth, room)}\n{confidence}")
        wrong = "" if predicted == truth else f", true class {truth}"
        tips.append(f"predicted {predicted}{wrong}, {measure} {float(values[measure][i]):.3g}")
    return captions, tips


def _caption(predicted: str, truth: str, room: int) -> str:
    """Text below a small image; a long true class gets its own line."""
    if predicted == truth:
        return _cut(predicted, room)
    line = f"{predicted} not {truth}"
    return line if len(line) <= room else f"{_cut(predicted, room)}\n{_cut(f'not {truth}', room)}"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _classes(evaluation: Evaluation) -> list[str]:
    return evaluation.scores["data"].get("classes") or []


def _class(classes: list[str], index: int) -> str:
    return classes[index] if index < len(classes) else str(index)


THRESHOLDS = [*(k / 100 for k in range(100)), 0.995, 0.999, 0.9995, 0.9999]
"""The confidences of the slider, finer near 1, where networks put most of their predictions."""

_START = THRESHOLDS.index(0.9)


def answering_slider(report_data: ReportData) -> Iterator[Block]:
    """A slider for the least confidence of an answer, with accuracy and share of every method."""
    rows = [
        row
        for label, group in report_data.peers().items()
        if (row := _row(label, group)) is not None
    ]
    if not rows:
        return
    count = report_data.assessment.scores["data"]["counts"].get("test")
    inputs = f"{count} test inputs" if count else "test inputs"
    yield Slider(
        "How many answers, and how accurate?",
        "Answer only when confidence is at least",
        [_shown(threshold) for threshold in THRESHOLDS],
        _START,
        ["answered", "accuracy", "95 % interval", "wrong answers"],
        rows,
        f"Move the slider: the numbers are those of the {inputs}. A threshold that is chosen here "
        f"promises nothing for new data. {_rule(report_data)} finds one that does.",
    )


def _rule(report_data: ReportData) -> str:
    """The name of what fits a threshold to validation data."""
    typed = interface(report_data.lead.first) == "command line"
    return f"`{'shoal decide RUN --error 0.01' if typed else 'shoal.decisions.selective'}`"


def _row(label: str, group: SeedGroup) -> SliderRow | None:
    stored = group.first.confidences()
    return None if stored is None else SliderRow(label, [_cells(*at) for at in _counts(*stored)])


def _counts(confidence: Tensor, correct: Tensor) -> list[tuple[int, int, int]]:
    """Answered and accurate predictions at every threshold, and the number of predictions."""
    kept = confidence >= torch.tensor(THRESHOLDS, dtype=torch.float64).unsqueeze(1) - 1e-9
    answered, accurate = kept.sum(1).tolist(), (kept & correct).sum(1).tolist()
    return [(n, k, len(confidence)) for n, k in zip(answered, accurate, strict=True)]


def _cells(answered: int, accurate: int, count: int) -> list[str]:
    share = percent(answered / count)
    if answered == 0:
        return [share, "–", "–", "0"]
    low, high = clopper_pearson(accurate, answered)
    span = f"{percent(low).removesuffix(' %')} to {percent(high)}"
    return [share, percent(accurate / answered), span, str(answered - accurate)]


def _shown(threshold: float) -> str:
    """A threshold in per cent; `percent` would round 99.99 %.

    >>> _shown(0.9), _shown(0.9995)
    ('90 %', '99.95 %')
    """
    return f"{100 * threshold:.4g} %"
