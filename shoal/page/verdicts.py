"""What a comparison decides: margins, one family of tests, power before the runs, and the words."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.arguments import positive
from shoal.core.display.text import counted, joined, number
from shoal.core.errors import ConfigError
from shoal.page.measures import Measure, baseline, headlines, is_metric, paired_values
from shoal.page.report_data import SeedGroup
from shoal.prediction.statistics import (
    FEWEST,
    POWER,
    SIGNIFICANCE,
    Decision,
    Pairs,
    Verdict,
    decide,
    detectable,
    mean_and_error,
)

__all__ = [
    "MARGINS",
    "RELATIVE",
    "Family",
    "Power",
    "change",
    "comparison_sentence",
    "decide_groups",
    "family_sentences",
    "method_sentence",
    "method_sentences",
    "parse_margins",
    "planned_power",
]

MARGINS = {"nll": 0.01, "accuracy": 0.005, "ece": 0.005, "auroc": 0.01}
"""Differences that do not matter: NLL in nats, accuracy and ECE as shares (half a point)."""

RELATIVE = 0.02
"""The margin of every other measure, such as RMSE and CRPS: 2 % of the plain ensemble's value."""


def parse_margins(margins: str | Mapping[str, float] | None) -> dict[str, float]:
    """Margins by metric, from "nll=0.01,accuracy=0.005" or a table.

    >>> parse_margins("nll=0.02, auroc=0.005")
    {'nll': 0.02, 'auroc': 0.005}
    """
    if margins is None:
        return {}
    if isinstance(margins, str):
        return parse_margins(dict(map(_metric_and_number, margins.split(","))))
    if not isinstance(margins, Mapping):
        raise ConfigError(
            f"a margin is a table of metrics and numbers, such as {{'nll': 0.01}}, not {margins!r}"
        )
    for name in margins:
        if not is_metric(name):
            raise ConfigError(
                f"a margin belongs to a metric, such as nll, accuracy, ece, auroc, rmse or crps, "
                f"not to {name!r}"
            )
    return {name: positive(f"the margin of {name}", value) for name, value in margins.items()}


def _metric_and_number(word: str) -> tuple[str, float]:
    name, _, text = word.partition("=")
    try:
        return name.strip(), float(text)
    except ValueError:
        raise ConfigError(
            f"a margin is a metric and a number, such as nll=0.01, not {word!r}"
        ) from None


def _margin(measure: Measure, margins: Mapping[str, float], plain: Sequence[float]) -> float | None:
    """The margin of a measure; None where the plain value is 0, so that 2 % of it is nothing."""
    known = {**MARGINS, **margins}
    key = "auroc" if "auroc" in measure.key and measure.key not in known else measure.key
    return known.get(key, RELATIVE * abs(mean_and_error(plain)[0]) or None)


@dataclass(frozen=True, eq=False)
class Family:
    """The comparisons of a page, decided together.

    Attributes:
        groups: all groups of runs.
        measures: the headline measures that have a better direction.
        margins: margins that the user gave, by metric.
        decisions: of every method and ensemble size, against the plain ensemble.
    """

    groups: Sequence[SeedGroup]
    measures: Sequence[Measure]
    margins: Mapping[str, float]
    decisions: Mapping[tuple[SeedGroup, Measure], Decision]

    def __call__(self, group: SeedGroup, measure: Measure) -> Decision | None:
        """The decision; of a measure outside the family, that of its tests alone."""
        known = self.decisions.get((group, measure))
        if known is not None:
            return known
        plain = baseline(group, self.groups)
        pairs = None if plain is None else self.paired(group, plain, measure)
        return None if pairs is None else decide(measure.title, {0: pairs})[0]

    def paired(self, group: SeedGroup, other: SeedGroup, measure: Measure) -> Pairs | None:
        """The values of two groups over their shared seeds, with the margin of the measure."""
        return _pairs(measure, group, other, self.margins)

    def of_group(self, group: SeedGroup) -> dict[Measure, Decision]:
        """The decisions about one method and ensemble size."""
        return {m: found for (of, m), found in self.decisions.items() if of is group}

    @property
    def compared(self) -> list[SeedGroup]:
        """The groups that are compared with a plain ensemble."""
        return list(dict.fromkeys(group for group, _ in self.decisions))

    @property
    def primary(self) -> Measure | None:
        """NLL, or the first measure where there is no NLL."""
        measures = list(dict.fromkeys(measure for _, measure in self.decisions))
        return min(measures, key=lambda measure: measure != Measure("nll"), default=None)


def decide_groups(
    groups: Sequence[SeedGroup], margins: Mapping[str, float] | None = None
) -> Family:
    """Decide every method, ensemble size and headline measure against the plain ensemble."""
    margins = margins or {}
    measures = [m for m in headlines(groups) if m.better in ("lower", "higher")]
    pairs = {
        (group, measure): found
        for group in groups
        if (plain := baseline(group, groups)) is not None
        for measure in measures
        if (found := _pairs(measure, group, plain, margins)) is not None
    }
    return Family(groups, measures, margins, decide(_family_name(pairs), pairs))


