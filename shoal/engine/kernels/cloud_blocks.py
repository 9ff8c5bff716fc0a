r"""The two products with the coordinates on a CPU, strip by strip.

A strip of the coordinates of all members stays in the cache while it is multiplied, so that no
centred copy of the weights is ever written. Strips are taken relative to one member, $y = x - x_0$,
which needs no pass to find the centre, and the small matrices do the rest. With $H = 1 - 11^T / M$

$$ z z^T = H (y y^T) H, \qquad B z = (B H) y. $$

Everything happens at one site.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.core.types import Leaves

__all__ = ["gram", "plus_product"]

STRIP = 100_000
"""Numbers in a strip, which a core keeps in its cache; in smaller ones, calls take the time."""

FAR = 3.0
"""How much larger the squared distance from the centre may be for the origin than for the member
that is nearest to it: what lies close together is lost in rounding when seen from afar."""


def gram(leaves: Leaves, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrix [1, M, M] of the centred coordinates, and who is alive and finite [M]."""
    total = _gram_of(leaves, alive)
    if not bool(total.isfinite().all()):  # one that is not finite may have spoilt all
        sums = torch.stack([leaf.sum((-2, -1)) for leaf in leaves])
        alive = alive & sums.isfinite().all(0)
        total = _gram_of(leaves, alive)
    whole = total.new_zeros(len(alive), len(alive))
    whole[alive[:, None] & alive] = total.flatten()
    return whole[None], alive


def plus_product(
    drives: Sequence[Tensor], B: Tensor, leaves: Leaves, alive: Tensor, scale: float
) -> tuple[list[Tensor], Tensor]:
    """drive + scale B z for each leaf, z centred, in place; and the lengths of the drives [m]."""
    B = B[:, alive]
    B = B - B.mean(1, keepdim=True)
    memory, lengths = _memory(leaves, alive), []
    strips = (own for drive in drives for own in drive.split(_width(alive), 1))
    for own, points in zip(strips, _strips(leaves, alive), strict=True):
        y = torch.sub(points, points[:1], out=memory[: points.numel()].view(points.shape))
        lengths.append(torch.linalg.vector_norm(own, dim=1))
        own.addmm_(B, y, alpha=scale)
    return list(drives), torch.linalg.vector_norm(torch.stack(lengths), dim=0)


def _gram_of(leaves: Leaves, alive: Tensor) -> Tensor:
    """Centred inner products of the finite members [m, m]."""
    total = _centred(_gram_from(leaves, alive, 0))
    spread = total.diagonal()
    if len(spread) > 1 and bool(spread[0] > FAR * spread.min()):
        return _centred(_gram_from(leaves, alive, int(spread.argmin())))
    return total


def _gram_from(leaves: Leaves, alive: Tensor, origin: int) -> Tensor:
    """Inner products of the finite members, relative to one of them [m, m]."""
    count = int(alive.sum())
    total = leaves[0].new_zeros(count, count)
    difference = torch.eye(count, dtype=total.dtype, device=total.device)
    difference[origin : origin + 1] -= 1
    memory = _memory(leaves, alive)
    for points in _strips(leaves, alive):
        # Rounded once, as subtractions are, but with the members side by side, and so y^T y is four
        # times faster.
        y = torch.mm(points.mT, difference, out=memory[: points.numel()].view(points.mT.shape))
        total.addmm_(y.mT, y)
    return total


def _centred(gram: Tensor) -> Tensor:
    """H G H, as symmetric as G."""
    means = gram.mean(0)
    return gram - (means + means[:, None]) + means.mean()


def _strips(leaves: Leaves, alive: Tensor) -> Iterator[Tensor]:
    """Coordinates of the finite members [m, d]."""
    everyone = bool(alive.all())
    for leaf in leaves:
        yield from (leaf[:, 0] if everyone else leaf[alive, 0]).split(_width(alive), 1)


def _memory(leaves: Leaves, alive: Tensor) -> Tensor:
    """For the largest strip: what is used again and again stays in the cache."""
    widest = max(leaf.shape[-1] for leaf in leaves)
    return leaves[0].new_empty(len(alive) * min(widest, _width(alive)))


def _width(alive: Tensor) -> int:
    return max(STRIP // len(alive), 64)
