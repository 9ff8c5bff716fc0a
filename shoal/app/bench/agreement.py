"""Whether engines agree: a few steps of each, beside the same steps in float64, one after another.

The deviation is the largest difference of an entry of any tensor of the ensemble (weights, running
statistics) from the reference, relative to the largest entry of that tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.app.bench.battery import reason
from shoal.app.bench.contestants import Case, trainer
from shoal.app.bench.networks import NETWORKS, Network
from shoal.core.types import Tree
from shoal.models.cnn import SmallCNN
from shoal.training.numerics import calculating_in

__all__ = ["agreement", "deviation"]

STEPS = 10
_NETWORKS = (
    NETWORKS["mlp"],
    Network("small-cnn, batch norm", SmallCNN(norm="batch"), (1, 28, 28)),
)
# At strength 1 the push is nothing beside the drive, and its errors would not be seen.
_STRENGTH = 100.0


def agreement(
    methods: Sequence[str],
    engines: Sequence[str],
    device: torch.device,
    precisions: Sequence[str] = ("float32", "bfloat16"),
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """One row for each network, method, precision and engine, with its deviation or an error."""
    rows = []
    for network in _NETWORKS:
        base = Case(network, 4, 32, "float64", "sgd", torch.device("cpu"), 32 * STEPS, lr=0.1)
        for method in methods:
            wanted = _attempt(base, method, "loop+eager")
            for precision in precisions:
                case = replace(base, precision=precision, device=device)
                for engine in engines:
                    row = _row(case, method, engine, wanted)
                    say(f"{network.name}, {method}, {engine}, {precision}: {_words(row)}")
                    rows.append(row)
    return rows


def deviation(found: Tree, wanted: Tree) -> float:
    """The largest relative difference of any tensor.

    >>> deviation({"w": torch.tensor([1.0, 4.4])}, {"w": torch.tensor([1.0, 4.0])})
    0.1...
    """
    worst = 0.0
    for name, tensor in wanted.items():
        if tensor.is_floating_point():
            difference = (found[name].double().cpu() - tensor.double()).abs().max()
            worst = max(worst, float(difference / tensor.double().abs().max().clamp(min=1e-300)))
    return worst


def _row(case: Case, method: str, engine: str, wanted: Tree | Exception) -> dict[str, Any]:
    row = {
        "model": case.network.name,
        "method": method,
        "engine": engine,
        "precision": case.precision,
        "device": str(case.device),
    }
    found = wanted if isinstance(wanted, Exception) else _attempt(case, method, engine)
    if isinstance(found, Exception) or isinstance(wanted, Exception):
        return row | {"error": reason(found if isinstance(found, Exception) else wanted)}
    return row | {"deviation": deviation(found, wanted)}


def _attempt(case: Case, method: str, engine: str) -> Tree | Exception:
    """The ensemble's tensors after the steps, or why there are none."""
    try:
        ensemble = case.make()
        with calculating_in(case.precision, ensemble):
            for _ in trainer(case, ensemble, method, engine, STEPS, strength=_STRENGTH).run():
                pass
        return {name: tensor.detach() for name, tensor in ensemble.state.items()}
    except Exception as error:
        return error


def _words(row: dict[str, Any]) -> str:
    return row["error"] if "error" in row else f"{row['deviation']:.1e}"
