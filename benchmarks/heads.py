"""A hundred heads on the cached features of a frozen trunk, on a CPU.

    python benchmarks/heads.py -o docs/benchmarks/heads-cpu.json

The trunk is a random convolutional network with 1,280 features, as many as EfficientNet-lite0 has.
"""

import argparse
import time

import torch
from torch import nn

import shoal
from shoal.core.storage.files import write_json
from shoal.experiment.bench.measure import load, machine, versions


def trunk(features: int) -> nn.Module:
    """Features of small images."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, features, 3, 2),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def main() -> None:
    """Train the heads for each method, and write seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=25_000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--features", type=int, default=1280)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--methods", default="ensemble,f-kde,kde")
    parser.add_argument("-o", "--out")
    asked = parser.parse_args()
    x = torch.randn(asked.points, 3, 16, 16)
    y = torch.randint(10, (asked.points,))
    network = nn.Sequential(trunk(asked.features), nn.Linear(asked.features, 10))
    rows = []
    for method in asked.methods.split(","):
        ensemble = shoal.Ensemble.init(shoal.adapters.last_layer(network), asked.members)
        begun = time.perf_counter()
        run = shoal.fit(
            ensemble, (x, y), method=method, epochs=asked.epochs, batch_size=asked.batch_size,
            cache=True, progress=False,
        )  # fmt: skip
        total = time.perf_counter() - begun
        steps = sum(row["seconds"] for row in run.history)
        rows.append({"method": method, "seconds": total, "training_seconds": steps})
        print(f"{method}: {total:.1f} s, of which {steps:.1f} s are steps", flush=True)
    if asked.out:
        settings = {k: v for k, v in vars(asked).items() if k != "out"}
        where = machine(torch.device("cpu"))
        told = {"machine": where, "versions": versions(), "settings": settings, "load": load()}
        write_json(asked.out, told | {"rows": rows})


if __name__ == "__main__":
    main()
