"""Predictive uncertainty: histograms, accuracy against confidence, galleries."""

import math
from collections.abc import Iterator

from torch import Tensor

from shoal import plots
from shoal.core.display.text import percent
from shoal.evaluation.evaluation import Evaluation
from shoal.page import sentences
from shoal.page.answering import answering_slider
from shoal.page.blocks import Block, Figure, Fold, Heading, Section, rest_folded, section
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData, SeedGroup

__all__ = ["uncertainty_section"]

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


def answer(report_data: ReportData) -> str:
    """The entropy on OOD data, or the error on uncertain inputs."""
    if report_data.assessment.about.has_classes:
        names = report_data.assessment.ood
        found = {
            n: Measure("entropy_ratio", f"ood:{n}").summary(report_data.lead)[0] for n in names
        }
        return sentences.entropy_sentence(found)
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
        found = _uncertainties(group, quantity)
        if found is not None:
            yield Figure(
                plots.uncertainty(*found, label, quantity),
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
    found = {group.members: _uncertainties(group, quantity) for group in same}
    panels = {members: panel for members, panel in found.items() if panel is not None}
    if len(panels) > 1:
        yield Figure(
            plots.uncertainty_by_size(panels, label, quantity),
            f"Uncertainty of {label} by ensemble size",
            "With more members, OOD inputs (outlines) should move to the right. "
            "Test inputs should stay on the left.",
        )


def _uncertainties(group: SeedGroup, quantity: str) -> tuple[Tensor, dict[str, Tensor]] | None:
    """The uncertainty on the test set and on each OOD set, where both are known."""
    found = group.first.assessment
    if found is None or f"test/{quantity}" not in found.samples:
        return None
    names = [name for name in found.ood if f"ood:{name}/{quantity}" in found.samples]
    known = {name: _flat(found.samples[f"ood:{name}/{quantity}"]) for name in names}
    return (_flat(found.samples[f"test/{quantity}"]), known) if known else None


def _flat(values: Tensor) -> Tensor:
    return values.mean(-1) if values.ndim > 1 else values


def _confident(report_data: ReportData) -> Iterator[Block]:
    """Accuracy of confident predictions: on the test set; in a fold, under shift and with OOD."""
    yield from _above(report_data, "test", "Accuracy of confident predictions", "")
    found, rest = report_data.assessment, []
    for name in list(found.shifts)[:_SHIFTS]:
        rest += _above(report_data, f"shift:{name}", f"Confident predictions, {name}", "")
    for name in found.ood:
        pooled = f"Every prediction on {name} counts as wrong, so its confidence should be low. "
        rest += _above(
            report_data, f"pooled:{name}", f"Confident predictions, test set and {name}", pooled
        )
    if rest:
        yield Fold("Confident predictions under shift, and pooled with OOD data", rest)


def _above(report_data: ReportData, split: str, title: str, words: str) -> Iterator[Block]:
    curves = {}
    for label, group in report_data.peers().items():
        found = group.first.assessment and group.first.assessment.accuracy_confidence(split)
        if found:
            curves[label] = found
    if curves:
        yield Figure(
            plots.accuracy_confidence(curves),
            title,
            f"{words}Above: accuracy of predictions above each confidence; higher is better. "
            "Below: share of predictions above each confidence.",
        )


def _toys(report_data: ReportData) -> Iterator[Figure]:
    for label, group in report_data.peers().items():
        found = group.first.assessment
        if found is None:
            continue
        train, test, plane = (found.split_samples(name) for name in ("train", "test", "plane"))
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
    found = report_data.assessment
    for split in ["test", *(f"ood:{name}" for name in found.ood)]:
        name = split.partition(":")[2] or "test images"
        if f"{split}/gallery/disagreement/low" not in found.samples:
            continue
        yield Heading(f"{name[0].upper()}{name[1:]}")
        shown = {m: list(_gallery(found, split, name, m)) for m in _MEASURES}
        yield from shown.pop("disagreement")
        rest = [block for blocks in shown.values() for block in blocks]
        yield Fold(f"More {name}, by predictive entropy and by confidence", rest)


def _gallery(found: Evaluation, split: str, name: str, measure: str) -> Iterator[Block]:
    longest = max(map(len, _classes(found)), default=1)
    columns, room = (6, 8) if longest <= 4 else (4, 13)
    for end, title in zip(("low", "high"), _MEASURES[measure], strict=True):
        key = f"{split}/gallery/{measure}/{end}"
        index = found.samples[f"{key}/index"]
        captions, tips = _captions(found, split, index, measure, room)
        yield Figure(
            plots.gallery(found.samples[key], captions, columns, tips),
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
    found: Evaluation, split: str, index: Tensor, measure: str, room: int
) -> tuple[list[str], list[str]]:
    values, classes = found.split_samples(split), _classes(found)
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


def _classes(found: Evaluation) -> list[str]:
    return found.scores["data"].get("classes") or []


def _class(classes: list[str], index: int) -> str:
    return classes[index] if index < len(classes) else str(index)
