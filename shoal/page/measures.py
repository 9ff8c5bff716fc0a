"""The metrics that a page compares runs by: their names, units and formats."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.display.text import joined
from shoal.inference.likelihoods.likelihood import Task
from shoal.page.report_data import ReportData, RunRecord, SeedGroup
from shoal.prediction.metrics.metric import registry
from shoal.prediction.statistics import Difference, mean_and_error, paired_difference
from shoal.training.folder.history import has_diverged

__all__ = [
    "CORRUPTED",
    "SIGNS",
    "Measure",
    "against_baseline",
    "baseline",
    "diverged",
    "diverged_sentence",
    "headline",
    "headlines",
    "is_metric",
    "measures",
    "paired_values",
]

_FEW = ("accuracy", "nll", "ece", "rmse", "crps", "coverage_90")

_SETS = 3

_HEADLINE_SETS = 2

_NAMES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
    "effective_functions": "effective number of functions",
    "label_auroc": "label AUROC",
    "label_mae": "label MAE",
    "loss": "mean loss",
    "rps": "RPS",
    "rmse": "RMSE",
    "crps": "CRPS",
    "coverage_90": "90 % coverage",
    "sharpness": "mean standard deviation",
    "recognised": "OOD detected",
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
        split: "test", "shift:NAME", "ood:NAME", or "corrupted:NAME", a mean over corruptions.
    """

    key: str
    split: str = "test"

    @property
    def title(self) -> str:
        """For a heading."""
        name = _NAMES.get(self.key, self.key.replace("_", " "))
        kind, _, which = self.split.partition(":")
        if kind == "corrupted":
            which = kind if which == "all" else f"{kind}, {which.replace('-', ' ')}"
        return name if self.split == "test" else f"{name}, {which}"

    @property
    def capital_title(self) -> str:
        """For the beginning of a figure's title."""
        return f"{self.title[0].upper()}{self.title[1:]}"

    @property
    def unit(self) -> str:
        """The unit, or an empty string."""
        return "%" if self.share else _UNITS.get(self.key, "")

    @property
    def share(self) -> bool:
        """Shown in per cent."""
        return self.key in _SHARES

    @property
    def scale(self) -> float:
        """The factor from the value to the shown number."""
        return 100.0 if self.share else 1.0

    @property
    def better(self) -> str:
        """ "lower", "higher" or "neither"."""
        if self.key == "recognised":
            return "higher"
        return registry[self.key].better if self.key in registry else "neither"

    def __call__(self, record: RunRecord) -> float:
        """The value for a run, or NaN."""
        if record.assessment is None:
            return math.nan
        kind, _, name = self.split.partition(":")
        scores = record.assessment.scores
        metrics = scores["test"] if kind == "test" else scores.get(_KINDS[kind], {}).get(name, {})
        return metrics.get(self.key, math.nan)

    def summary(self, group: SeedGroup) -> tuple[float, float]:
        """Mean over the seeds and its standard error, each NaN where it is not known."""
        values = list(group.values(self).values())
        return mean_and_error(values) if values else (math.nan, math.nan)


_KINDS = {"shift": "shifts", "ood": "ood", "corrupted": "corrupted"}

CORRUPTED = tuple(Measure(key, "corrupted:all") for key in ("accuracy", "nll", "ece"))
"""Means over every corruption and severity."""


def measures(report_data: ReportData) -> list[Measure]:
    """The metrics that at least one run of the page has."""
    about = report_data.assessment.about
    wanted = [*(Measure(key) for key in about.measures), *CORRUPTED]
    for name in list(report_data.assessment.ood)[:_SETS]:
        keys = ("recognised", f"auroc_{about.uncertainty}", "entropy_ratio")
        wanted += [Measure(key, f"ood:{name}") for key in keys]
    return [m for m in wanted if any(group.values(m) for group in report_data.groups)]


def headline(about: Task) -> list[str]:
    """The few metrics that fit in a terminal: the usual ones, then those of the likelihood."""
    of_task = [key for key in about.measures if Measure(key).better != "neither"]
    return [*_FEW, *(key for key in of_task if key not in (*_FEW, "brier"))]


