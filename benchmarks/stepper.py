"""Is a step of `Stepper` as fast as a step of `fit`? python benchmarks/stepper.py [-o FILE]

The same network, batches and method, in turns in one process: epochs of `fit`, epochs of a loop
with `Stepper` over the same batches, and the same with a batch per member. Prints JSON:
milliseconds per step (the median of the rounds) and the ratio to `fit`.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shoal
from shoal.data.batches.sources import ArrayBatches


def build() -> nn.Module:
    """A perceptron with 2 x 64 hidden units."""
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def timed(run: Callable[[], None], steps: int, device: str) -> float:
    """Milliseconds a step."""
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / steps


def measured(method: str, device: str, rounds: int, steps: int, members: int) -> dict[str, Any]:
    """Medians of one method."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128 * steps, 64, generator=generator).to(device)
    y = torch.randint(0, 10, (128 * steps,), generator=generator).to(device)
    ends: list[float] = []

    def fit() -> None:
        ensemble = shoal.Ensemble.init(build, members=members).to(device)
        marks: list[float] = []

        def mark(_: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

        shoal.fit(ensemble, (x, y), method=method, epochs=3, callbacks=[mark], progress=False)
        ends.append(1000 * (marks[-1] - marks[-2]) / steps)

    stepper = shoal.Stepper(
        shoal.Ensemble.init(build, members=members), n=len(x), method=method, device=device
    )
    batches = ArrayBatches(x, y, 128)

    def loop() -> None:
        for batch in batches.batches(0):
            stepper(batch)

    alone = shoal.Stepper(
        shoal.Ensemble.init(build, members=members), n=len(x), method="kde", device=device
    )
    rows = torch.randint(0, len(x), (steps, members, 128), device=device)

    def own() -> None:
        for each in rows:
            alone((x[each], y[each]), own=True)

    found: dict[str, list[float]] = {"fit": ends, "stepper": [], "own batches": []}
    loop()
    own()
    for _ in range(rounds):
        fit()
        found["stepper"].append(timed(loop, steps, device))
        found["own batches"].append(timed(own, steps, device))
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {**medians, "ratio": medians["stepper"] / medians["fit"], "all": found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", default="ensemble,kde,f-kde")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--members", type=int, default=10)
    told = parser.parse_args()
    found = {
        method: measured(method, told.device, told.rounds, told.steps, told.members)
        for method in told.methods.split(",")
    }
    text = json.dumps({"device": told.device, "torch": torch.__version__, **found}, indent=1)
    print(text)
    if told.out:
        with open(told.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
