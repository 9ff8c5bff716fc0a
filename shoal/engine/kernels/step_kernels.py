"""Bookkeeping of a step by one Triton program each: measures, history, and the next batch.

All of it is a few numbers per member, for which torch starts about thirty kernels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_to_history", "in_words", "measures", "next_batch"]


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
def _copy_row(given, out, source, row, words, BLOCK: tl.constexpr):
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        taken = tl.load(given + source * words + word, mask=word < words)
        tl.store(out + row * words + word, taken, mask=word < words)


@triton.jit
def _next_kernel(
    places, order, pace, done, x, y, x_out, y_out, step, rate, factor, batch, x_words, y_words,
    X_BLOCK: tl.constexpr, Y_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place, number = tl.load(places), tl.load(places + 1)
    source = tl.load(order + place * batch + row)
    _copy_row(x, x_out, source, row, x_words, X_BLOCK)
    _copy_row(y, y_out, source, row, y_words, Y_BLOCK)
    if row == 0:
        tl.store(step, number)
        tl.store(rate, tl.load(pace + 2 * number))
        tl.store(factor, tl.load(pace + 2 * number + 1))
    tl.debug_barrier()
    if tl.atomic_add(done, 1) == tl.num_programs(0) - 1:  # everyone has read the places
        tl.store(done, 0)
        tl.store(places, place + 1)
        tl.store(places + 1, number + 1)


WORD = torch.int32
"""Rows are copied in words of four bytes, whatever their type."""


def in_words(tensor: object) -> Tensor | None:
    """The rows of a tensor [N, ...] as words [N, W], without a copy; None if that cannot be."""
    if not isinstance(tensor, Tensor) or not tensor.is_contiguous() or not tensor.numel():
        return None
    size = tensor[0].numel() * tensor.element_size()
    if tensor.is_complex() or size % WORD.itemsize or tensor.data_ptr() % WORD.itemsize:
        return None
    return tensor.reshape(len(tensor), -1).view(WORD)


def next_batch(
    places: Tensor,
    order: Tensor,
    pace: Tensor,
    rate: Tensor,
    done: Tensor,
    data: tuple[Tensor, Tensor],
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and targets of the next batch, its annealing factor and step; counts `places` up.

    Args:
        places: batch in the epoch, and step in the run [2].
        order: the data points of each batch [batches, B].
        pace: learning rate and annealing factor of every step [steps, 2].
        rate: the learning rate, set in place.
        done: a counter of programs at zero, which nobody else uses at the same time.
        data: inputs and targets of all data points, see `in_words`.
        size: data points of this batch.
    """
    words = [in_words(tensor) for tensor in data]
    out = [tensor.new_empty(size, *tensor.shape[1:]) for tensor in data]
    step, factor = places.new_empty(()), torch.empty_like(pace[0, 0])
    widths = [tensor.shape[1] for tensor in words if tensor is not None]
    blocks = [min(triton.next_power_of_2(width), 1024) for width in widths]
    launch: Any = _next_kernel[(size,)]
    launch(
        places, order, pace, done, *words, *map(in_words, out), step, rate, factor,
        order.shape[1], *widths, X_BLOCK=blocks[0], Y_BLOCK=blocks[1],
        num_warps=4 if blocks[0] >= 512 else 1,
    )  # fmt: skip
    return *out, factor, step
