"""Which runs diverged in training, so that nobody takes them for what their method can do."""

import math
from collections.abc import Mapping

from shoal.app.story import Entry, Group
from shoal.app.words import joined
from shoal.training.history import has_diverged

__all__ = ["SIGNS", "diverged", "diverged_sentence"]

SIGNS = (
    "the loss ended far above where it began, members stopped being finite, or guessing would do "
    "better"
)
"""What is taken for it, in words."""


def diverged(entry: Entry) -> bool:
    """Members stopped being finite, the loss ended far above where it began, or the whole does
    worse than guessing."""
    last = entry.history[-1] if entry.history else {}
    if last.get("alive", entry.members) < entry.members or has_diverged(entry.history):
        return True
    if entry.assessment is None:
        return False
    nll = entry.assessment.test.get("nll", 0.0)
    classes = entry.assessment.scores["data"].get("classes") or []
    return math.isnan(nll) or (len(classes) > 1 and nll > math.log(len(classes)))


def diverged_sentence(found: Mapping[str, Mapping[float, Group]]) -> str:
    """For each method the strengths at which runs diverged, and how many; empty where none did."""
    told = []
    for method, groups in found.items():
        lost = {strength: group for strength, group in groups.items() if _count(group)}
        if lost:
            where = joined([f"{strength:g}" for strength in lost])
            runs = sum(len(group.entries) for group in lost.values())
            word = "strength" if len(lost) == 1 else "strengths"
            told.append(
                f"{sum(map(_count, lost.values()))} of {runs} runs of {method} at {word} {where}"
            )
    if not told:
        return ""
    return f"Training diverged in {joined(told)}: {SIGNS}."


def _count(group: Group) -> int:
    return sum(map(diverged, group.entries))
