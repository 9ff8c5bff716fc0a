"""The two products with the coordinates on a CPU, strip by strip.

A strip of the coordinates of all members stays in the cache while it is centred and multiplied, so
that no centred copy of the weights is ever written. Everything happens at one site.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.core.types import Leaves

__all__ = ["gram", "plus_product"]

STRIP = 100_000
"""Numbers in a strip, which a core keeps in its cache; in smaller ones, calls take the time."""


def gram(leaves: Leaves, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrix [1, M, M] of the centred coordinates, and who is alive and finite [M]."""
    total = _gram_of(leaves, alive)
    if not bool(total.isfinite().all()):  # one that is not finite has spoilt the centre of all
        sums = torch.stack([leaf.sum((-2, -1)) for leaf in leaves])
        alive = alive & sums.isfinite().all(0)
        total = _gram_of(leaves, alive)
    return total[None], alive


def plus_product(
    drives: Sequence[Tensor], B: Tensor, leaves: Leaves, alive: Tensor, scale: float
) -> tuple[list[Tensor], Tensor]:
    """drive + scale B z for each leaf, z centred, in place; and the lengths of the drives [m]."""
    lengths = torch.stack([torch.linalg.vector_norm(drive, dim=1) for drive in drives])
    B = B if bool(alive.all()) else B[:, alive]
    for drive, leaf in zip(drives, leaves, strict=True):
        strips = drive.split(_width(leaf), 1)
        for own, (points, centre) in zip(strips, _strips(leaf, alive), strict=True):
            own.addmm_(B, points - centre, alpha=scale)
    return list(drives), torch.linalg.vector_norm(lengths, dim=0)


def _gram_of(leaves: Leaves, alive: Tensor) -> Tensor:
    """Zero for the dead."""
    count = int(alive.sum())
    total = leaves[0].new_zeros(count, count)
    for leaf in leaves:
        for points, centre in _strips(leaf, alive):
            # Four times faster with the members side by side than with the coordinates.
            z = torch.empty(points.mT.shape, dtype=points.dtype)
            torch.sub(points.mT, centre[:, None], out=z)
            total.addmm_(z.mT, z)
    whole = total.new_zeros(len(alive), len(alive))
    whole[alive[:, None] & alive] = total.flatten()
    return whole


def _strips(leaf: Tensor, alive: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Coordinates of the living [m, d], and their centre [d]."""
    points = leaf[:, 0] if bool(alive.all()) else leaf[alive, 0]
    centre, width = points.sum(0) / max(len(points), 1), _width(leaf)
    return zip(points.split(width, 1), centre.split(width), strict=True)


def _width(leaf: Tensor) -> int:
    return max(STRIP // len(leaf), 64)
