"""The numbers by which a page compares runs, and how each of them is called and shown."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.text import joined
from shoal.inference.likelihood import Task
from shoal.page.report_data import ReportData, RunRecord, SeedGroup
from shoal.prediction.metric import registry
from shoal.prediction.statistics import Difference, mean_and_error, paired_difference
from shoal.training.history import has_diverged

__all__ = [
    "CORRUPTED",
    "SIGNS",
    "Measure",
    "against_baseline",
    "baseline",
    "diverged",
    "diverged_sentence",
    "headline",
    "measures",
]

_FEW = ("accuracy", "nll", "ece", "rmse", "crps", "coverage_90")

_SETS = 3

_NAMES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "calibration error",
    "effective_functions": "different functions",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage_90": "90 % coverage",
    "sharpness": "mean deviation",
    "recognised": "recognised",
    "auroc_entropy": "AUROC",
    "auroc_variance": "AUROC",
    "entropy_ratio": "entropy ratio",
}

_SHARES = {"accuracy", "ece", "recognised", "coverage_90"}

_UNITS = {"nll": "nats"}


@dataclass(frozen=True)
class Measure:
    """One column of a table.

    Attributes:
        key: name of the metric.
        part: "test", "shift:NAME", "ood:NAME", or "corrupted:NAME" for a mean over corruptions.
    """

    key: str
    part: str = "test"

    @property
    def title(self) -> str:
        """For a heading."""
        name = _NAMES.get(self.key, self.key.replace("_", " "))
        kind, _, which = self.part.partition(":")
        if kind == "corrupted":
            which = kind if which == "all" else f"{kind}, {which.replace('-', ' ')}"
        return name if self.part == "test" else f"{name}, {which}"

    @property
    def unit(self) -> str:
        """What the number is in; empty for a pure number."""
        return "%" if self.share else _UNITS.get(self.key, "")

    @property
    def share(self) -> bool:
        """Shown in per cent."""
        return self.key in _SHARES

    @property
    def scale(self) -> float:
        """What to multiply with for showing."""
        return 100.0 if self.share else 1.0

    @property
    def better(self) -> str:
        """ "lower", "higher" or "neither"."""
        if self.key == "recognised":
            return "higher"
        return registry[self.key].better if self.key in registry else "neither"

    def __call__(self, entry: RunRecord) -> float:
        """Its value for a run, NaN where it has none."""
        if entry.assessment is None:
            return math.nan
        kind, _, name = self.part.partition(":")
        scores = entry.assessment.scores
        found = scores["test"] if kind == "test" else scores.get(_KINDS[kind], {}).get(name, {})
        return found.get(self.key, math.nan)

    def summary(self, group: SeedGroup) -> tuple[float, float]:
        """Mean over the seeds and its standard error, NaN where there is none."""
        values = list(group.values(self).values())
        return mean_and_error(values) if values else (math.nan, math.nan)


_KINDS = {"shift": "shifts", "ood": "ood", "corrupted": "corrupted"}

CORRUPTED = tuple(Measure(key, "corrupted:all") for key in ("accuracy", "nll", "ece"))
"""Means over every corruption and severity."""


def measures(story: ReportData) -> list[Measure]:
    """The columns that the runs of a page have numbers for."""
    about = story.assessment.about
    wanted = [*(Measure(key) for key in about.measures), *CORRUPTED]
    for name in list(story.assessment.ood)[:_SETS]:
        keys = ("recognised", f"auroc_{about.uncertainty}", "entropy_ratio")
        wanted += [Measure(key, f"ood:{name}") for key in keys]
    return [m for m in wanted if any(group.values(m) for group in story.groups)]


def headline(about: Task) -> list[str]:
    """The few metrics that a terminal has room for: usual ones, then the likelihood's own."""
    own = [key for key in about.measures if Measure(key).better != "neither"]
    return [*_FEW, *(key for key in own if key not in (*_FEW, "brier"))]


def baseline(group: SeedGroup, groups: Sequence[SeedGroup]) -> SeedGroup | None:
    """The plain ensemble of the same size, of the same form where there are several.

    A group that is one itself has none.
    """
    if group.first.plain:
        return None
    found = [g for g in groups if g.first.plain and g.members == group.members]
    return min(found, key=lambda other: other.first.form != group.first.form, default=None)


def against_baseline(
    measure: Callable[[RunRecord], float], group: SeedGroup, groups: Sequence[SeedGroup]
) -> tuple[Difference, int] | None:
    """Mean difference to the plain ensemble over the seeds that both have, and how many."""
    plain = baseline(group, groups)
    if plain is None:
        return None
    mine, theirs = group.values(measure), plain.values(measure)
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds:
        return None
    pairs = [mine[seed] for seed in seeds], [theirs[seed] for seed in seeds]
    return paired_difference(*pairs), len(seeds)


SIGNS = (
    "the loss ended far above where it began, members stopped being finite, or guessing would do "
    "better"
)
"""What is taken for it, in words."""


def diverged(entry: RunRecord) -> bool:
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


def diverged_sentence(found: Mapping[str, Mapping[float, SeedGroup]]) -> str:
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


def _count(group: SeedGroup) -> int:
    return sum(map(diverged, group.entries))
