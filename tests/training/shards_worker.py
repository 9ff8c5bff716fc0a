"""One of several processes of a run that is stopped at a step and continued by other processes."""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

import shoal  # noqa: E402
from shoal.core.errors import ShoalWarning  # noqa: E402

warnings.simplefilter("ignore", ShoalWarning)


def narrow():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def wide():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


CASES = {
    "plain": (lambda: [(narrow, 5)], {"method": "f-kde"}),
    "mixed": (lambda: [(narrow, 3), (wide, 4)], {"method": "f-kde"}),
    "frozen": (lambda: [(narrow, 5)], {"method": "kde", "frozen": 2}),
    "precise": (lambda: [(wide, 7)], {"method": "svgd", "strength": 30.0}),
    "data": (lambda: [(wide, 2)], {"method": "f-svgd"}),
}


class Enough(Exception):
    """The run is stopped here."""


class Until:
    """A constant learning rate that stops the run before one step."""

    def __init__(self, last):
        self.last = last

    def __call__(self, step, steps):
        if step == self.last:
            raise Enough
        return 1.0


def train(case, folder, last, total=6):
    """Train a run of `total` steps until `last`, with a checkpoint after every step."""
    build, options = CASES[case]
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(24, 6, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 3, (24,), generator=draw)
    ensemble = shoal.Ensemble.init(build(), seed=3).to(torch.float64)
    until = Until(last if last < total else None)
    settings = {"steps": total, "batch_size": 8, "lr": 0.05, "schedule": until, **options}
    try:
        shoal.fit(
            ensemble, (x, y), out=folder, resume=True, save_every=0, progress=False, **settings
        )
    except Enough:
        assert last < total


def main():
    torch.set_num_threads(1)
    case, folder, last = sys.argv[1:]
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    train(case, Path(folder), int(last))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
