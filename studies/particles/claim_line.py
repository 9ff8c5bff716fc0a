"""The line of a claim: claim, what was measured, verdict.

A verdict follows from the differences that test a claim, with Holm's correction over them. It is
*confirmed* if all are significant in the claimed direction. It is *refuted* if one is significant
in the other direction and none in the claimed one, or if a claim of "consistently" has a
significant exception. Otherwise it cannot be told, or holds in part.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shoal.prediction.statistics import holm, paired_difference, paired_p_value
from studies.particles.comparison import Case, Rows


class Expected(NamedTuple):
    """A difference that a claim predicts: its words, both cases, the metric and the sign."""

    words: str
    case: Case
    other: Case
    metric: str
    sign: int
    scale: float = 1.0
    digits: int = 3


Line = tuple[str, str, str]
"""Claim, measured, verdict."""


def line_of(rows: Rows, claim: str, tests: Sequence[Expected], always: bool = False) -> Line:
    """The line of a claim that predicts the signs of differences."""
    words, p_values, agree = [], [], []
    for test in tests:
        a, b = (rows.get((case, test.metric), {}) for case in (test.case, test.other))
        common = sorted(a.keys() & b.keys())
        if len(common) < 2:
            continue
        both = [a[s] for s in common], [b[s] for s in common]
        mean, low, high = (test.scale * x for x in paired_difference(*both))
        numbers = [f"{x:+.{test.digits}f}" for x in (mean, low, high)]
        words.append(f"{test.words} {numbers[0]} ({numbers[1]} to {numbers[2]}, n = {len(common)})")
        p_values.append(paired_p_value(*both) if len(common) > 2 else 1.0)
        agree.append(mean * test.sign > 0)
    if not words:
        return claim, "not measured", "cannot be told"
    sure = [p < 0.05 for p in holm(p_values)]
    for_it = sum(s and a for s, a in zip(sure, agree, strict=True))
    against = sum(s and not a for s, a in zip(sure, agree, strict=True))
    told = f"{'; '.join(words)}" if len(words) <= 6 else counted(for_it, against, len(words))
    return claim, told, verdict(for_it, against, len(words), always)


def counted(for_it: int, against: int, number: int) -> str:
    """Many comparisons in one sentence."""
    left = number - for_it - against
    return (
        f"of {number} comparisons {for_it} are significant as claimed, {against} the other way, "
        f"{left} not significant"
    )


def verdict(for_it: int, against: int, number: int, always: bool) -> str:
    """The verdict from the number of significant differences."""
    if for_it == number:
        return "confirmed"
    if against and (always or not for_it):
        return "refuted"
    if for_it:
        return f"in part: {for_it} of {number} as claimed, {against} the other way"
    return "cannot be told"
