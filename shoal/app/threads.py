"""How many threads: more of them make small networks slower."""

import os

import torch

from shoal.core.types import Tree

__all__ = ["SMALL", "set_threads"]

SMALL = 3e7
"""Products of a weight and an input in one step, below which one thread is as fast as several."""


def set_threads(wanted: int | None, weights: Tree, batch_size: int) -> None:
    """Take the number that was asked for; else one for small networks, else what torch thinks best.

    One thread also sums in one order, so that results do not depend on the number of cores.
    `OMP_NUM_THREADS` in the environment counts as a number that was asked for.
    """
    count = sum(tensor.numel() for tensor in weights.values())
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ and count * batch_size < SMALL:
        torch.set_num_threads(1)
