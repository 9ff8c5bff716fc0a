"""When does it know that it does not know? Entropy, accuracy against confidence, galleries."""

import math
from collections.abc import Iterator

from torch import Tensor

from shoal import plots
from shoal.core.text import percent
from shoal.evaluation.evaluation import Evaluation
from shoal.page import sentences
from shoal.page.blocks import Block, Fold, Heading, Picture, Section, section
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData, SeedGroup

__all__ = ["doubts"]

_PANELS = 4
_MEASURES = {
    "disagreement": ("Where members agree", "Where members disagree"),
    "entropy": ("Lowest entropy", "Highest entropy"),
    "confidence": ("Least confident", "Most confident"),
}


@section("doubt", order=30)
def doubts(story: ReportData) -> Section | None:
    """Uncertainty on familiar and on foreign data."""
    blocks = [*_histograms(story), *_sure(story), *_toys(story), *_galleries(story)]
    if not blocks:
        return None
    return Section("When does it know that it does not know?", answer(story), blocks)


def answer(story: ReportData) -> str:
    """How much more uncertain it is about foreign data, or where its errors are larger."""
    if story.assessment.about.has_classes:
        names = story.assessment.ood
        found = {n: Measure("entropy_ratio", f"ood:{n}").summary(story.lead)[0] for n in names}
        return sentences.doubt_sentence(found)
    test = story.assessment.split_samples("test")
    if not {"mean", "y", "stddev"} <= test.keys():
        return sentences.halves_sentence(math.nan, math.nan)
    square = (test["mean"] - test["y"]).square().reshape(len(test["y"]), -1).mean(-1)
    order = _flat(test["stddev"]).argsort()
    halves = order.tensor_split(2)
    return sentences.halves_sentence(*(float(square[half].mean().sqrt()) for half in halves))


def _histograms(story: ReportData) -> Iterator[Block]:
    quantity = "entropy" if story.assessment.about.has_classes else "stddev"
    for label, group in list(story.peers().items())[:_PANELS]:
        found = _spread(group, quantity)
        if found is not None:
            yield Picture(
                plots.uncertainty(*found, label, quantity),
                f"Uncertainty of {label}",
                "Test data should pile up on the left, foreign data (outlines) on the right; "
                "where they overlap, one cannot be told from the other.",
            )
    sized = [block for label in story.peers() for block in _by_size(story, label, quantity)]
    if sized:
        yield Fold("Uncertainty against the number of members", sized)


def _by_size(story: ReportData, label: str, quantity: str) -> Iterator[Block]:
    same = sorted((g for g in story.groups if g.label == label), key=lambda g: g.members)
    found = {group.members: _spread(group, quantity) for group in same}
    panels = {members: panel for members, panel in found.items() if panel is not None}
    if len(panels) > 1:
        yield Picture(
            plots.uncertainty_by_size(panels, label, quantity),
            f"Uncertainty of {label} by size",
            "With more members the foreign data (outlines) should move to the right, "
            "while the test data stay on the left.",
        )


def _spread(group: SeedGroup, quantity: str) -> tuple[Tensor, dict[str, Tensor]] | None:
    """An uncertainty on test data and on each foreign set, where both are known."""
    found = group.first.assessment
    if found is None or f"test/{quantity}" not in found.samples:
        return None
    names = [name for name in found.ood if f"ood:{name}/{quantity}" in found.samples]
    known = {name: _flat(found.samples[f"ood:{name}/{quantity}"]) for name in names}
    return (_flat(found.samples[f"test/{quantity}"]), known) if known else None


def _flat(values: Tensor) -> Tensor:
    return values.mean(-1) if values.ndim > 1 else values


def _sure(story: ReportData) -> Iterator[Block]:
    """On the test data; folded away, under each shift and pooled with each foreign set."""
    yield from _above(story, "test", "Accuracy of the sure answers", "")
    found, rest = story.assessment, []
    for name in list(found.shifts)[:_PANELS]:
        rest += _above(story, f"shift:{name}", f"Sure answers, {name}", "")
    for name in found.ood:
        pooled = f"Every answer about {name} is wrong, so that only doubt keeps the curve high. "
        rest += _above(story, f"pooled:{name}", f"Sure answers, test and {name}", pooled)
    if rest:
        yield Fold("The same under shift, and pooled with foreign data", rest)


