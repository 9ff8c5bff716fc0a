"""From numbers to verdicts, and from verdicts to sentences.

Code decides on verdicts, which are values. Those of comparisons are in `verdicts`.
"""

import math
import re
from collections.abc import Mapping
from enum import StrEnum

from shoal.core.display.text import joined, percent
from shoal.prediction.metrics.similarity import COMPARED
from shoal.training.folder.history import NEGLIGIBLE

__all__ = [
    "ADOPTED",
    "Calibration",
    "Coverage",
    "Repulsion",
    "accuracy_sentence",
    "calibration",
    "calibration_sentence",
    "coverage",
    "coverage_sentence",
    "entropy_sentence",
    "error_sentence",
    "halves_sentence",
    "loss_sentence",
    "members_sentence",
    "ood_sentence",
    "repulsion",
    "repulsion_sentence",
    "shift_sentence",
]


_LIGHT = 0.05
_SIGMAS = 2.0


class Calibration(StrEnum):
    """How mean confidence compares with accuracy."""

    CALIBRATED = "calibrated"
    OVERCONFIDENT = "overconfident"
    UNDERCONFIDENT = "underconfident"


def calibration(confidence: float, accuracy: float, noise: float) -> Calibration:
    """The verdict on the gap between mean confidence and accuracy.

    `noise` is the standard error of the gap.

    >>> calibration(0.97, 0.975, noise=0.006)
    <Calibration.CALIBRATED: 'calibrated'>
    """
    gap = confidence - accuracy
    if abs(gap) <= _SIGMAS * noise:
        return Calibration.CALIBRATED
    return Calibration.OVERCONFIDENT if gap > 0 else Calibration.UNDERCONFIDENT


class Coverage(StrEnum):
    """How the share of targets inside intervals compares with the level of the intervals."""

    HELD = "held"
    TOO_WIDE = "too wide"
    TOO_NARROW = "too narrow"


def coverage(level: float, share: float, count: int) -> Coverage:
    """The verdict on intervals of a level that contain this share of `count` targets.

    >>> coverage(0.9, 0.91, 200)
    <Coverage.HELD: 'held'>
    """
    if abs(share - level) <= _SIGMAS * math.sqrt(level * (1 - level) / count):
        return Coverage.HELD
    return Coverage.TOO_WIDE if share > level else Coverage.TOO_NARROW


class Repulsion(StrEnum):
    """How strong repulsion was."""

    NONE = "none"
    UNKNOWN = "unknown"
    NEGLIGIBLE = "negligible"
    LIGHT = "light"
    ACTIVE = "active"


def repulsion(plain: bool, ratio: float) -> Repulsion:
    """The verdict on a run, by its force ratio, push / drive.

    >>> repulsion(False, 0.0002)
    <Repulsion.NEGLIGIBLE: 'negligible'>
    """
    if plain:
        return Repulsion.NONE
    if math.isnan(ratio):
        return Repulsion.UNKNOWN
    if ratio < NEGLIGIBLE:
        return Repulsion.NEGLIGIBLE
    return Repulsion.LIGHT if ratio < _LIGHT else Repulsion.ACTIVE


ADOPTED = "The networks were trained elsewhere: their method and their training are not known."
"""About a run that was adopted."""

_NO_GAP = "gap not significant"


def accuracy_sentence(accuracy: float, error: float, count: int, inputs: str = "inputs") -> str:
    """The accuracy with its standard error.

    >>> accuracy_sentence(0.978, 0.0066, 500, "images")
    'Accuracy: 97.8 ± 0.7 % (500 test images).'
    """
    text = percent(accuracy, error)
    if math.isfinite(error) and error > 0:
        text = f"{text.removesuffix(' %')} ± {percent(error)}"
    return f"Accuracy: {text} ({count:,} test {inputs})."


def error_sentence(rmse: float, stddev: float, count: int) -> str:
    """The root mean square error, and the standard deviation of the targets.

    >>> error_sentence(0.5, 2.0, 100)
    "RMSE: 0.5 (100 test inputs). The targets' standard deviation is 2."
    """
    text = f"RMSE: {rmse:.3g} ({count:,} test inputs)."
    return f"{text} The targets' standard deviation is {stddev:.3g}." if stddev > 0 else text


def loss_sentence(loss: float, count: int) -> str:
    """The mean of a custom loss.

    >>> loss_sentence(0.5, 100)
    "The members' mean loss is 0.5 (100 test inputs). A custom loss gives no probabilities."
    """
    return (
        f"The members' mean loss is {loss:.3g} ({count:,} test inputs). "
        f"A custom loss gives no probabilities."
    )


def calibration_sentence(
    confidence: float, accuracy: float, noise: float, near: tuple[float, float] | None = None
) -> str:
    """Mean confidence beside accuracy.

    Args:
        confidence: mean confidence.
        accuracy: accuracy.
        noise: standard error of the gap.
        near: confidence and accuracy of the predictions with about 90 % confidence; None where
            there are too few.

    >>> calibration_sentence(0.97, 0.975, 0.006)
    'Mean confidence is 97 %, accuracy 97.5 %: gap not significant.'
    """
    text = f"Mean confidence is {percent(confidence)}, accuracy {percent(accuracy)}"
    if near is not None:
        about, share = map(percent, near)
        text = f"Predictions with about {about} confidence have an accuracy of {share}. {text}"
    calibrated = calibration(confidence, accuracy, noise)
    if calibrated is Calibration.CALIBRATED:
        return f"{text}: {_NO_GAP}."
    points = percent(abs(confidence - accuracy)).removesuffix(" %")
    return f"{text}: {calibrated} by {points} points."


