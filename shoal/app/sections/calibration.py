"""Is it calibrated, also under shift? Reliability, coverage, severity curves."""

import math
import re
from collections.abc import Iterator

from shoal import plots
from shoal.app import sentences
from shoal.app.blocks import Block, Picture, Section, section
from shoal.app.corruption_blocks import corruption_blocks
from shoal.app.measures import Measure
from shoal.app.sections.trust import calibration_noise
from shoal.app.story import Story
from shoal.data.corruptions import parse_shift

__all__ = ["calibrated", "families"]

_SEVERITY = re.compile(r"(.+?)[-_ ]?(\d+(?:\.\d+)?)$")


@section("calibration", order=40)
def calibrated(story: Story) -> Section | None:
    """Confidence against what happens, here and after a shift."""
    blocks = [*_reliability(story), *_coverage(story), *_severity(story)]
    blocks += corruption_blocks(story)
    if not blocks and not {"confidence", "coverage_90"} & story.assessment.test.keys():
        return None
    return Section("Is it calibrated, also under shift?", answer(story), blocks)


def answer(story: Story) -> str:
    """About the worst shift, or about the test where there is none."""
    lead, worst = story.lead, _worst(story)
    if not story.assessment.about.has_classes:
        if "coverage_90" not in story.assessment.test:
            return "Intervals are not computed for targets of this kind."
        found, _ = Measure("coverage_90", worst or "test").summary(lead)
        count = story.assessment.scores["data"]["counts"].get(worst or "test", 1)
        return sentences.coverage_sentence(0.9, found, count)
    right, says = (Measure(key, worst or "test").summary(lead)[0] for key in _PAIR)
    noise = calibration_noise(lead.first)
    if worst is None:
        return sentences.calibration_sentence(says, right, noise)
    count = story.assessment.scores["data"]["counts"].get(worst, 1)
    noise = math.sqrt(max(right * (1 - right), 1e-12) / count)
    return sentences.shift_sentence(worst.partition(":")[2], right, says, noise)


_PAIR = ("accuracy", "confidence")


def _worst(story: Story) -> str | None:
    """The shift under which the lead does worst."""
    key = story.assessment.about.under_shift[0]
    sign = 1 if Measure(key).better == "higher" else -1
    found = {
        f"shift:{name}": sign * Measure(key, f"shift:{name}").summary(story.lead)[0]
        for name in story.assessment.shifts
    }
    found = {part: value for part, value in found.items() if not math.isnan(value)}
    return min(found, key=lambda part: found[part]) if found else None


def _reliability(story: Story) -> Iterator[Block]:
    worst = _worst(story)
    for part in ["test", *([worst] if worst else [])]:
        curves = {}
        for label, group in story.peers().items():
            found = group.first.assessment and group.first.assessment.reliability(part)
            if found:
                curves[label] = found
        if curves:
            name = part.partition(":")[2] or "test data"
            alone = len(curves) == 1
            bars = "bars are 95 % intervals" if alone else "bins of fewer than 5 are left out"
            yield Picture(
                plots.reliability(curves),
                f"Reliability on {name}",
                f"On the dotted line it is right as often as it says; below it is overconfident; "
                f"{bars}. The lower panel shows how many answers are that sure.",
            )


def _coverage(story: Story) -> Iterator[Block]:
    curves = {}
    for label, group in story.peers().items():
        pit = group.first.assessment and group.first.assessment.samples.get("test/pit")
        if pit is not None:
            curves[label] = pit
    if curves:
        yield Picture(
            plots.coverage(curves),
            "Coverage on test data",
            "On the dotted line intervals hold what they promise; below it they are too narrow.",
        )


def families(names: list[str]) -> dict[str, dict[float, str]]:
    """Shifts of one kind together, by their severity; those without a number stand alone.

    >>> families(["rotated-15", "rotated-30", "noise"])
    {'rotated': {15.0: 'rotated-15', 30.0: 'rotated-30'}, 'shift': {1.0: 'noise'}}
    """
    found: dict[str, dict[float, str]] = {}
    for name in names:
        match = _SEVERITY.fullmatch(name)
        if match is None:
            others = found.setdefault("shift", {})
            others[len(others) + 1.0] = name
        else:
            found.setdefault(match[1], {})[float(match[2])] = name
    return found


def _severity(story: Story) -> Iterator[Block]:
    keys = story.assessment.about.under_shift
    others = [name for name in story.assessment.shifts if not parse_shift(name)]
    for kind, places in families(others).items():
        names = {0.0: "test", **places} if kind == "shift" else None
        for key in keys:
            curves = _curves(story, key, places)
            title = Measure(key).title
            figure = plots.severity(
                curves, title, f"severity ({kind})", names, share=Measure(key).share
            )
            yield Picture(
                figure,
                f"{title[0].upper()}{title[1:]} under shift",
                f"0 is the test itself; to the right the data move away. {_HOPES.get(key, '')}",
            )


_HOPES = {
    "accuracy": "Some loss is unavoidable; what matters is that it is noticed.",
    "ece": "A low curve means that confidence falls along with accuracy.",
    "nll": "Low is good: wrong answers that are sure cost most.",
    "rmse": "Some loss is unavoidable; what matters is that it is noticed.",
}


def _curves(story: Story, key: str, places: dict[float, str]) -> dict[str, plots.Curve]:
    parts = {0.0: "test"} | {x: f"shift:{name}" for x, name in sorted(places.items())}
    curves = {}
    for label, group in story.peers().items():
        found = [Measure(key, part).summary(group) for part in parts.values()]
        means, errors = zip(*found, strict=True)
        curves[label] = plots.Curve(list(parts), list(means), list(errors))
    return curves
