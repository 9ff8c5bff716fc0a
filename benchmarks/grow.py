"""Growing or training at once: python benchmarks/grow.py [-o docs/results/grow/digits.json]

Ten members on the digits, by three procedures. Every member gets the same number of epochs. *At
once* trains ten members together. *Grown* trains five and freezes them; they repel five new ones.
*Separate* trains two ensembles of five independently and joins them. Growing should beat this.
"""

import time
from typing import Any

import torch
from common import finish, options, parser, say, title

import shoal
from shoal.core.display.text import markdown_table, plus_minus
from shoal.data.dataset import Dataset
from shoal.inference.ensemble import Ensemble
from shoal.models import MLP, Blueprint
from shoal.prediction import Predictive, mean_and_error, paired_difference
from shoal.training.folder.run import Run

METHODS = {"kde:300": ("kde", 300.0), "f-kde:100": ("f-kde", 100.0)}
"""The strengths of the demo, at which repulsion has an effect."""

SIZE, HALF = 10, 5
MEASURES = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ece": "ECE",
    "effective_functions": "effective number of functions",
    "auroc_mutual_information": "AUROC by mutual information",
}
"""Each metric and its heading."""


def train(data: Dataset, ensemble: Ensemble, name: str, epochs: int, seed: int) -> Run:
    """One run of the experiment `digits`."""
    method, strength = METHODS[name]
    settings = {"method": method, "strength": strength, "epochs": epochs, "seed": seed}
    return shoal.fit(ensemble, data, **settings, lr=1e-3, progress=False)


def procedures(data: Dataset, name: str, epochs: int, seed: int) -> dict[str, tuple[Any, float]]:
    """The run or runs of each procedure, and its wall time."""
    build = Blueprint(MLP((100, 100)), data.input_shape, data.outputs)
    started = time.perf_counter()
    whole = train(data, Ensemble.init(build, SIZE, seed), name, epochs, seed)
    at_once = time.perf_counter() - started
    started = time.perf_counter()
    first = train(data, Ensemble.init(build, HALF, seed), name, epochs, seed)
    half = time.perf_counter() - started
    grown = shoal.grow(first, SIZE - HALF, data=data, progress=False)
    grown_time = time.perf_counter() - started
    fresh = Ensemble.init(build, SIZE, seed).slice_members(HALF, SIZE)
    second = train(data, fresh, name, epochs, seed)
    return {
        "at once": (whole, at_once),
        "grown": (grown, grown_time),
        "separate": ([first, second], 2 * half),
    }


def evaluated(source: Any, data: Dataset) -> dict[str, float]:
    """Scores on the test set, and OOD detection of photographs."""
    assert data.test is not None and data.test.y is not None
    test, ood = (_predicted(source, x) for x in (data.test.x, data.ood["photographs"].x))
    scores = shoal.evaluate(test, data.test.y)
    auroc = shoal.metrics.registry["auroc_mutual_information"](test, ood)
    return {**scores, "auroc_mutual_information": auroc}


def _predicted(source: Any, x: torch.Tensor) -> Predictive:
    if not isinstance(source, list):
        return shoal.predict(source, x)
    each = [shoal.predict(run, x) for run in source]
    return Predictive(torch.cat([pred.members for pred in each]), each[0].likelihood)


def measure(seeds: int, epochs: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Every number of every method, procedure and seed."""
    data, found = shoal.data.load("digits"), {}
    for name in METHODS:
        for seed in range(seeds):
            for procedure, (source, seconds) in procedures(data, name, epochs, seed).items():
                scores = evaluated(source, data) | {"seconds": seconds}
                kept = found.setdefault(name, {}).setdefault(procedure, {})
                for key in (*MEASURES, "seconds"):
                    kept.setdefault(key, []).append(scores[key])
            say(f"{name}, seed {seed}")
    return found


def text(found: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """A Markdown table, and the differences of growing from the others, paired by seed."""
    rows = [
        [name, procedure, *(plus_minus(*mean_and_error(kept[key])) for key in MEASURES)]
        for name, kept_by in found.items()
        for procedure, kept in kept_by.items()
    ]
    lines = [markdown_table(["method", "procedure", *MEASURES.values()], rows), ""]
    for name, kept_by in found.items():
        for other in ("at once", "separate"):
            pairs = (
                (word, kept_by["grown"][key], kept_by[other][key]) for key, word in MEASURES.items()
            )
            gaps = [f"{word} {_gap(mine, theirs)}" for word, mine, theirs in pairs]
            lines.append(f"- {name}, grown - {other}: " + ", ".join(gaps))
    return "\n".join(lines)


def _gap(mine: list[float], theirs: list[float]) -> str:
    gap = paired_difference(mine, theirs)
    return f"{gap.difference:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"


def main() -> None:
    """Measure, print and write."""
    made = parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=5, help="(5)")
    made.add_argument("--epochs", type=int, default=60, help="epochs per member (60)")
    found = options(made)
    seeds, epochs = (2, 3) if found.quick else (found.seeds, found.epochs)
    values = measure(seeds, epochs)
    about = {"seeds": seeds, "epochs": epochs, "results": values}
    finish(title(found.device) | about, text(values), found.out)


if __name__ == "__main__":
    main()
