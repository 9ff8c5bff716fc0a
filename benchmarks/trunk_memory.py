"""Memory of a trunk in shards: what each process holds between steps, and at most in a step.

    python benchmarks/trunk_memory.py -o docs/benchmarks/trunk-memory-cpu.json

Processes of gloo train four members behind one trunk, on Linux. The trunk is frozen or trained,
and replicated or in shards. The kernel's own counters give the memory of a process: VmRSS between
steps and VmHWM within steps, less VmRSS after a run with a small trunk. Allocators keep freed
memory, so the script sets the variables by which glibc and mimalloc (torch on ARM) return it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import finish, parser, say, title
from torch import nn

import shoal
from shoal.core.display.text import table

WIDTH, LAYERS, MEMBERS, POINTS = 2048, 12, 4, 32
QUICK = 512
"""Units per layer of the small trunk."""

STEPS, AFTER = 6, 3
"""Steps of a run, and the steps before the first one that is measured."""

PROCESSES = (2, 4)
MIB = 2**20

RETURNED = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MIMALLOC_PURGE_DELAY": "0"}
"""Variables by which freed tensors go back to the system at once."""


class Adapted(nn.Module):
    """Layers of a trunk, each behind a private scale; so members run all layers alone.

    Args:
        width: units per layer.
        frozen: the trunk does not train.
    """

    def __init__(self, width: int, frozen: bool) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        for layer in self.trunk:
            nn.init.eye_(layer.weight.requires_grad_(not frozen))
        self.scales, self.head = nn.Parameter(torch.ones(LAYERS, width)), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [B, 10]."""
        for layer, scale in zip(self.trunk, self.scales, strict=True):
            x = layer(scale * x).tanh()
        return self.head(x)


class Watched:
    """A loader that reads the process's memory when it is asked for a batch.

    Attributes:
        between: bytes between steps.
        most: bytes at most in the steps that are measured.
    """

    def __init__(self, width: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x = torch.randn(POINTS, width, generator=draw)
        self.y = torch.randint(0, 10, (POINTS,), generator=draw)
        self.between = self.most = 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(STEPS):
            if number == AFTER:
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")  # forget the peak so far
            if number > AFTER:
                self.between = max(self.between, counted("VmRSS"))
                self.most = max(self.most, counted("VmHWM"))
            yield self.x, self.y


def counted(key: str) -> int:
    """Bytes that the kernel counts for this process."""
    with open("/proc/self/status") as file:
        return next(int(row.split()[1]) << 10 for row in file if row.startswith(f"{key}:"))


def trained(width: int, frozen: bool, trunk: str) -> Watched:
    """A run, with the memory of its steps."""
    loader = Watched(width)
    ensemble = shoal.Ensemble.init(
        lambda: Adapted(width, frozen), MEMBERS, shared=() if frozen else ("trunk.*",)
    )
    options = {"mesh": f"1x{dist.get_world_size()}", "trunk": trunk, "engine": "vmap"}
    shoal.fit(ensemble, loader, steps=STEPS, method="f-kde", progress=False, **options)
    return loader


def worker(kind: str, trunk: str, width: int) -> None:
    """One process of one case; the first prints MiB held and at most, of the largest process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    frozen = kind == "frozen"
    trained(16, frozen, trunk)  # pages of code that a first run reads
    before = counted("VmRSS")
    run = trained(width, frozen, trunk)
    found = torch.tensor([run.between - before, run.most - before])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        held, most = (found / MIB).tolist()
        print(json.dumps({"held_mib": held, "most_mib": most}))
    dist.destroy_process_group()


def measured(kind: str, trunk: str, processes: int, width: int) -> dict[str, Any]:
    """The row of one case, which runs in processes of its own."""
    say(f"{kind} trunk, {trunk}, {processes} processes")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += [f"--nproc-per-node={processes}", os.path.abspath(__file__)]
    words += ["--worker", kind, trunk, "--width", str(width)]
    env = os.environ | RETURNED | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    size = LAYERS * width**2 * 4 / MIB
    return {"kind": kind, "trunk": trunk, "processes": processes, "trunk_mib": size} | found


def main() -> None:
    """Measure every case, and print a table."""
    made = parser(__doc__ or "")
    made.add_argument("--width", type=int, help="units per layer of the trunk")
    made.add_argument("--worker", nargs=2, help="used by the script itself")
    given = made.parse_args()
    width = given.width or (QUICK if given.quick else WIDTH)
    if given.worker:
        return worker(*given.worker, width)
    rows = [
        measured(kind, trunk, processes, width)
        for kind in ("frozen", "trained")
        for processes in PROCESSES
        for trunk in ("replicated", "sharded")
    ]
    sizes = {"width": width, "layers": LAYERS, "members": MEMBERS, "points": POINTS}
    value = title(torch.device("cpu")) | {"workload": sizes, "rows": rows}
    cells = [
        [
            row["kind"],
            str(row["processes"]),
            row["trunk"],
            f"{row['held_mib']:.0f}",
            f"{row['most_mib']:.0f}",
        ]
        for row in rows
    ]
    finish(value, table(cells, ["trunk", "processes", "", "MiB held", "MiB at most"]), given.out)


if __name__ == "__main__":
    main()
