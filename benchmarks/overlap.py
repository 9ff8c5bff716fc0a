"""Exchanges that overlap with computing.

    python benchmarks/overlap.py      (root, Linux)

Two processes of gloo train in network namespaces with limited bandwidth. Weights that are compared
travel during both passes, and the next layer of a trunk during the layer before. Each is also
measured without its overlap. The figure is the fastest step.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from common import finish, parser, say, title
from namespaces import namespaces, refusal, run_in
from torch import nn

import shoal
from shoal.core.display.text import table
from shoal.engine.members.sharded_trunk import TrunkShards
from shoal.training.members.processes import OtherProcesses, OverProcesses

RATE = 400.0
WIDTH, LAYERS, STEPS = 1024, 12, 6
COMPARED, BATCH = 512, 2048
"""Hidden units and data points of members whose weights are compared."""


class Adapted(nn.Module):
    """Frozen layers of a trunk, each behind a private scale; so members run all layers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        for layer in self.trunk:
            nn.init.eye_(layer.weight.requires_grad_(False))
        self.scales, self.head = nn.Parameter(torch.ones(LAYERS, WIDTH)), nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [B, 10]."""
        for layer, scale in zip(self.trunk, self.scales, strict=True):
            x = layer(scale * x).tanh()
        return self.head(x)


class Forgetful(dict):
    """An order of layers that is never known, so that nothing arrives ahead."""

    def get(self, key: Any, default: Any = None) -> None:
        """None."""


def perceptron() -> nn.Module:
    """Members whose weights are compared."""
    return nn.Sequential(nn.Linear(WIDTH, COMPARED), nn.Tanh(), nn.Linear(COMPARED, 10))


CASES: dict[str, dict[str, Any]] = {
    "weights": {"method": "kde", "mesh": "2x1"},
    "weights, no overlap": {"method": "kde", "mesh": "2x1"},
    "trunk, replicated": {"method": "ensemble", "mesh": "1x2"},
    "trunk, sharded": {"method": "ensemble", "mesh": "1x2", "trunk": "sharded"},
    "trunk, sharded, no overlap": {"method": "ensemble", "mesh": "1x2", "trunk": "sharded"},
}


def worker(name: str) -> None:
    """One process of one case: seconds of its fastest step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    options, trunk = CASES[name], name.startswith("trunk")
    if "no overlap" in name:
        OverProcesses.others_by_weights = (  # pyright: ignore[reportAttributeAccessIssue]
            lambda self, *_: OtherProcesses(self.mesh)
        )
        TrunkShards.following = property(  # pyright: ignore
            lambda _: Forgetful(), lambda *_: None
        )
    points = 64 if trunk else BATCH
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(points, WIDTH, generator=draw)
    y = torch.randint(0, 10, (points,), generator=draw)
    ensemble = shoal.Ensemble.init(Adapted if trunk else perceptron, members=4)
    times: list[float] = []

    class Watched:
        """A loader that notes when it is asked for a batch."""

        def __iter__(self) -> Any:
            for _ in range(STEPS):
                times.append(time.perf_counter())
                yield x, y

        def __len__(self) -> int:
            return STEPS

    shoal.fit(ensemble, Watched(), steps=STEPS, progress=False, **options)
    steps = [b - a for a, b in zip(times, times[1:], strict=False)]
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": min(steps[1:])}))
    dist.destroy_process_group()


def main() -> None:
    """Measure every case, and print a table."""
    options = parser(__doc__ or "")
    options.add_argument("--worker", help="run as one process of this case")
    options.add_argument("--rate", type=float, default=RATE, help="Mbit/s of each process")
    given = options.parse_args()
    if given.worker:
        worker(given.worker)
        return
    if (reason := refusal()) is not None:
        sys.exit(reason)
    value, rows = title(torch.device("cpu")) | {"cases": {}}, []
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with namespaces(2, given.rate) as names:
        for name in CASES:
            say(name)
            text = run_in(names, [__file__, "--worker", name], quiet, 300)
            found = json.loads(text.strip().splitlines()[-1])
            value["cases"][name] = found
            rows.append([name, f"{found['seconds']:.2f}"])
    text = table(rows, ["", "seconds per step"])
    finish(value, text, given.out)


if __name__ == "__main__":
    main()