def _pairs(
    measure: Measure, group: SeedGroup, other: SeedGroup, margins: Mapping[str, float]
) -> Pairs | None:
    pair = paired_values(measure, group, other)
    if pair is None:
        return None
    return Pairs(*pair, measure.better, _margin(measure, margins, pair[1]))


def _family_name(pairs: Iterable[tuple[SeedGroup, Measure]]) -> str:
    """The comparisons in words, such as "2 methods x 3 measures"."""
    chosen = list(pairs)
    methods = len({group for group, _ in chosen})
    several = len({group.members for group, _ in chosen}) > 1
    what = f"{methods} methods and sizes" if several else counted(methods, "method")
    measures = counted(len({measure for _, measure in chosen}), "measure")
    return f"{what} × {measures}"


def family_sentences(family: Family) -> str:
    """The family, the correction and the margins: what the verdicts mean."""
    if not family.decisions:
        return ""
    first = next(iter(family.decisions.values()))
    margins: dict[str, None] = {}
    for (_, measure), decision in family.decisions.items():
        if decision.margin is None:
            continue
        own = measure.key in family.margins or measure.key in MARGINS or "auroc" in measure.key
        text = _size(measure, decision.margin) if own else f"{100 * RELATIVE:g} % of plain"
        margins[f"{Measure(measure.key).title} {text}"] = None
    return (
        f"The family of tests: {first.family}, {counted(first.comparisons, 'comparison')}, by "
        f"Holm's correction. Measures: {joined([_name(m) for m in family.measures])}. "
        f"Margins: {joined(list(margins))}. "
        f"Equal means that the difference is shown to be smaller than the margin."
    )


def _name(measure: Measure) -> str:
    """The title within a list: "AUROC on letters", "accuracy (corrupted)"."""
    title, _, rest = measure.title.partition(", ")
    if not rest:
        return title
    return f"{title} on {rest}" if measure.split.startswith("ood:") else f"{title} ({rest})"


def _size(measure: Measure, value: float, error: float = math.nan) -> str:
    """A difference without its sign, with its unit."""
    scaled = abs(measure.scale * value)
    text = number(scaled, measure.scale * error) if error > 0 else f"{scaled:.3g}"
    return f"{text} {'points' if measure.share else measure.unit}".rstrip()


def _shown(measure: Measure, decision: Decision) -> str:
    """A difference with the digits that its interval allows, as "0.012 nats, within the margin"."""
    _, low, high = decision.difference
    size = _size(measure, decision.difference.difference, (high - low) / 4)
    return f"{size}, which is within the margin" if decision.within else size


def _would_decide(decision: Decision) -> str:
    needed = decision.needed
    return "" if needed is None else f"{needed:,} seeds would decide"


def method_sentence(name: str, decisions: Mapping[Measure, Decision]) -> str:
    """One sentence about a method: where it is better, equal, worse or not decided.

    >>> pairs = {Measure("nll"): Pairs([0.8, 0.7, 0.9], [0.9, 0.8, 1.001], "lower", 0.01)}
    >>> method_sentence("kde", decide("alone", pairs))
    'kde is better in NLL (by 0.1003 nats).'
    """
    pairs = max((decision.pairs for decision in decisions.values()), default=0)
    if pairs < FEWEST:
        return (
            f"{name} is not decided: {counted(pairs, 'seed')} of each method cannot decide, "
            f"{FEWEST} may."
        )
    words: dict[str, list[str]] = {}
    for verdict in (Verdict.BETTER, Verdict.EQUAL, Verdict.WORSE, Verdict.UNDECIDED):
        for measure, decision in decisions.items():
            if decision.verdict is verdict:
                head, detail = _method_words(measure, decision)
                text = f"{_name(measure)} ({detail})" if detail else _name(measure)
                words.setdefault(head, []).append(text)
    return f"{name} is {'; '.join(f'{head} in {joined(w)}' for head, w in words.items())}."


def method_sentences(family: Family) -> list[str]:
    """A sentence per method; sizes are named where there are several."""
    several = len({group.members for group in family.compared}) > 1
    names = {
        group: f"{group.label} ({counted(group.members, 'member')})" if several else group.label
        for group in family.compared
    }
    return [method_sentence(name, family.of_group(group)) for group, name in names.items()]


def _method_words(measure: Measure, decision: Decision) -> tuple[str, str]:
    """The verdict, and what stands in brackets after the measure."""
    if decision.verdict is Verdict.EQUAL:
        return "equal within the margin", ""
    if decision.verdict is not Verdict.UNDECIDED:
        return str(decision.verdict), f"by {_shown(measure, decision)}"
    safe = "not worse by the margin" if decision.not_worse else ""
    return str(Verdict.UNDECIDED), ", ".join(filter(None, (safe, _would_decide(decision))))


