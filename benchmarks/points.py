"""What does each kind of points cost? python benchmarks/points.py [--quick] [-o FILE]

A step of `Stepper` with every kind of points, in turns in one process. Every round times all kinds
one after another, so that other load on the machine meets all of them. Prints and writes, for every
network and method, milliseconds per step and the ratio to the batch (medians of the rounds).
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import finish, options, parser, say, title
from torch import nn

import shoal
from shoal.core.display.text import markdown_table
from shoal.models import SmallCNN

BATCH, MEMBERS = 128, 10


def perceptron() -> nn.Module:
    """A perceptron with 2 x 64 hidden units."""
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def convolutions() -> nn.Module:
    """A small convolutional network with batch normalisation: points have a pass of their own."""
    return SmallCNN((8, 16), norm="batch").build((1, 8, 8), 10)


NETWORKS = {"perceptron": perceptron, "cnn with batch norm": convolutions}
METHODS = ("f-kde", "forde")


def kinds(pool: torch.Tensor) -> dict[str, Any]:
    """All kinds of points, with as many points as the batch has; and few of them."""
    few = BATCH // 4
    return {
        "batch": shoal.points.Batch(),
        "augmented": shoal.points.Augmented({"name": "crop-flip", "padding": 1}),
        "unlabelled": shoal.points.Unlabelled(pool),
        "noise": shoal.points.Noise(),
        "uniform": shoal.points.Uniform(),
        "mixup": shoal.points.Mixup(),
        f"mixup, {few} points": shoal.points.Mixup(count=few),
    }


def measured(
    build: Callable[[], nn.Module], method: str, device: torch.device, rounds: int, steps: int
) -> dict[str, Any]:
    """Medians of one network and method."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand(BATCH, 1, 8, 8, generator=random).to(device)
    y = torch.randint(10, (BATCH,), generator=random).to(device)
    pool = torch.rand(1000, 1, 8, 8, generator=random)
    steppers = {
        name: shoal.Stepper(
            shoal.Ensemble.init(build, MEMBERS, seed=0), n=1000, inputs=x, device=device,
            method={"name": method, "points": points},
        )
        for name, points in kinds(pool).items()
    }  # fmt: skip
    found: dict[str, list[float]] = {name: [] for name in steppers}
    for each in range(rounds + 1):
        for name, stepper in steppers.items():
            spent = timed(stepper, (x, y), device, steps)
            if each:  # the first round warms up
                found[name].append(spent)
    return {
        name: {
            "ms": statistics.median(times),
            "ratio": statistics.median(a / b for a, b in zip(times, found["batch"], strict=True)),
            "all_ms": [round(value, 4) for value in times],
        }
        for name, times in found.items()
    }


def timed(stepper: shoal.Stepper, batch: Any, device: torch.device, steps: int) -> float:
    """Milliseconds per step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        stepper(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / steps


def main() -> None:
    """Measure all networks and methods."""
    chosen = options(parser(__doc__ or ""))
    rounds, steps = (2, 2) if chosen.quick else (11, 10)
    value: dict[str, Any] = {
        **title(chosen.device),
        "batch": BATCH, "members": MEMBERS, "rounds": rounds, "steps": steps, "networks": {},
    }  # fmt: skip
    rows = []
    for network, build in NETWORKS.items():
        for method in METHODS:
            say(f"{network}, {method}")
            found = measured(build, method, chosen.device, rounds, steps)
            value["networks"].setdefault(network, {})[method] = found
            for name, row in found.items():
                rows.append([network, method, name, f"{row['ms']:.1f}", f"{row['ratio']:.2f}"])
    head = ["network", "method", "points", "ms per step", "ratio to the batch"]
    finish(value, markdown_table(head, rows), chosen.out)


if __name__ == "__main__":
    main()
