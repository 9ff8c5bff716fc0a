"""Bookkeeping of a step by one Triton program each: measures, history, and the next batch.

All of it is a few numbers per member, for which torch starts about thirty kernels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_to_history", "measures", "next_batch"]


@triton.jit
def _mean_square(lengths, place, inside, finite, count):
    length = tl.load(lengths + place, mask=inside, other=0.0)
    length = tl.where(finite & (tl.abs(length) < float("inf")), length, 0.0)
    return tl.sqrt(tl.sum(length * length) / count)


@triton.jit
def _measures_kernel(
    drive, push, alive, kernel, out, members, scale,
    SIZE: tl.constexpr, PUSHED: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, SIZE)
    inside = place < members
    finite = tl.load(alive + place, mask=inside, other=0) != 0
    count = tl.maximum(tl.sum(tl.where(finite, 1.0, 0.0)), 1.0)
    tl.store(out, _mean_square(drive, place, inside, finite, count))
    pushed = scale * _mean_square(push, place, inside, finite, count) if PUSHED else 0.0
    tl.store(out + 1, pushed)
    h2 = tl.load(kernel) if KNOWN else 0.0
    effective = tl.load(kernel + 1) if KNOWN else count
    tl.store(out + 2, h2)
    tl.store(out + 3, effective)


def measures(
    drive: Tensor,
    push: Tensor | None,
    alive: Tensor,
    kernel: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Root mean square norms of drive and push over finite members; bandwidth; members [4].

    The lengths of the pushes are multiplied by `scale`.
    """
    out = drive.new_empty(4)
    launch: Any = _measures_kernel[(1,)]
    launch(
        drive, drive if push is None else push, alive, drive if kernel is None else kernel, out,
        len(alive), scale, SIZE=triton.next_power_of_2(len(alive)), PUSHED=push is not None,
        KNOWN=kernel is not None, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _history_kernel(
    sums, ratio_max, lived, found, loss, alive, members, SIZE: tl.constexpr
):  # fmt: skip
    place = tl.arange(0, SIZE)
    inside = place < members
    four = tl.arange(0, 4)
    tl.store(sums, tl.load(sums) + 1.0)
    tl.store(sums + 1 + four, tl.load(sums + 1 + four) + tl.load(found + four))
    losses = tl.load(loss + place, mask=inside, other=0.0)
    before = tl.load(sums + 5 + place, mask=inside, other=0.0)
    tl.store(sums + 5 + place, before + losses, mask=inside)
    ratio, largest = tl.load(found + 1) / tl.load(found), tl.load(ratio_max)
    tl.store(ratio_max, tl.where(ratio > largest, ratio, largest))
    finite = tl.load(alive + place, mask=inside, other=0) != 0
    steps = tl.load(lived + place, mask=inside, other=0)
    tl.store(lived + place, steps + tl.where(finite, 1, 0), mask=inside)


def add_to_history(
    sums: Tensor, ratio_max: Tensor, lived: Tensor, found: Tensor, loss: Tensor, alive: Tensor
) -> None:
    """Add a step to the sums of an epoch, in place; see `shoal.training.folder.history.Tracker`.

    Args:
        sums: steps, the four measures, and each member's loss [5 + M].
        ratio_max: the largest force ratio.
        lived: number of steps for which each member has been finite [M].
        found: the measures of the step [4].
        loss: of the step [M].
        alive: finite members [M].
    """
    members = len(lived)
    launch: Any = _history_kernel[(1,)]
    size = triton.next_power_of_2(members)
    launch(sums, ratio_max, lived, found, loss, alive, members, SIZE=size, num_warps=1)


@triton.jit
def _next_kernel(
    places, order, pace, rows, step, rate, factor, batch, size, BLOCK: tl.constexpr
):  # fmt: skip
    place, number = tl.load(places), tl.load(places + 1)
    for start in range(0, size, BLOCK):
        row = start + tl.arange(0, BLOCK)
        taken = tl.load(order + place * batch + row, mask=row < size, other=0)
        tl.store(rows + row, taken, mask=row < size)
    tl.store(step, number)
    tl.store(rate, tl.load(pace + 2 * number))
    tl.store(factor, tl.load(pace + 2 * number + 1))
    tl.debug_barrier()  # everyone has read the places
    tl.store(places, place + 1)
    tl.store(places + 1, number + 1)


def next_batch(
    places: Tensor, order: Tensor, pace: Tensor, rate: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the next batch [size], its annealing factor and step number; counts `places` up.

    Args:
        places: batch in the epoch, and step in the run [2].
        order: the data points of each batch [batches, B].
        pace: learning rate and annealing factor of every step [steps, 2].
        rate: the learning rate, set in place.
        size: data points of this batch.
    """
    rows, step = order.new_empty(size), places.new_empty(())
    factor = torch.empty_like(pace[0, 0])
    launch: Any = _next_kernel[(1,)]
    launch(
        places, order, pace, rows, step, rate, factor, order.shape[1], size, BLOCK=256, num_warps=1
    )
    return rows, factor, step
