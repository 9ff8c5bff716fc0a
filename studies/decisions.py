"""Coverage of every rule of `shoal.decisions` in simulated repetitions; writes README.md.

python -m studies.decisions [--repetitions 1000]
"""

import argparse
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shoal import Predictive, ShoalWarning, decisions
from shoal.inference.likelihoods import Categorical, HeteroscedasticGaussian
from shoal.prediction.decisions.selection import GRID
from shoal.prediction.mixture import chosen_rows
from studies import RESULTS

VALIDATION = 100
MEMBERS, CLASSES = 3, 8
POPULATION = 20_000
ERROR, CONFIDENCE, RATE, LEVEL = 0.1, 0.9, 0.1, 0.9


class Row(NamedTuple):
    """One rule: how often its promise held, and what was promised."""

    rule: str
    promise: str
    target: float
    held: int
    repetitions: int
    bounded_above: bool
    size: str

    @property
    def interval(self) -> tuple[float, float]:
        """99.9 % Clopper-Pearson interval of the probability that the promise holds."""
        return decisions.clopper_pearson(self.held, self.repetitions, 0.999)

    @property
    def kept(self) -> bool:
        """Whether the promise is compatible with the repetitions, on both sides if it is exact."""
        low, high = self.interval
        slack = 1 / (VALIDATION + 1)
        return high >= self.target and (not self.bounded_above or low <= self.target + slack)


def class_points(n: int, seed: int) -> tuple[Predictive, torch.Tensor]:
    """Overconfident predictions; labels from the probabilities of another temperature."""
    random = torch.Generator().manual_seed(seed)
    logits = 5.0 * torch.randn(1, n, CLASSES, generator=random)
    logits = logits + 0.5 * torch.randn(MEMBERS, n, CLASSES, generator=random)
    truth = Predictive(logits / 1.5, Categorical()).probs
    y = torch.multinomial(truth, 1, generator=random).squeeze(1)
    return Predictive(logits, Categorical()), y


@dataclass(frozen=True, eq=False, repr=False)
class WithInterval(Predictive):
    """A prediction whose interval is computed once for all repetitions."""

    ends: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __getitem__(self, index):
        chosen = super().__getitem__(index)
        ends = self.ends[chosen_rows(index, len(self))]
        return WithInterval(chosen.members, chosen.likelihood, chosen.weights, ends=ends)

    def interval(self, level=LEVEL):
        return self.ends[:, :1], self.ends[:, 1:]


def number_points(n: int, seed: int) -> tuple[Predictive, torch.Tensor]:
    """Predictions whose standard deviation is wrong by a factor that depends on the input."""
    random = torch.Generator().manual_seed(seed)
    outputs = torch.randn(MEMBERS, n, 2, generator=random)
    noise = 0.5 + 2 * torch.rand(n, generator=random)
    y = outputs[..., 0].mean(0) + noise * torch.randn(n, generator=random)
    pred = Predictive(outputs, HeteroscedasticGaussian())
    ends = torch.cat(pred.interval(LEVEL), -1)
    return WithInterval(outputs, pred.likelihood, ends=ends), y


def conformal_rows(repetitions: int) -> list[Row]:
    """Does the set or interval of one new point contain its target?"""
    count = repetitions * (VALIDATION + 1)
    labels, numbers = class_points(count, 1), number_points(count, 2)
    rows = []
    for name, how in {
        "LAC sets": {"score": "lac"},
        "APS sets": {"score": "aps"},
        "APS sets, randomised": {"score": "aps", "randomised": True},
        "RAPS sets": {"score": "raps", "free_ranks": 2, "penalty": 0.05},
        "RAPS sets, randomised": {
            "score": "raps",
            "free_ranks": 2,
            "penalty": 0.05,
            "randomised": True,
        },
    }.items():
        held, sizes = 0, []
        for i, (val, y, new, label) in enumerate(_parts(*labels, repetitions)):
            rule = decisions.conformal_sets(val, y, LEVEL, allow_empty=True, seed=2 * i, **how)
            inside = rule(new, seed=2 * i + 1)[0]
            held += bool(inside[label])
            sizes.append(int(inside.sum()))
        exact = name == "LAC sets" or "randomised" in how
        size = f"{sum(sizes) / len(sizes):.2f} classes"
        rows.append(Row(name, "contains the class", LEVEL, held, repetitions, exact, size))
    for score in ("absolute", "scaled", "cqr"):
        held, widths = 0, []
        for val, y, new, target in _parts(*numbers, repetitions):
            rule = decisions.conformal_intervals(val, y, LEVEL, score=score)
            low, high = (float(end) for end in rule(new))
            held += low <= float(target) <= high
            widths.append(high - low)
        name = f"{'CQR' if score == 'cqr' else score} intervals"
        size = f"width {sum(widths) / len(widths):.2f}"
        rows.append(Row(name, "contains the target", LEVEL, held, repetitions, True, size))
    return rows


