"""What chains and their predictions cost. python benchmarks/draws.py [--device cuda] [-o FILE]

- uci: `shoal.draw` with mclmc by "leapfrog", ten chains of networks 8-50-2 on 927 points, 9,000
  steps of one gradient.
- mnist: 20 perceptrons 784-100-100-100-10, 60,000 points, batches of 128: a step of sghmc, of mclmc
  on 4,096 points, and a plain training step by SGD. Time of a longer run less that of a shorter.
- predict: 5 x 1,000 draws of networks 8-50-2 at 20,000 points, and one member; the most memory
  that a process had for each.

On a GPU the chains of `uci` move twice: by captured steps, and by the same steps one kernel after
another, whose draws must be the same bit for bit. Prints JSON. Inputs are random.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

import shoal
from shoal.models.mlp import MLP
from shoal.training.draws import moves


def synchronised(device: str) -> float:
    """The time, when the device has done its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def small_run(device: str, chains: int, points: int) -> shoal.Run:
    """Trained networks 8-50-2."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, 8, generator=generator)
    y = x.sum(1).sin() + 0.3 * torch.randn(points, generator=generator)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Linear(50, 2))

    ensemble = shoal.Ensemble.init(build, chains).to(device)
    options: dict[str, Any] = {"likelihood": "heteroscedastic", "lr": 0.005, "epochs": 20}
    return shoal.fit(ensemble, (x, y), progress=False, **options)


def uci(device: str, steps: int) -> dict[str, Any]:
    """Seconds of ten chains."""
    run = small_run(device, 10, 927)
    found: dict[str, Any] = {"members": 10, "points": 927, "steps": steps}
    kept = {}
    for name, capture in _ways(device):
        moves._OnGPU.capture = capture
        took = []
        for _ in range(2):
            began = synchronised(device)
            drawn = shoal.draw(
                run, sampler={"name": "mclmc", "integrator": "leapfrog"}, warmup=steps * 5 // 9,
                draws=steps * 2 // 9, thin=2, progress=False,
            )  # fmt: skip
            took.append(synchronised(device) - began)
        found[name] = {"seconds": min(took), "seconds_first": took[0]}
        kept[name] = torch.cat([t.detach().flatten(1) for t in drawn.ensemble.weights.values()], 1)
    moves._OnGPU.capture = True
    found["equal"] = all(torch.equal(kept["chains"], other) for other in kept.values())
    return found


def _ways(device: str) -> list[tuple[str, bool]]:
    return [("chains", True), ("one kernel after another", False)] if device == "cuda" else [
        ("chains", True)
    ]  # fmt: skip


def mnist(device: str, points: int, steps: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, 784, generator=generator).to(device)
    y = torch.randint(0, 10, (points,), generator=generator).to(device)
    ensemble = shoal.Ensemble.init(lambda: MLP((100, 100, 100)).build((784,), 10), 20).to(device)
    plain: dict[str, Any] = {"optimizer": "sgd", "lr": 0.01, "method": "ensemble"}

    def train(count: int) -> Any:
        again = shoal.Ensemble.init(lambda: MLP((100, 100, 100)).build((784,), 10), 20).to(device)
        return shoal.fit(again, (x, y), steps=count, progress=False, **plain)

    run = shoal.fit(ensemble, (x, y), steps=20, progress=False, **plain)
    few = x[:4096], y[:4096]

    def chain(sampler: Any, data: Any) -> Any:
        lengths: dict[str, Any] = {"draws": 2, "thin": 1}
        return lambda count: shoal.draw(
            run, data, sampler=sampler, warmup=count - 2, progress=False, **lengths
        )

    sghmc = chain({"name": "sghmc", "lr": 0.001}, (x, y))
    calls = {"plain step": train, "sghmc": sghmc, "mclmc": chain("mclmc", few)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_difference(call, steps // 5 if "mclmc" in name else steps, device))
    ms = {name: statistics.median(each) for name, each in times.items()}
    ratio = ms["sghmc"] / ms["plain step"]
    return {"points": points, "ms": ms, "rounds_ms": times, "sghmc_over_plain": ratio}


def _difference(call: Any, steps: int, device: str) -> float:
    """Milliseconds a step, from a run of 2 `steps` less one of `steps`."""
    marks = [synchronised(device)]
    for count in (steps, 2 * steps):
        call(count)
        marks.append(synchronised(device))
    return 1000 * (marks[2] - 2 * marks[1] + marks[0]) / steps


def predicted(device: str, draws: int, points: int) -> dict[str, Any]:
    """Seconds and memory of a prediction, in a process of its own."""
    command = [sys.executable, __file__, "--device", device, "--predict", str(draws)]
    done = subprocess.run(
        [*command, "--points", str(points)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def predict_here(device: str, draws: int, points: int) -> dict[str, Any]:
    """Seconds and memory of predictions by draws, or by one member if there are none."""
    run = small_run(device, 5 if draws else 1, 927)
    if draws:
        run = shoal.draw(run, draws=draws, warmup=10, progress=False)
    x = torch.randn(points, 8)
    shoal.predict(run, x[:10])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = synchronised(device)
    pred = shoal.predict(run, x)
    passed = synchronised(device)
    known = float(torch.as_tensor(pred.mean).double().mean())
    ended = synchronised(device)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"members": run.ensemble.members, "points": points, "seconds": passed - began}
    found |= {"seconds_of_mean": ended - passed, "checksum": known}
    found |= {"more_memory_mib": (after - before) / 1024}
    if device == "cuda":
        found["gpu_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def main() -> None:
    """Measure, and print or store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="uci,mnist,predict")
    parser.add_argument("--steps", type=int, default=9000, help="steps of the small chains")
    parser.add_argument("--points", type=int, default=20_000, help="points of the predictions")
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--image-steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--predict", type=int, help="one prediction by so many draws a chain")
    parser.add_argument("-o", "--output")
    given = parser.parse_args()
    if given.predict is not None:
        print(json.dumps(predict_here(given.device, given.predict, given.points)))
        return
    name = torch.cuda.get_device_name() if given.device == "cuda" else platform.machine()
    found: dict[str, Any] = {
        "machine": name, "torch": torch.__version__, "threads": torch.get_num_threads()
    }  # fmt: skip
    if "uci" in given.only:
        found["uci"] = uci(given.device, given.steps)
        print(json.dumps(found["uci"]), flush=True)
    if "mnist" in given.only:
        sizes = given.images, given.image_steps, given.rounds
        found["mnist"] = mnist(given.device, *sizes)
        print(json.dumps(found["mnist"]), flush=True)
    if "predict" in given.only:
        each = [predicted(given.device, draws, given.points) for draws in (0, 1000)]
        found["predict"] = {"one member": each[0], "draws": each[1]}
    text = json.dumps(found, indent=1)
    print(text)
    if given.output:
        with open(given.output, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
