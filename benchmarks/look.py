"""The look before training: its share of short runs.

    python benchmarks/look.py

Every run trains five members. The share is of the whole call of `fit`, which includes the look.
"""

import importlib
import time
from typing import Any

from common import say

import shoal
from shoal.models import MLP, Blueprint
from shoal.models import registry as models

RUNS = [
    ("toy-regression", MLP(), 200),
    ("digits", MLP(), 20),
    ("digits", models["small-cnn"](), 5),
    ({"name": "uci", "problem": "boston"}, MLP(), 40),
]


def main() -> None:
    """Print the seconds of the look and of the run, for each of RUNS."""
    module: Any = importlib.import_module("shoal.training.fit")
    look, spent = module.look, []

    def timed(*arguments: Any) -> list[str]:
        began = time.perf_counter()
        found = look(*arguments)
        spent.append(time.perf_counter() - began)
        return found

    module.look = timed
    for spec, network, epochs in RUNS:
        data = shoal.data.load(spec)
        build = Blueprint(network, data.input_shape, data.outputs)
        ensemble, began = shoal.Ensemble.init(build, 5), time.perf_counter()
        run = shoal.fit(ensemble, data, epochs=epochs, progress=False)
        total = time.perf_counter() - began
        share, name = spent[-1] / total, type(network).__name__
        say(f"{data.name} {name}: {1e3 * spent[-1]:.1f} ms of {total:.2f} s, {share:.2%}")
        say(f"    warnings: {', '.join(run.warnings) or 'none'}")


if __name__ == "__main__":
    main()