def alarm_rows(repetitions: int) -> list[Row]:
    """Does a new point stay quiet; does the rate hold for a threshold?"""
    pred, y = class_points(repetitions * (VALIDATION + 1), 3)
    population = class_points(POPULATION, 4)[0].entropy().double().sort().values
    quiet = holds = inside = 0
    for val, _, new, _ in _parts(pred, y, repetitions):
        alarm = decisions.ood_alarm(val, RATE)
        quiet += not bool(alarm(new))
        inside += alarm.low <= _rate(population, alarm.threshold) <= alarm.high
        strict = decisions.ood_alarm(val, RATE, confidence=CONFIDENCE)
        holds += _rate(population, strict.threshold) <= RATE
    return [
        Row("OOD alarm", "no false alarm", 1 - RATE, quiet, repetitions, True, ""),
        Row("OOD alarm", "rate in its 95 % interval", 0.95, inside, repetitions, True, ""),
        Row(
            f"OOD alarm, confidence {CONFIDENCE}",
            f"rate at most {RATE}",
            CONFIDENCE,
            holds,
            repetitions,
            False,
            "",
        ),
    ]


def _rate(population: torch.Tensor, threshold: float) -> float:
    wanted = torch.tensor(threshold, dtype=torch.float64)
    return 1 - float(torch.searchsorted(population, wanted, right=True)) / len(population)


def selective_rows(repetitions: int, validation: int = 400) -> list[Row]:
    """Is the error rate of answers, known from a large population, at most the wished one?"""
    pred, y = class_points(repetitions * (validation + 1), 5)
    large, truth = class_points(POPULATION, 6)
    wrong = (large.labels() != truth).double()
    sure = large.confidence().double()
    errors = [float(wrong[sure >= t].mean()) for t in GRID]
    known = dict(zip(GRID.tolist(), errors, strict=True))
    held, answered = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShoalWarning)
        for val, labels, _, _ in _parts(pred, y, repetitions, validation):
            rule = decisions.selective(val, labels, ERROR, confidence=CONFIDENCE)
            held += known.get(rule.threshold, 0.0) <= ERROR
            answered.append(float((sure >= rule.threshold).double().mean()))
    best = max(
        (float((sure >= t).double().mean()) for t, e in known.items() if e <= ERROR), default=0.0
    )
    size = f"answers {sum(answered) / len(answered):.1%} (possible: {best:.1%})"
    promise = f"error of answers at most {ERROR}"
    return [Row("selective", promise, CONFIDENCE, held, repetitions, False, size)]


def _parts(pred, y, repetitions, validation=VALIDATION):
    """Validation data and one new point of every repetition."""
    for i in range(repetitions):
        start = i * (validation + 1)
        rows, new = slice(start, start + validation), start + validation
        yield pred[rows], y[rows], pred[new], y[new]


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| rule | promise | promised | held | 99.9 % interval | size |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        low, high = row.interval
        least = "at least " if not row.bounded_above else ""
        lines.append(
            f"| {row.rule} | {row.promise} | {least}{row.target:.2f} | "
            f"{row.held / row.repetitions:.3f} | {low:.3f} to {high:.3f} | {row.size} |"
        )
    return "\n".join(lines)


TEXT = """# Do the guarantees of decisions hold?

`python -m studies.decisions` writes this page. Each of {repetitions} repetitions draws
new validation data and a new data point, fits a rule of `shoal.decisions` and checks its promise.
The predictions are wrong on purpose: overconfident classes, wrong standard deviations. Conformal
rules and alarms have {validation} validation points, selective prediction has 400. The error rate
of a threshold is measured on {population:,} further points. All rules for sets see the same data.

{table}

{verdict} A conformal promise of 0.90 holds with probability 91 / 101, since the rank is whole.
Ties can only raise it. A test of an error rate is cautious: it holds more often than promised, and
answers less than would be possible.
"""


def main() -> None:
    """Simulate, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=1000)
    n = parser.parse_args().repetitions
    rows = conformal_rows(n) + alarm_rows(n) + selective_rows(n)
    kept = sum(row.kept for row in rows)
    text = TEXT.format(
        repetitions=n,
        validation=VALIDATION,
        population=POPULATION,
        table=table(rows),
        verdict=f"{kept} of {len(rows)} promises are compatible with their interval.",
    )
    (RESULTS / "decisions/README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
