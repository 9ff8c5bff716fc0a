"""Growing beside training all at once: python benchmarks/grow.py [-o docs/results/grow/digits.json]

Ten members on the digits, at equal cost: each way shows every member the data as often, so that the
ten together are trained for the same number of member-epochs. *At once* trains ten members
together. *Grown* trains five, freezes them and grows five more that the first push away. *Apart*
trains five and five that know nothing of each other, and joins them: what growing has to beat.
"""

import time
from typing import Any

import torch
from common import finish, options, parser, say, title

import shoal
from shoal.app.markdown import markdown_table
from shoal.app.words import plus_minus
from shoal.data.dataset import Dataset
from shoal.inference.ensemble import Ensemble
from shoal.models import MLP, Blueprint
from shoal.prediction import Predictive, mean_and_error, paired_difference
from shoal.training.run import Run

METHODS = {"kde:300": ("kde", 300.0), "f-kde:100": ("f-kde", 100.0)}
"""The strengths of the demo, at which repulsion is felt."""

SIZE, HALF = 10, 5
MEASURES = ("accuracy", "nll", "ece", "effective_functions", "auroc_mutual_information")


def train(data: Dataset, ensemble: Ensemble, name: str, epochs: int, seed: int) -> Run:
    """One run of the experiment `digits`."""
    method, strength = METHODS[name]
    settings = {"method": method, "strength": strength, "epochs": epochs, "seed": seed}
    return shoal.fit(ensemble, data, **settings, lr=1e-3, progress=False)


def ways(data: Dataset, name: str, epochs: int, seed: int) -> dict[str, tuple[Any, float]]:
    """What each way predicts with, and its wall time."""
    build = Blueprint(MLP((100, 100)), data.input_shape, data.outputs)
    started = time.perf_counter()
    whole = train(data, Ensemble.init(build, SIZE, seed), name, epochs, seed)
    at_once = time.perf_counter() - started
    started = time.perf_counter()
    first = train(data, Ensemble.init(build, HALF, seed), name, epochs, seed)
    half = time.perf_counter() - started
    grown = shoal.grow(first, SIZE - HALF, data=data, progress=False)
    grown_time = time.perf_counter() - started
    fresh = Ensemble.init(build, SIZE, seed).part(HALF, SIZE)
    second = train(data, fresh, name, epochs, seed)
    apart = [first, second]
    return {"at once": (whole, at_once), "grown": (grown, grown_time), "apart": (apart, 2 * half)}


def judged(source: Any, data: Dataset) -> dict[str, float]:
    """Scores on the test data, and how photographs are told from digits."""
    assert data.test is not None and data.test.y is not None
    test, foreign = (_predicted(source, x) for x in (data.test.x, data.ood["photographs"].x))
    scores = shoal.evaluate(test, data.test.y)
    told = shoal.metrics.registry["auroc_mutual_information"](test, foreign)
    return {**scores, "auroc_mutual_information": told}


def _predicted(source: Any, x: torch.Tensor) -> Predictive:
    if not isinstance(source, list):
        return shoal.predict(source, x)
    parts = [shoal.predict(run, x) for run in source]
    return Predictive(torch.cat([part.members for part in parts]), parts[0].likelihood)


def measure(seeds: int, epochs: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Every number of every method, way and seed."""
    data, found = shoal.data.load("digits"), {}
    for name in METHODS:
        for seed in range(seeds):
            for way, (source, seconds) in ways(data, name, epochs, seed).items():
                scores = judged(source, data) | {"seconds": seconds}
                kept = found.setdefault(name, {}).setdefault(way, {})
                for key in (*MEASURES, "seconds"):
                    kept.setdefault(key, []).append(scores[key])
            say(f"{name}, seed {seed}")
    return found


def text(found: dict[str, dict[str, dict[str, list[float]]]]) -> str:
    """A table in Markdown, and growing less the others, paired by seed."""
    rows = [
        [name, way, *(plus_minus(*mean_and_error(kept[key])) for key in MEASURES)]
        for name, per_way in found.items()
        for way, kept in per_way.items()
    ]
    lines = [markdown_table(["method", "way", *MEASURES], rows), ""]
    for name, per_way in found.items():
        for other in ("at once", "apart"):
            pairs = ((key, per_way["grown"][key], per_way[other][key]) for key in MEASURES)
            gaps = [f"{key} {_gap(mine, theirs)}" for key, mine, theirs in pairs]
            lines.append(f"- {name}, grown less {other}: " + ", ".join(gaps))
    return "\n".join(lines)


def _gap(mine: list[float], theirs: list[float]) -> str:
    gap = paired_difference(mine, theirs)
    return f"{gap.difference:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})"


def main() -> None:
    """Measure, print, keep."""
    made = parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=5, help="(5)")
    made.add_argument("--epochs", type=int, default=60, help="of every member (60)")
    found = options(made)
    seeds, epochs = (2, 3) if found.quick else (found.seeds, found.epochs)
    values = measure(seeds, epochs)
    about = {"seeds": seeds, "epochs": epochs, "results": values}
    finish(title(found.device) | about, text(values), found.out)


if __name__ == "__main__":
    main()
