"""Methods at several strengths: where repulsion helps, and where it lowers accuracy."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from shoal.core.display.text import flat, joined, plain
from shoal.page.measures import Measure, diverged, diverged_sentence
from shoal.page.report_data import SeedGroup
from shoal.page.verdicts import Family
from shoal.prediction.statistics import Pairs, Verdict, decide
from shoal.training.folder.history import NEGLIGIBLE

__all__ = ["Sweep", "growth_sentence", "negligible", "strength_sentence", "sweeps"]

_OWN = ("strength", "seed", "init_seed")


class _Gain(Enum):
    """How the strengths of a method compare with the plain ensemble."""

    BETTER = "{} without significant accuracy loss."
    EQUAL = (
        f"With force ratio ≥ {NEGLIGIBLE:g}, no strength of {{}} improves {{metric}} significantly "
        "without accuracy loss."
    )
    WEAK = f"Repulsion of {{}} is negligible at every strength (force ratio < {NEGLIGIBLE:g})."
    SOME_DIVERGED = "Repulsion of {} is negligible at every strength that did not diverge."
    ALL_DIVERGED = "Training of {} diverged at every strength."


@dataclass(frozen=True, eq=False)
class Sweep:
    """One method and ensemble size at several strengths.

    Attributes:
        method: name of the method.
        members: ensemble size.
        groups: runs by strength, ascending.
    """

    method: str
    members: int
    groups: Mapping[float, SeedGroup]

    def falls(self, family: Family) -> float | None:
        """The first strength whose accuracy is significantly below the plain ensemble's."""
        for strength, group in self.groups.items():
            for measure in (Measure("accuracy"), Measure("rmse")):
                decision = family(group, measure)
                if decision is not None and decision.verdict is Verdict.WORSE:
                    return strength
        return None


def sweeps(groups: Sequence[SeedGroup]) -> list[Sweep]:
    """Every method and ensemble size with several strengths and equal other settings."""
    by_settings: dict[tuple[str, int, str], dict[float, SeedGroup]] = {}
    for group in groups:
        first, strength = group.first, group.first.config.get("strength")
        if strength is None or first.asked:
            continue
        words = {k: v for k, v in flat(plain(first.config)).items() if k not in _OWN}
        key = first.family, group.members, repr(sorted(words.items()))
        by_settings.setdefault(key, {})[float(strength)] = group
    return [
        Sweep(method, members, dict(sorted(by_strength.items())))
        for (method, members, _), by_strength in by_settings.items()
        if len(by_strength) > 1
    ]


def negligible(group: SeedGroup) -> bool:
    """Whether the median force ratio of the runs is negligible."""
    ratios = sorted(record.ratio for record in group.entries if math.isfinite(record.ratio))
    return not ratios or ratios[len(ratios) // 2] < NEGLIGIBLE


def strength_sentence(swept: Sequence[Sweep], family: Family, measure: Measure) -> str:
    """Whether some strength improves a measure without accuracy loss."""
    if all(len(group.entries) < 2 for sweep in swept for group in sweep.groups.values()):
        return "One seed per strength gives no interval. Type `--seeds 5`."
    gains: dict[_Gain, list[str]] = {kind: [] for kind in _Gain}
    falling = []
    for sweep in swept:
        limit = sweep.falls(family)
        falling += [] if limit is None else [f"{sweep.method} from strength {limit:g} on"]
        active = {s: g for s, g in sweep.groups.items() if not negligible(g)}
        gain = _best_gain(active, family, measure, limit)
        if gain is not None:
            gains[_Gain.BETTER].append(_gain_words(sweep.method, *gain, measure))
        else:
            gains[_Gain.EQUAL if active else _negligible(sweep)].append(sweep.method)
    diverging = diverged_sentence({sweep.method: sweep.groups for sweep in swept})
    return " ".join(filter(None, (_gains(measure, gains), _falls(falling), diverging)))


def _gain_words(method: str, strength: float, difference: float, measure: Measure) -> str:
    verb = "lowers" if difference < 0 else "raises"
    size = f"{abs(difference):.2g} {'' if measure.share else measure.unit}".rstrip()
    return f"{method} at strength {strength:g} {verb} {measure.title} by {size}"


def _negligible(sweep: Sweep) -> _Gain:
    """The kind of a sweep with negligible repulsion; a diverged run shows nothing about it."""
    finite = [not any(map(diverged, group.entries)) for group in sweep.groups.values()]
    if all(finite):
        return _Gain.WEAK
    return _Gain.SOME_DIVERGED if any(finite) else _Gain.ALL_DIVERGED


def _gains(measure: Measure, gains: Mapping[_Gain, list[str]]) -> str:
    return " ".join(
        kind.value.format(joined(names), metric=measure.title)
        for kind, names in gains.items()
        if names
    )


def _falls(falling: Sequence[str]) -> str:
    if not falling:
        return "No strength lowers accuracy significantly."
    return f"Accuracy is significantly lower than the plain ensemble's for {joined(falling)}."


def _best_gain(
    active: Mapping[float, SeedGroup],
    family: Family,
    measure: Measure,
    limit: float | None,
) -> tuple[float, float] | None:
    """Strength and difference of the largest significant gain over the plain ensemble."""
    gains = {}
    for strength, group in active.items():
        decision = family(group, measure)
        if decision is None or (limit is not None and strength >= limit):
            continue
        if decision.verdict is Verdict.BETTER:
            gains[strength] = decision.difference.difference
    best = max(gains, key=lambda strength: abs(gains[strength]), default=None)
    return None if best is None else (best, gains[best])


_GROWTH = {
    Verdict.BETTER: "improves",
    Verdict.EQUAL: "stays equal within the margin",
    Verdict.WORSE: "worsens",
    Verdict.UNDECIDED: "is not decided",
}


def growth_sentence(family: Family, measure: Measure) -> str:
    """Whether methods with active repulsion improve from few members to many, paired by seed.

    Empty where no such method has two ensemble sizes of more than one member.
    """
    pairs: dict[str, Pairs] = {}
    spans: dict[str, str] = {}
    for label in dict.fromkeys(group.label for group in family.groups):
        same = [g for g in family.groups if g.label == label and g.members > 1]
        same = sorted((g for g in same if not negligible(g)), key=lambda group: group.members)
        found = family.paired(same[-1], same[0], measure) if len(same) > 1 else None
        if found is not None:
            pairs[label] = found
            spans[label] = f"{same[0].members} to {same[-1].members} members"
    verdicts: dict[Verdict, list[str]] = {}
    for label, decision in decide("few members to many", pairs).items():
        verdicts.setdefault(decision.verdict, []).append(label)
    parts = [
        f"{verb} for {joined(verdicts[word])}" for word, verb in _GROWTH.items() if word in verdicts
    ]
    if not parts:
        return ""
    reach = joined(list(dict.fromkeys(spans.values())))
    change = joined(parts)
    return f"From {reach}, with force ratio ≥ {NEGLIGIBLE:g}, {measure.title} {change}."
