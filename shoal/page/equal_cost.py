"""Comparisons at equal cost: each method against every plain arm with the same seconds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from shoal.core.display.text import counted, joined, number, plus_minus, seconds, table
from shoal.experiment.equal_cost import Arm, CostPlan
from shoal.page.measures import Measure, paired_values
from shoal.page.report_data import RunRecord, SeedGroup
from shoal.page.verdicts import MARGINS
from shoal.prediction.statistics import FEWEST, Decision, Pairs, Verdict, decide

__all__ = ["FAR", "EqualCost", "name_of"]

FAR = 0.1
"""Seconds that differ more, relatively, from the planned ones are said."""


def name_of(arm: Arm) -> str:
    """An arm in words.

    >>> name_of(Arm("ensemble+batches=own+members=7", "members", 7, 600, 60.0, 3.0))
    'more members, own batches'
    """
    words = dict(pair.split("=") for pair in arm.label.partition(":")[0].split("+")[1:])
    own = ", own batches" if words.get("batches") == "own" else ""
    known = {
        "reference": "plain ensemble, less time",
        "members": f"more members{own}",
        "longer": f"longer training{own}",
        "tuned": "tuned",
        "placebo": f"placebo of {_short(arm.of)}",
    }
    return known.get(arm.kind, _short(arm.label))


def _short(label: str) -> str:
    """A method without its length."""
    word, colon, strength = label.partition(":")
    kept = [part for part in word.split("+") if not part.startswith(("epochs=", "steps="))]
    return "+".join(kept) + colon + strength


class Cell(NamedTuple):
    """Text of a cell, its sort key, and the verdict that it shows."""

    text: str
    value: Any
    verdict: Verdict | None = None


@dataclass(frozen=True, eq=False)
class EqualCost:
    """The arms of a plan and what their runs decide.

    Attributes:
        plan: the plan.
        runs: completed runs by arm.
        measure: what is compared.
        margin: difference that does not matter.
    """

    plan: CostPlan
    runs: Mapping[Arm, SeedGroup]
    measure: Measure = Measure("nll")
    margin: float = MARGINS["nll"]

    @classmethod
    def of(
        cls, plan: CostPlan, records: Iterable[RunRecord], margin: float = MARGINS["nll"]
    ) -> "EqualCost":
        """The completed runs of a plan."""
        known = list(records)
        runs = {arm: [r for r in known if arm.matches(r.name)] for arm in plan.arms}
        groups = {arm: SeedGroup(arm.label, entries) for arm, entries in runs.items() if entries}
        return cls(plan, groups, margin=margin)

    def kind(self, *kinds: str) -> list[Arm]:
        """The arms of some kinds that have runs."""
        return [arm for arm in self.runs if arm.kind in kinds]

    @property
    def methods(self) -> list[Arm]:
        """The repulsive methods."""
        return self.kind("method")

    @property
    def plains(self) -> list[Arm]:
        """The plain arms of equal cost."""
        return [arm for arm in self.runs if arm.plain]

    @cached_property
    def decisions(self) -> dict[tuple[Arm, Arm], Decision]:
        """Every method against every plain arm of equal cost, decided as one family."""
        pairs = {(m, p): self._pairs(m, p) for m in self.methods for p in self.plains}
        found = {key: pair for key, pair in pairs.items() if pair is not None}
        methods, plains = counted(len(self.methods), "method"), counted(len(self.plains), "arm")
        return decide(f"{methods} × {plains} of equal cost", found)

    @cached_property
    def placebos(self) -> dict[Arm, Decision]:
        """Every method against its placebo, decided as one family."""
        of = {arm.of: arm for arm in self.kind("placebo")}
        pairs = {m: self._pairs(m, of[m.label]) for m in self.methods if m.label in of}
        found = {key: pair for key, pair in pairs.items() if pair is not None}
        return decide(counted(len(found), "placebo"), found)

    def _pairs(self, one: Arm, other: Arm) -> Pairs | None:
        values = paired_values(self.measure, self.runs[one], self.runs[other])
        return None if values is None else Pairs(*values, self.measure.better, self.margin)

    def seconds(self, arm: Arm) -> float:
        """Mean seconds of the trainings of an arm."""
        spent = [record.provenance.get("seconds", math.nan) for record in self.runs[arm].entries]
        return sum(spent) / len(spent)

    @property
    def sentences(self) -> list[str]:
        """The answer about each method, about placebos, and about seconds that differ."""
        return [*self.answers, *self.against_placebos, *self.far]

    @property
    def answers(self) -> list[str]:
        """A sentence about each method and the plain arms."""
        return [self.answer(method) for method in self.methods]

    @property
    def against_placebos(self) -> list[str]:
        """A sentence about each method and its placebo."""
        return [self._placebo(method) for method in self.placebos]

    def answer(self, method: Arm) -> str:
        """Better than every plain arm of equal cost, equal, worse than some, or not decided."""
        found = {plain: d for (m, plain), d in self.decisions.items() if m is method}
        name, metric = name_of(method), self.measure.title
        if not found:
            return f"{name} has no plain arm of equal cost to be compared with."
        pairs = max(decision.pairs for decision in found.values())
        if pairs < FEWEST:
            return f"{name} is not decided at equal cost: {counted(pairs, 'seed')} cannot decide."
        by: dict[Verdict, list[str]] = {word: [] for word in Verdict}
        for plain, decision in found.items():
            by[decision.verdict].append(f"'{name_of(plain)}'")
        if len(by[Verdict.BETTER]) == len(found):
            near = [f"'{name_of(arm)}'" for arm, decision in found.items() if decision.within]
            less = f"; the lead over {joined(near)} is within the margin" if near else ""
            arms = "every plain arm of equal cost"
            return f"{name} is better in {metric} than {arms} ({pairs} seeds{less})."
        if worse := by[Verdict.WORSE]:
            strongest = max(found, key=lambda arm: found[arm].difference.difference)
            arms = "every plain arm" if len(worse) == len(found) else joined(worse)
            most = f", by {self._by(found[strongest])}"
            most += f" for '{name_of(strongest)}'" if len(worse) > 1 else ""
            return f"{name} is worse in {metric} than {arms} at equal cost{most} ({pairs} seeds)."
        if undecided := by[Verdict.UNDECIDED]:
            needed = [d.needed for d in found.values() if d.verdict is Verdict.UNDECIDED]
            known = [count for count in needed if count is not None]
            more = f"; about {max(known):,} would decide" if len(known) == len(needed) else ""
            against = f"against {joined(undecided)} at equal cost"
            return f"{name} is not decided in {metric} {against} ({pairs} seeds{more})."
        return (
            f"{name} is equal in {metric} to {joined(by[Verdict.EQUAL])} at equal cost, within the "
            f"margin of {self.margin:g} {self.measure.unit} ({pairs} seeds)."
        )

    def _by(self, decision: Decision) -> str:
        difference, low, high = decision.difference
        return f"{number(abs(difference), (high - low) / 4)} {self.measure.unit}".rstrip()

    def _placebo(self, method: Arm) -> str:
        decision, name = self.placebos[method], name_of(method)
        if decision.pairs < FEWEST:
            return f"{name} against its placebo is not decided: {FEWEST} seeds may decide."
        words = {
            Verdict.BETTER: "is better than its placebo: the direction of the push counts",
            Verdict.WORSE: "is worse than its placebo, a random push of equal norm",
            Verdict.EQUAL: "equals its placebo within the margin: a random push does the same",
        }
        needed = decision.needed
        more = "" if needed is None else f"; about {needed:,} seeds would decide"
        undecided = f"is not decided against its placebo{more}"
        return f"{name} {words.get(decision.verdict, undecided)} ({decision.pairs} seeds)."

    @property
    def far(self) -> list[str]:
        """A sentence where measured seconds differ from the plan by more than a tenth."""
        arms = [arm for arm in self.runs if arm.seconds > 0]
        off = [arm for arm in arms if abs(self.seconds(arm) / arm.seconds - 1) > FAR]
        if not off:
            return []
        most = max(off, key=lambda arm: abs(math.log(self.seconds(arm) / arm.seconds)))
        times = f"{seconds(self.seconds(most))} instead of {seconds(most.seconds)}"
        return [
            f"Measured seconds of {counted(len(off), 'arm')} differ from the plan by more than "
            f"{100 * FAR:g} %, most those of '{name_of(most)}' ({times})."
        ]

    @property
    def tuned(self) -> list[str]:
        """What was chosen for the tuned arm."""
        return [
            f"The tuned arm is `{arm.label}`, chosen on held-out training data by "
            f"{counted(len(self.plan.tuning), 'trial')}."
            for arm in self.kind("tuned")
        ]

    @property
    def arms(self) -> tuple[list[str], list[list[Cell]]]:
        """Header and rows of all arms."""
        header = ["arm", "members", "epochs", "seconds (planned)", self.measure.title]
        return header, [self._row(arm) for arm in self.runs]

    def _row(self, arm: Arm) -> list[Cell]:
        mean, error = self.measure.summary(self.runs[arm])
        spent = self.seconds(arm)
        return [
            Cell(name_of(arm), name_of(arm)),
            Cell(str(arm.members), arm.members),
            Cell(f"{arm.epochs:.3g}" if arm.epochs < 100 else f"{arm.epochs:.0f}", arm.epochs),
            Cell(f"{seconds(spent)} ({seconds(arm.seconds)})", spent),
            Cell(plus_minus(mean, error), mean),
        ]

    @property
    def differences(self) -> tuple[list[str], list[list[Cell]]]:
        """Header and rows of the differences of every method to plain arms and its placebo."""
        header = [f"{self.measure.title} of the method minus that of", *map(name_of, self.methods)]
        others = [*self.plains, *self.kind("placebo")]
        return header, [
            [Cell(name_of(arm), name_of(arm)), *(self._difference(m, arm) for m in self.methods)]
            for arm in others
        ]

    def _difference(self, method: Arm, arm: Arm) -> Cell:
        decision = self.decisions.get((method, arm))
        if arm.of == method.label:
            decision = self.placebos.get(method)
        if decision is None or not all(map(math.isfinite, decision.difference)):
            return Cell("–", "")
        middle, low, high = decision.difference
        width = (high - low) / 4
        text = f"{number(middle, width)} [{number(low, width)}, {number(high, width)}]"
        return Cell(f"{text} {decision.verdict}", middle, decision.verdict)

    @property
    def reading(self) -> str:
        """How to read the differences."""
        family = next((decision.family for decision in self.decisions.values()), "")
        return (
            f"Differences are paired by seed, with 95 % intervals. Verdicts have Holm's correction "
            f"over a family: {family}. The margin is {self.margin:g} {self.measure.unit}."
        )

    def __str__(self) -> str:
        tables = [
            table([[cell.text for cell in row] for row in rows], header)
            for header, rows in (self.arms, self.differences)
        ]
        return "\n\n".join(["\n".join([*self.sentences, *self.tuned]), *tables, self.reading])

    @property
    def value(self) -> dict[str, Any]:
        """For programs."""
        arms = [
            {
                "arm": name_of(arm),
                "label": arm.label,
                "kind": arm.kind,
                "members": arm.members,
                "epochs": arm.epochs,
                "planned_seconds": arm.seconds,
                "seconds": self.seconds(arm),
                "mean": self.measure.summary(group)[0],
                "error": self.measure.summary(group)[1],
            }
            for arm, group in self.runs.items()
        ]
        differences = [
            {"method": m.label, "arm": p.label, **d.difference._asdict(),
             "verdict": str(d.verdict), "needed": d.needed}
            for (m, p), d in self.decisions.items()
        ]  # fmt: skip
        return {
            "sentences": self.sentences,
            "dearest": self.plan.dearest,
            "arms": arms,
            "differences": differences,
        }
