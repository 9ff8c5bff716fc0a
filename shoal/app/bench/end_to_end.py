"""The time of a whole training: as many points as MNIST, the usual perceptron, 15 epochs."""

import time
from typing import Any

import torch

from shoal.app.bench.battery import reason
from shoal.app.bench.contestants import Case
from shoal.app.method_words import parse_method
from shoal.training.fit import fit

__all__ = ["train_once"]

EPOCHS = 15


def train_once(case: Case, method: str, engine: str, epochs: int = EPOCHS) -> dict[str, Any]:
    """Seconds of one call of `fit`, everything in it included, or why it cannot be done."""
    row: dict[str, Any] = {"method": method, "engine": engine, "epochs": epochs}
    row |= {"points": case.points, "members": case.members, "batch_size": case.batch_size}
    row |= {"precision": case.precision, "optimizer": case.optimizer, "device": str(case.device)}
    try:
        ensemble = case.make()
        data = case.data()
        start = time.perf_counter()
        run = fit(
            ensemble, data, method=parse_method(method), engine=engine, lr=case.lr,
            optimizer=case.optimizer, epochs=epochs, batch_size=case.batch_size,
            precision=case.precision, progress=False,
        )  # fmt: skip
        if case.device.type == "cuda":
            torch.cuda.synchronize(case.device)
    except Exception as error:
        return row | {"error": reason(error)}
    seconds, steps = time.perf_counter() - start, run.history[-1]["step"]
    return row | {
        "seconds": seconds,
        "training_seconds": float(run.provenance["seconds"]),
        "steps": steps,
        "ms": 1e3 * seconds / steps,
    }
