"""Verdicts on numbers, as values; `sentences` puts them into words.

A difference whose interval contains 0 is not significant.
"""

import math
from enum import StrEnum

from shoal.prediction.statistics import Difference
from shoal.training.mover.history import NEGLIGIBLE

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
    """How a method compares with the baseline, by paired differences."""

    BETTER = "better"
    WORSE = "worse"
    EQUAL = "equal"
    """The difference is not significant: its 95 % interval contains 0."""
    DIFFERENT = "different"
    """The difference is significant, and neither direction is better."""
    UNKNOWN = "unknown"
    """There is no interval: one pair or none."""


def verdict(difference: Difference, better: str) -> Verdict:
    """The verdict on a paired difference, where `better` is "lower", "higher" or "neither".

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


def coverage(level: float, found: float, count: int) -> Coverage:
    """The verdict on intervals of a level that contain the share `found` of `count` targets.

    >>> coverage(0.9, 0.91, 200)
    <Coverage.HELD: 'held'>
    """
    if abs(found - level) <= _SIGMAS * math.sqrt(level * (1 - level) / count):
        return Coverage.HELD
    return Coverage.TOO_WIDE if found > level else Coverage.TOO_NARROW


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
