"""What the numbers say, as values; `sentences` puts them into words.

A difference that is smaller than its noise is no difference. Nobody has to search a sentence for
what it says.
"""

import math
from enum import StrEnum

from shoal.prediction.statistics import Difference
from shoal.training.history import NEGLIGIBLE

__all__ = [
    "Calibration",
    "Coverage",
    "Repulsion",
    "Verdict",
    "calibration",
    "coverage",
    "repulsion",
    "verdict",
]

_LIGHT = 0.05
_SIGMAS = 2.0


class Verdict(StrEnum):
    """How one of two things that were measured in pairs compares with the other."""

    BETTER = "better"
    WORSE = "worse"
    EQUAL = "equal"
    DIFFERENT = "different"
    """It differs, and neither direction is better."""
    UNKNOWN = "unknown"
    """There is no interval: a single pair, or none."""


def verdict(difference: Difference, better: str) -> Verdict:
    """Of a paired difference with its interval, where `better` is "lower", "higher" or "neither".

    >>> verdict(Difference(0.1, -0.1, 0.3), "lower"), verdict(Difference(0.1, 0.05, 0.15), "lower")
    (<Verdict.EQUAL: 'equal'>, <Verdict.WORSE: 'worse'>)
    """
    if not all(map(math.isfinite, difference)):
        return Verdict.UNKNOWN
    if difference.low <= 0 <= difference.high:
        return Verdict.EQUAL
    if better not in ("lower", "higher"):
        return Verdict.DIFFERENT
    rises = difference.difference > 0
    return Verdict.BETTER if rises == (better == "higher") else Verdict.WORSE


class Calibration(StrEnum):
    """How mean confidence compares with accuracy."""

    CALIBRATED = "calibrated"
    OVERCONFIDENT = "overconfident"
    UNDERCONFIDENT = "underconfident"


def calibration(confidence: float, accuracy: float, noise: float) -> Calibration:
    """Of a mean confidence and an accuracy whose difference has this standard error.

    >>> calibration(0.97, 0.975, noise=0.006)
    <Calibration.CALIBRATED: 'calibrated'>
    """
    gap = confidence - accuracy
    if abs(gap) <= _SIGMAS * noise:
        return Calibration.CALIBRATED
    return Calibration.OVERCONFIDENT if gap > 0 else Calibration.UNDERCONFIDENT


class Coverage(StrEnum):
    """How the share of targets in intervals compares with their level."""

    HELD = "held"
    TOO_WIDE = "too wide"
    TOO_NARROW = "too narrow"


def coverage(level: float, found: float, count: int) -> Coverage:
    """Of intervals of a level that hold the share `found` of `count` targets.

    >>> coverage(0.9, 0.91, 200)
    <Coverage.HELD: 'held'>
    """
    if abs(found - level) <= _SIGMAS * math.sqrt(level * (1 - level) / count):
        return Coverage.HELD
    return Coverage.TOO_WIDE if found > level else Coverage.TOO_NARROW


class Repulsion(StrEnum):
    """What part repulsion played."""

    NONE = "none"
    UNKNOWN = "unknown"
    NEGLIGIBLE = "negligible"
    LIGHT = "light"
    ACTIVE = "active"


def repulsion(plain: bool, ratio: float) -> Repulsion:
    """Of a run that is a plain ensemble or not, by the ratio of push to drive.

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