def coverage_sentence(level: float, share: float, count: int) -> str:
    """The share of the targets in the intervals, beside the level of the intervals.

    >>> coverage_sentence(0.9, 0.91, 200)
    'The 90 % intervals contain 91 % of the targets: gap not significant.'
    """
    text = f"The {percent(level)} intervals contain {percent(share)} of the targets"
    width = coverage(level, share, count)
    return f"{text}: {_NO_GAP if width is Coverage.HELD else width}."


def ood_sentence(name: str, share: float, auroc: float) -> str:
    """The detected share of an OOD set.

    >>> ood_sentence("letters", 0.96, 0.991)
    'The ensemble detects 96 % of letters as OOD at a 5 % false-positive rate (AUROC 0.991).'
    """
    return (
        f"The ensemble detects {percent(share)} of {name} as OOD at a 5 % false-positive rate "
        f"(AUROC {auroc:.3f})."
    )


def entropy_sentence(ratios: Mapping[str, float]) -> str:
    """The predictive entropy on each OOD set, over that on the test set.

    >>> entropy_sentence({"letters": 4.0, "noise": 0.6})
    'Predictive entropy on letters is 4 times that on the test set, on noise only 0.6 times.'
    """
    known = {name: value for name, value in ratios.items() if not math.isnan(value)}
    if not known:
        return "No OOD data were given."
    larger = {name: f"{value:.2g} times" for name, value in known.items() if value >= 1}
    smaller = {name: f"only {value:.2g} times" for name, value in known.items() if value < 1}
    (first, times), *rest = (larger | smaller).items()
    head = f"Predictive entropy on {first} is {times} that on the test set"
    text = ", ".join([head, *(f"on {name} {times}" for name, times in rest)]) + "."
    return re.sub(r"(only )?(?<![\d.])1 times", "about 1 time", text)


def halves_sentence(certain: float, uncertain: float) -> str:
    """RMSE on the uncertain half of the test set, beside that on the other half.

    >>> halves_sentence(0.2, 0.6)
    'On the more uncertain half of the test set, RMSE is 3 times that on the other half.'
    """
    if not certain > 0 or not math.isfinite(uncertain):
        return "Uncertainty should grow away from the training data."
    larger = (
        f"{uncertain / certain:.2g} times that on" if uncertain > certain else "not larger than on"
    )
    return f"On the more uncertain half of the test set, RMSE is {larger} the other half."


def members_sentence(members: int, effective: float, ood: Mapping[str, float]) -> str:
    """The effective number of functions on the test set and on OOD sets.

    >>> members_sentence(10, 6.4, {})
    'The effective number of functions is 6.4 on the test set (10 members).'
    >>> members_sentence(5000, 6.4, {})
    'The effective number of functions is 6.4 on the test set (64 of 5,000 members, evenly spaced).'
    """
    if members == 1:
        return "The ensemble has a single member, so there is no disagreement."
    places = {"the test set": effective, **ood}
    numbers = joined([f"{_few(value)} on {name}" for name, value in places.items()])
    some = members > COMPARED
    who = f"{COMPARED} of {members:,} members, evenly spaced" if some else f"{members} members"
    return f"The effective number of functions is {numbers} ({who})."


def _few(effective: float) -> str:
    return f"{effective:.2g}" if effective < 10 else f"{effective:.0f}"


def repulsion_sentence(method: str, ratio: float) -> str:
    """The share of repulsion in the force on the members.

    Args:
        method: name of the method.
        ratio: force ratio, push / drive.

    >>> repulsion_sentence("kde", 0.0002)
    'Repulsion was 0.02 % of the force: negligible, a plain ensemble in effect.'
    """
    strength = repulsion(method.split(" ")[0] == "ensemble", ratio)
    share = f"Repulsion was {percent(ratio / (1 + ratio))} of the force"
    return {
        Repulsion.NONE: "Members were trained without repulsion.",
        Repulsion.UNKNOWN: "The run did not record the force ratio.",
        Repulsion.NEGLIGIBLE: f"{share}: negligible, a plain ensemble in effect.",
        Repulsion.LIGHT: f"{share}: weak.",
        Repulsion.ACTIVE: f"{share}.",
    }[strength]


def shift_sentence(name: str, accuracy: float, confidence: float, noise: float) -> str:
    """Accuracy beside mean confidence under a shift.

    >>> shift_sentence("rotated-60", 0.41, 0.62, 0.02)
    'Under rotated-60, accuracy is 41 % and mean confidence 62 %: overconfident.'
    """
    calibrated = calibration(confidence, accuracy, noise)
    gap = _NO_GAP if calibrated is Calibration.CALIBRATED else calibrated
    return (
        f"Under {name}, accuracy is {percent(accuracy)} and mean confidence "
        f"{percent(confidence)}: {gap}."
    )