def _above(story: ReportData, part: str, title: str, words: str) -> Iterator[Block]:
    curves = {}
    for label, group in story.peers().items():
        found = group.first.assessment and group.first.assessment.accuracy_confidence(part)
        if found:
            curves[label] = found
    if curves:
        yield Picture(
            plots.accuracy_confidence(curves),
            title,
            f"{words}Above: how often answers are right that are at least so confident, better the "
            "higher. Below: how many answers remain.",
        )


def _toys(story: ReportData) -> Iterator[Block]:
    for label, group in list(story.peers().items())[:_PANELS]:
        found = group.first.assessment
        if found is None:
            continue
        train, test, plane = (found.split_samples(name) for name in ("train", "test", "plane"))
        # where the training data are not known, the points it was evaluated on stand for them
        which, points = ("training data", train) if "y" in train else ("test data", plane or test)
        data = (points["x"], points["y"]) if {"x", "y"} <= points.keys() else None
        if "entropy" in plane:
            yield Picture(
                plots.plane(plane["across"], plane["up"], plane["entropy"], data),
                f"Entropy of {label} over the plane",
                "Bright is doubt: it should grow away from the data, not only between the classes.",
            )
        if "x" in test and test.get("mean", test["x"]).ndim == 1:
            yield Picture(
                plots.band(test["x"], test["mean"], test["stddev"], data, label, which=which),
                f"Prediction of {label}",
                "The band should hug the data where they are and widen where they are not.",
            )
        elif "y" in test and test["y"].ndim == 1:
            yield Picture(
                plots.parity(test["y"], test["mean"], test["stddev"], label),
                f"Prediction of {label}",
                "Points should lie on the dotted line, and bars should be long where they do not.",
            )


def _galleries(story: ReportData) -> Iterator[Block]:
    found = story.assessment
    for part in ["test", *(f"ood:{name}" for name in found.ood)]:
        name = part.partition(":")[2] or "test images"
        if f"{part}/gallery/disagreement/low" not in found.samples:
            continue
        yield Heading(f"{name[0].upper()}{name[1:]}")
        shown = {m: list(_gallery(found, part, name, m)) for m in _MEASURES}
        yield from shown.pop("disagreement")
        rest = [block for blocks in shown.values() for block in blocks]
        yield Fold(f"More of the {name}: sorted by entropy and by confidence", rest)


def _gallery(found: Evaluation, part: str, name: str, measure: str) -> Iterator[Block]:
    longest = max(map(len, _classes(found)), default=1)
    columns, room = (6, 8) if longest <= 4 else (4, 13)
    for end, title in zip(("low", "high"), _MEASURES[measure], strict=True):
        key = f"{part}/gallery/{measure}/{end}"
        index = found.samples[f"{key}/index"]
        captions, tips = _captions(found, part, index, measure, room)
        yield Picture(
            plots.gallery(found.samples[key], captions, columns, tips),
            title,
            _reading(part, measure, end),
        )


def _reading(part: str, measure: str, end: str) -> str:
    doubtful = (end == "high") != (measure == "confidence")
    below = "Below each: what it says" + (
        " (and the truth where it is wrong)" if part == "test" else ""
    )
    if part == "test":
        hope = "these should be hard for you, too" if doubtful else "these should look typical"
    else:
        hope = "as it should be for foreign data" if doubtful else "these are the dangerous ones"
    return f"{below}, and how sure it is; {hope}."


def _captions(
    found: Evaluation, part: str, index: Tensor, measure: str, room: int
) -> tuple[list[str], list[str]]:
    values, classes = found.split_samples(part), _classes(found)
    captions, tips = [], []
    for i in index.tolist():
        said = _class(classes, int(values["prediction"][i]))
        truth = _class(classes, int(values["label"][i])) if "label" in values else said
        sure = percent(round(float(values["confidence"][i]), 2))
        captions.append(f"{_caption(said, truth, room)}\n{sure}")
        wrong = "" if said == truth else f", truth {truth}"
        tips.append(f"says {said}{wrong}, {measure} {float(values[measure][i]):.3g}")
    return captions, tips


def _caption(said: str, truth: str, room: int) -> str:
    """What fits below a small image: the truth has a line of its own where both are too long."""
    if said == truth:
        return _cut(said, room)
    line = f"{said} not {truth}"
    return line if len(line) <= room else f"{_cut(said, room)}\n{_cut(f'not {truth}', room)}"


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _classes(found: Evaluation) -> list[str]:
    return found.scores["data"].get("classes") or []


def _class(classes: list[str], index: int) -> str:
    return classes[index] if index < len(classes) else str(index)