def comparison_sentence(measure: Measure, decisions: Mapping[str, Decision], plain: str) -> str:
    """How methods compare with the baseline in one measure.

    >>> pairs = {"f-kde": Pairs([0.8, 0.7, 0.9], [0.81, 0.712, 0.911], "lower", 0.001)}
    >>> comparison_sentence(Measure("nll"), decide("alone", pairs), "the plain ensemble")
    'Against the plain ensemble, f-kde lowers NLL by 0.0110 nats (3 seeds).'
    """
    pairs = max(decision.pairs for decision in decisions.values())
    if pairs < FEWEST:
        count = "One seed" if pairs == 1 else f"{pairs} seeds"
        return f"{count} cannot show whether methods differ in {measure.title}. {FEWEST} may."
    changed = (Verdict.BETTER, Verdict.WORSE, Verdict.DIFFERENT)
    parts = [
        f"{label} {change(measure, decision)}"
        for wanted in changed
        for label, decision in decisions.items()
        if decision.verdict is wanted
    ]
    equal = [label for label, found in decisions.items() if found.verdict is Verdict.EQUAL]
    rest = [f"{joined(equal)} {_are(equal)} equal within the margin"] if equal else []
    for label, decision in decisions.items():
        if decision.verdict is Verdict.UNDECIDED:
            more = _would_decide(decision)
            rest.append(f"{label} is not decided{f' ({more})' if more else ''}")
    about = "" if parts else f" in {measure.title}"
    sentence = "; ".join(filter(None, (joined(parts), *rest)))
    return f"Against {plain}{about}, {sentence} ({pairs} seeds)."


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def change(measure: Measure, decision: Decision) -> str:
    """A significant difference in words, such as "lowers NLL by 0.012 nats"."""
    verb = "lowers" if decision.difference.difference < 0 else "raises"
    return f"{verb} {measure.title} by {_shown(measure, decision)}"


@dataclass(frozen=True)
class Power:
    """The difference that a number of seeds finds with 80 % power, said before the runs.

    Attributes:
        seeds: number of seeds.
        deviations: smallest difference that one test finds, in standard deviations of the paired
            differences.
        comparisons: size of the family; None where no run has finished.
        found: by measure, the smallest difference that one test finds, and that the family finds.
        primary: the measure of the sentence, or None.
    """

    seeds: int
    deviations: float
    comparisons: int | None
    found: Mapping[Measure, tuple[float, float]]
    primary: Measure | None

    def __str__(self) -> str:
        if self.seeds < FEWEST:
            return f"{counted(self.seeds, 'seed')} cannot decide a comparison; {FEWEST} may."
        power = f"{100 * POWER:g} % power"
        if self.primary is None or self.primary not in self.found:
            return (
                f"{self.seeds} seeds find differences of {self.deviations:.2g} standard deviations "
                f"({power}, one test)."
            )
        alone, together = (_size(self.primary, size) for size in self.found[self.primary])
        among = f"; {together} among {self.comparisons} comparisons" if self._several else ""
        name = self.primary.title
        return f"{self.seeds} seeds find a difference in {name} of {alone} ({power}{among})."

    @property
    def _several(self) -> bool:
        return self.comparisons is not None and self.comparisons > 1

    @property
    def value(self) -> dict[str, Any]:
        """For programs."""
        found = {
            f"{measure.split}/{measure.key}": {"one_test": alone, "family": together}
            for measure, (alone, together) in self.found.items()
        }
        return {
            "seeds": self.seeds,
            "power": POWER,
            "standard_deviations": self.deviations if math.isfinite(self.deviations) else None,
            "comparisons": self.comparisons,
            "differences": found,
            "sentence": str(self),
        }


def planned_power(seeds: int, methods: int, finished: Family | None) -> Power | None:
    """What so many seeds will find, by the standard deviations of finished runs.

    Standard deviations are pooled over the methods with at least three pairs.

    Args:
        seeds: number of planned seeds.
        methods: number of planned methods and ensemble sizes that are compared; None for 0.
        finished: the decisions of finished runs, or None.
    """
    if methods == 0:
        return None
    pooled: dict[Measure, float] = {}
    for measure in finished.measures if finished else ():
        known = [d for (_, m), d in finished.decisions.items() if m == measure] if finished else []
        known = [d for d in known if d.pairs >= FEWEST and math.isfinite(d.stddev)]
        if known:
            squares = sum((d.pairs - 1) * d.stddev**2 for d in known)
            pooled[measure] = math.sqrt(squares / sum(d.pairs - 1 for d in known))
    comparisons = methods * len(pooled) or None
    alone = detectable(1.0, seeds)
    together = detectable(1.0, seeds, alpha=SIGNIFICANCE / (comparisons or 1))
    found = {m: (alone * stddev, together * stddev) for m, stddev in pooled.items()}
    primary = finished.primary if finished else None
    return Power(seeds, alone, comparisons, found, primary)
