"""Members in blocks against all members on a GPU: time of a step and peak memory.

    python benchmarks/offload_gpu.py -o docs/benchmarks/h200-offload.json

200 perceptrons (784-256-256-10) and 40 or 200 ResNet18, batch 128, Adam, float32. An epoch is one
step, and the fastest after the first two counts. The peak is that of the allocator, without what
it held before.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from common import finish, parser, say, title
from torch import nn

import shoal
from shoal.core.display.text import table
from shoal.models import Blueprint, registry

BATCH, WARM = 128, 2
ALL: dict[str, Any] = {}
HOST = {"resident": 10}
DISK = {"resident": 10, "offload": "disk"}


def perceptron() -> nn.Module:
    """784-256-256-10."""
    layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers)


RESNET = Blueprint(registry.make("resnet18"), (3, 32, 32), 10)
CASES: list[tuple[str, Callable[[], nn.Module], int, tuple[int, ...], int, list[dict]]] = [
    ("perceptron", perceptron, 200, (784,), 6, [ALL, HOST, DISK]),
    ("resnet18", RESNET, 40, (3, 32, 32), 4, [ALL, HOST]),
    ("resnet18", RESNET, 200, (3, 32, 32), 3, [HOST]),
]


def measured(
    build: Callable[[], nn.Module], members: int, shape: tuple[int, ...], steps: int, **options: Any
) -> tuple[float, float]:
    """Seconds of a step, and peak of the allocator in bytes."""
    generator, times = torch.Generator().manual_seed(0), []
    x = torch.randn(BATCH, *shape, generator=generator)
    y = torch.randint(0, 10, (BATCH,), generator=generator)

    def tick(_: Any) -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    ensemble = shoal.Ensemble.init(build, members)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    how = {"batch_size": BATCH, "epochs": steps, "device": "cuda", "progress": False}
    shoal.fit(ensemble, (x, y), callbacks=[tick], **how, **options)
    gaps = [b - a for a, b in zip(times[WARM - 1 :], times[WARM:], strict=False)]
    return min(gaps), float(torch.cuda.max_memory_allocated() - before)


def main() -> None:
    """Measure every case."""
    options = parser(__doc__ or "").parse_args()
    value, rows = title(torch.device("cuda")), []
    for name, build, members, shape, steps, ways in CASES:
        for method in ("f-kde", "kde") if members < 200 or name == "perceptron" else ("f-kde",):
            for how in ways:
                seconds, peak = measured(build, members, shape, steps, method=method, **how)
                row = {"network": name, "members": members, "method": method, **how}
                rows.append(row | {"seconds": seconds, "peak": peak})
                say(f"{name}, {members} members, {method}, {how}: {1000 * seconds:.1f} ms")
    cells = [
        [r["network"], str(r["members"]), r["method"], str(r.get("resident", "all")),
         r.get("offload", ""), f"{1000 * r['seconds']:.1f}", f"{r['peak'] / 2**20:,.0f}"]
        for r in rows
    ]  # fmt: skip
    header = ["", "members", "method", "resident", "on", "ms", "peak, MiB"]
    finish(value | {"rows": rows}, table(cells, header), options.out)


if __name__ == "__main__":
    main()
