"""The released update of repulsive ensembles and ours, timed in one process, in turns.

    python benchmarks/published.py --device cpu -o docs/benchmarks/published-cpu.json

First both take a few steps in float64, from the same weights on the same batches, to show that they
agree. Then they are timed with Adam in float32.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import finish, options, parser, say, title
from literal import Published
from torch import Tensor

from shoal.core.display.text import table
from shoal.experiment.bench.battery import Case, Contestant, Row, forever, measure, trainer
from shoal.experiment.bench.measure import Timing, Work
from shoal.experiment.bench.networks import perceptron
from shoal.inference.ensemble import Ensemble
from shoal.inference.priors import Gaussian
from shoal.interaction.methods import get

METHODS = ("kde", "f-kde")
CHECKED = 5
BATCHES = 468


def main() -> None:
    """Check, time and print."""
    made = parser("The released update of repulsive ensembles and ours.")
    made.add_argument("--members", type=int, default=20)
    made.add_argument("--batch-size", type=int, default=128)
    made.add_argument("--seconds", type=float, help="seconds per line (10; quick: 0.2)")
    found = options(made)
    batches = 8 if found.quick else BATCHES
    case = Case(
        perceptron(), found.members, found.batch_size, "float32", "adam", found.device,
        batches * found.batch_size,
    )  # fmt: skip
    value = title(found.device)
    value["difference"] = {method: difference(case, method) for method in METHODS}
    seconds = found.seconds or (0.2 if found.quick else 10.0)
    rows = [row for method in METHODS for row in compared(case, method, seconds)]
    value["steps"] = rows
    finish(value, as_text(value), found.out)


@dataclass(frozen=True)
class Literal:
    """A released update, as a workload of the benchmark."""

    case: Case
    method: str
    what: str = "published"

    @property
    def label(self) -> str:
        """The name in tables."""
        return f"{self.method}, released update"

    def build(self, stack: ExitStack) -> Work:
        """Steps over the same batches as ours."""
        ensemble = self.case.make()
        published = literal(self.case, ensemble, torch.optim.Adam, self.case.lr)
        shown = forever(self.case.source())

        def steps(count: int) -> None:
            for _ in range(count):
                published.step(self.method, *next(shown))

        return steps

    def row(self) -> Row:
        """The columns that are known before the first step."""
        row = Contestant(self.case, self.what, self.method, None).row()
        return row | {"label": self.label}


def compared(case: Case, method: str, seconds: float) -> list[Row]:
    """The released update, ours as published, and ours corrected, with speed-ups."""
    entries = [
        Literal(case, method),
        Contestant(case, "shoal", method, "auto", legacy=True),
        Contestant(case, "shoal", method, "auto"),
    ]
    rows = measure(entries, seconds, say)
    theirs = Timing(rows[0]["rounds_ms"], rows[0]["steps_a_round"])
    for row, entry in zip(rows, entries, strict=True):
        row["label"] = entry.label
        if "ms" in row:
            row["times_faster_than_published"] = theirs.over(
                Timing(row["rounds_ms"], row["steps_a_round"])
            )
    return rows


def difference(case: Case, method: str) -> float:
    """Largest difference of a weight after a few steps in float64, relative to the largest weight.

    Shoal's velocity is the released direction divided by N, so its learning rate is N times that of
    plain gradient steps. Draws of a functional prior would differ, so in function space neither has
    a prior.
    """
    exact = replace(case, precision="float64", optimizer="sgd", lr=0.1)
    ensemble = exact.make()
    published = literal(exact, ensemble, torch.optim.SGD, exact.lr / exact.points)
    published.functional_prior = False
    shown = forever(exact.source())
    for _ in range(CHECKED):
        published.step(method, *next(shown))
    ours = replace(get(method, legacy=True), functional_prior=False)
    prior = Gaussian(1.0 if method == "kde" else 1e9)
    for _ in trainer(exact, ensemble, ours, "auto+eager", CHECKED, prior=prior).run():
        pass
    theirs = published.W.detach()
    return float((flat(ensemble) - theirs).abs().max() / theirs.abs().max())


def literal(
    case: Case, ensemble: Ensemble, optimizer: type[torch.optim.Optimizer], lr: float
) -> Published:
    """The released update of the ensemble's members."""
    layers = case.network.layers
    assert layers is not None
    return Published(flat(ensemble), layers, case.points, optimizer, lr)


def flat(ensemble: Ensemble) -> Tensor:
    """Weights [M, d]."""
    return torch.cat([w.detach().flatten(1) for w in ensemble.weights.values()], 1)


def as_text(value: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        [row["label"], f"{row['ms']:.4g}", f"{100 * row['spread']:.0f} %",
         f"{row['times_faster_than_published']:.3g}"]
        for row in value["steps"] if "ms" in row
    ]  # fmt: skip
    failed = [f"{row['label']}: {row['error']}" for row in value["steps"] if "error" in row]
    same = ", ".join(f"{method} {worst:.1e}" for method, worst in value["difference"].items())
    header = ["", "ms per step", "±", "times faster"]
    agree = f"Largest difference after {CHECKED} steps in float64: {same}"
    return "\n".join([agree, table(lines, header), *failed])


if __name__ == "__main__":
    main()
