"""Methods at several strengths: what more repulsion brings, and where it begins to cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from shoal.core.text import flat, joined, plain
from shoal.page.measures import Measure, against_baseline, diverged, diverged_sentence
from shoal.page.report_data import SeedGroup
from shoal.page.verdicts import Verdict, verdict
from shoal.prediction.statistics import Difference, paired_difference
from shoal.training.history import NEGLIGIBLE

__all__ = ["Sweep", "growth_sentence", "negligible", "strength_sentence", "sweeps"]

_OWN = ("strength", "seed", "init_seed")


class _Gain(Enum):
    """What the strengths of a method bring against the plain ensemble."""

    BEATS = "{} {verb} the plain ensemble before accuracy falls"
    EQUALS = "no strength of {} that is not negligible does so by more than noise"
    IDLE = "{} was negligible at every strength"
    LOST = "{} was negligible at every strength at which training did not diverge"
    NONE = "{} says nothing, for training diverged at every strength"


@dataclass(frozen=True, eq=False)
class Sweep:
    """One method and size at several strengths.

    Attributes:
        method: its name.
        members: how many.
        groups: the runs by strength, ascending.
    """

    method: str
    members: int
    groups: Mapping[float, SeedGroup]

    def falls(self, groups: Sequence[SeedGroup]) -> float | None:
        """The first strength that is less accurate than the plain ensemble by more than noise."""
        for strength, group in self.groups.items():
            for measure in (Measure("accuracy"), Measure("rmse")):
                found = against_baseline(measure, group, groups)
                if found is not None and verdict(found[0], measure.better) is Verdict.WORSE:
                    return strength
        return None


def sweeps(groups: Sequence[SeedGroup]) -> list[Sweep]:
    """Every method and size that ran at more than one strength, all else being equal."""
    found: dict[tuple[str, int, str], dict[float, SeedGroup]] = {}
    for group in groups:
        first, strength = group.first, group.first.config.get("strength")
        if strength is None:
            continue
        words = {k: v for k, v in flat(plain(first.config)).items() if k not in _OWN}
        key = first.family, group.members, repr(sorted(words.items()))
        found.setdefault(key, {})[float(strength)] = group
    return [
        Sweep(method, members, dict(sorted(by_strength.items())))
        for (method, members, _), by_strength in found.items()
        if len(by_strength) > 1
    ]


def negligible(group: SeedGroup) -> bool:
    """Its members pushed each other too little to matter, in the typical run and epoch."""
    ratios = sorted(entry.ratio for entry in group.entries if math.isfinite(entry.ratio))
    return not ratios or ratios[len(ratios) // 2] < NEGLIGIBLE


def strength_sentence(found: Sequence[Sweep], groups: Sequence[SeedGroup], measure: Measure) -> str:
    """Whether repulsion that is not negligible beats the plain ensemble before accuracy falls."""
    if all(len(group.entries) < 2 for sweep in found for group in sweep.groups.values()):
        return "One seed a strength says nothing about the noise; `--seeds 5` does."
    gains: dict[_Gain, list[str]] = {kind: [] for kind in _Gain}
    falling = []
    for sweep in found:
        limit = sweep.falls(groups)
        falling += [] if limit is None else [f"{sweep.method} from strength {limit:g} on"]
        active = {s: g for s, g in sweep.groups.items() if not negligible(g)}
        gain = _best_gain(active, groups, measure, limit)
        if gain is not None:
            best = f"{sweep.method} at strength {gain[0]:g} (by {abs(gain[1]):.2g})"
            gains[_Gain.BEATS].append(best)
        else:
            gains[_Gain.EQUALS if active else _idle(sweep)].append(sweep.method)
    lost = diverged_sentence({sweep.method: sweep.groups for sweep in found})
    return " ".join(filter(None, (_gains(measure, gains), _falls(falling), lost)))


def _idle(sweep: Sweep) -> _Gain:
    """What a sweep is worth whose forces were negligible: a run that diverged has shown none."""
    sound = [not any(map(diverged, group.entries)) for group in sweep.groups.values()]
    return _Gain.IDLE if all(sound) else _Gain.LOST if any(sound) else _Gain.NONE


def _gains(measure: Measure, gains: Mapping[_Gain, list[str]]) -> str:
    verb = "beats" if len(gains[_Gain.BEATS]) == 1 else "beat"
    told = [kind.value.format(joined(names), verb=verb) for kind, names in gains.items() if names]
    return f"In {measure.title}, {'; '.join(told)}."


def _falls(falling: Sequence[str]) -> str:
    if not falling:
        return "Accuracy falls by more than noise at none of the strengths."
    return f"Accuracy falls below that of the plain ensemble for {joined(falling)}."


def _best_gain(
    active: Mapping[float, SeedGroup],
    groups: Sequence[SeedGroup],
    measure: Measure,
    limit: float | None,
) -> tuple[float, float] | None:
    """Strength and difference where the gain over the plain ensemble is largest and no noise."""
    gains = {}
    for strength, group in active.items():
        found = against_baseline(measure, group, groups)
        if found is None or (limit is not None and strength >= limit):
            continue
        if verdict(found[0], measure.better) is Verdict.BETTER:
            gains[strength] = found[0].difference
    best = max(gains, key=lambda strength: abs(gains[strength]), default=None)
    return None if best is None else (best, gains[best])


_GROWTH = {
    Verdict.BETTER: "improves",
    Verdict.EQUAL: "stays equal within noise",
    Verdict.WORSE: "worsens",
}


def growth_sentence(groups: Sequence[SeedGroup], measure: Measure) -> str:
    """Whether methods whose repulsion is not negligible improve from few members to many.

    Seeds are the pairs. Empty where no such method ran with two sizes of more than one member.
    """
    verdicts: dict[Verdict, list[str]] = {}
    spans: dict[str, str] = {}
    for label in dict.fromkeys(group.label for group in groups):
        same = [g for g in groups if g.label == label and g.members > 1 and not negligible(g)]
        same.sort(key=lambda group: group.members)
        if len(same) > 1:
            word = verdict(_change(same[0], same[-1], measure), measure.better)
            verdicts.setdefault(word, []).append(label)
            spans[label] = f"{same[0].members} to {same[-1].members} members"
    told = [
        f"{verb} for {joined(verdicts[word])}" for word, verb in _GROWTH.items() if word in verdicts
    ]
    if not told:
        return ""
    reach = joined(list(dict.fromkeys(spans.values())))
    return (
        f"From {reach}, with repulsion that is not negligible, {measure.title} {'; '.join(told)}."
    )


def _change(few: SeedGroup, many: SeedGroup, measure: Measure) -> Difference:
    before, after = few.values(measure), many.values(measure)
    seeds = [seed for seed in after if seed in before]
    if not seeds:
        return Difference(math.nan, math.nan, math.nan)
    return paired_difference([after[s] for s in seeds], [before[s] for s in seeds])