def is_metric(name: str) -> bool:
    """Whether a metric has this name; "auroc" stands for every AUROC."""
    return name == "auroc" or name in _NAMES or name in registry


def headlines(groups: Sequence[SeedGroup]) -> list[Measure]:
    """The metrics that runs are compared by: headlines on the test set, corruptions, and OOD."""
    assessment = groups[0].first.assessment if groups else None
    if assessment is None:
        return []
    key = f"auroc_{assessment.about.uncertainty}"
    detection = [Measure(key, f"ood:{name}") for name in list(assessment.ood)[:_HEADLINE_SETS]]
    wanted = [*map(Measure, headline(assessment.about)), *CORRUPTED, *detection]
    return [m for m in wanted if any(group.values(m) for group in groups)]


def baseline(group: SeedGroup, groups: Sequence[SeedGroup]) -> SeedGroup | None:
    """The plain ensemble of the same ensemble size, if possible of the same form and settings.

    For a plain ensemble with other settings it is the first one with common batches; None for
    this one itself.
    """
    plain = [g for g in groups if g.first.plain and g.members == group.members]
    if group.first.plain:
        plain = [g for g in plain if g.first.form == group.first.form]
        first = min(plain, key=lambda g: g.first.config.get("batches") == "own", default=group)
        return None if first is group else first

    def unlike(other: SeedGroup) -> tuple[bool, int]:
        mine, theirs = group.first.settings.items(), other.first.settings.items()
        return other.first.form != group.first.form, len(mine ^ theirs)

    return min(plain, key=unlike, default=None)


def paired_values(
    measure: Callable[[RunRecord], float], group: SeedGroup, other: SeedGroup
) -> tuple[list[float], list[float]] | None:
    """Values of two groups over their shared seeds; None where they share none."""
    mine, theirs = group.values(measure), other.values(measure)
    seeds = [seed for seed in mine if seed in theirs]
    return ([mine[seed] for seed in seeds], [theirs[seed] for seed in seeds]) if seeds else None


def against_baseline(
    measure: Callable[[RunRecord], float], group: SeedGroup, groups: Sequence[SeedGroup]
) -> tuple[Difference, int] | None:
    """Mean difference to the plain ensemble over the shared seeds, and the number of pairs."""
    plain = baseline(group, groups)
    pairs = None if plain is None else paired_values(measure, group, plain)
    return None if pairs is None else (paired_difference(*pairs), len(pairs[0]))


SIGNS = (
    "the loss ended far above its start, a member became non-finite, or the NLL is worse than "
    "guessing"
)
"""The signs of divergence, in words."""


def diverged(record: RunRecord) -> bool:
    """Whether a member became non-finite, the loss ended far above its start, or the NLL is worse
    than guessing."""
    last = record.history[-1] if record.history else {}
    trained = record.trained.get("members", 0)
    if last.get("alive", trained) < trained or has_diverged(record.history):
        return True
    if record.assessment is None:
        return False
    nll = record.assessment.test.get("nll", 0.0)
    classes = record.assessment.scores["data"].get("classes") or []
    one_of_many = len(classes) > 1 and "binary" not in record.assessment.about.kinds
    return math.isnan(nll) or (one_of_many and nll > math.log(len(classes)))


def diverged_sentence(by_method: Mapping[str, Mapping[float, SeedGroup]]) -> str:
    """How many runs diverged, for each method and strength; empty where none did."""
    parts = []
    for method, groups in by_method.items():
        diverging = {strength: group for strength, group in groups.items() if _count(group)}
        if diverging:
            where = joined([f"{strength:g}" for strength in diverging])
            runs = sum(len(group.entries) for group in diverging.values())
            word = "strength" if len(diverging) == 1 else "strengths"
            parts.append(
                f"{sum(map(_count, diverging.values()))} of {runs} runs of {method} at {word} "
                f"{where}"
            )
    if not parts:
        return ""
    return f"Training diverged in {joined(parts)}: {SIGNS}."


def _count(group: SeedGroup) -> int:
    return sum(map(diverged, group.entries))
