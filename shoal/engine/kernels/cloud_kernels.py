"""The two products with the coordinates as Triton kernels, each one read of them.

A program takes a strip of coordinates of all members into registers, centres it there, and either
multiplies it with itself or with B. Partial Gram matrices are written side by side and summed, so
that the result does not depend on the order in which the programs end. One launch serves eight
leaves, since most leaves of a network are much smaller than a launch is worth.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.core.types import Leaves

__all__ = ["gram", "plus_product"]

GRAM: dict[str, Any] = {"PRECISION": "tf32x3", "num_warps": 1}
"""Products by tensor cores in three passes, which keep single precision. A product is too small to
be shared: with one warp to a program, each does all of its own and many are under way."""

PROGRAMS = 4224
"""Thirty-two for each multiprocessor of a large GPU."""

GROUP = 8
"""Leaves that one launch serves."""


@triton.jit
def _leaf_of(strip, widths, STRIP: tl.constexpr):
    """Which leaf a strip belongs to, and the first strip of that leaf."""
    leaf, first, edge = 0, 0, 0
    for i in tl.static_range(8):
        edge_before = edge
        edge += tl.cdiv(widths[i], STRIP)
        leaf = tl.where(strip >= edge, i + 1, leaf)
        first = tl.where(strip >= edge_before, edge_before, first)
    return leaf, first


@triton.jit
def _choice(leaf, options):
    """options[leaf]: an entry of a tuple that is only known when the kernel runs."""
    chosen = options[0]
    for i in tl.static_range(1, 8):
        chosen = tl.where(leaf == i, options[i], chosen)
    return chosen


@triton.jit
def _finite_rows(alive, row, members):
    """Which rows are finite members, and how many there are."""
    finite = tl.load(alive + row, mask=row < members, other=0) != 0
    return finite, tl.maximum(tl.sum(tl.where(finite, 1.0, 0.0)), 1.0)


@triton.jit
def _centred(x, finite, count, here):
    """Coordinates relative to the mean of the finite members; zero where they are not finite."""
    x = tl.where((tl.abs(x) < float("inf")) & finite[:, None], x, 0.0)
    centre = tl.sum(x, axis=0) / count
    return tl.where(finite[:, None] & here, x - centre[None, :], 0.0)


@triton.jit
def _gram_kernel(
    alive, out, bad_out, members, strips,
    z0, z1, z2, z3, z4, z5, z6, z7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    SIZE: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = tl.arange(0, SIZE)
    finite, count = _finite_rows(alive, row, members)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    spoilt = tl.zeros((SIZE, STRIP), tl.float32)
    widths = (w0, w1, w2, w3, w4, w5, w6, w7)
    for strip in range(program, strips, programs):
        leaf, first = _leaf_of(strip, widths, STRIP)
        z, width = _choice(leaf, (z0, z1, z2, z3, z4, z5, z6, z7)), _choice(leaf, widths)
        column = (strip - first) * STRIP + tl.arange(0, STRIP)
        here = (column[None, :] < width) & (row[:, None] < members)
        place = row[:, None].to(tl.int64) * width + column[None, :]
        x = tl.load(z + place, mask=here, other=0.0)
        spoilt += x * 0.0  # NaN for all that is not finite
        x = _centred(x, finite, count, here)
        total += tl.dot(x, tl.trans(x), input_precision=PRECISION)
    square = program * SIZE * SIZE + row[:, None] * SIZE + row[None, :]
    tl.store(out + square, total)
    tl.store(bad_out + program * SIZE + row, tl.sum(spoilt, axis=1))


@triton.jit
def _plus_kernel(
    B, alive, squares, members, strips, scale,
    d0, d1, d2, d3, d4, d5, d6, d7,
    z0, z1, z2, z3, z4, z5, z6, z7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    SIZE: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = tl.arange(0, SIZE)
    finite, count = _finite_rows(alive, row, members)
    inside = (row[:, None] < members) & (row[None, :] < members)
    matrix = tl.load(B + row[:, None] * members + row[None, :], mask=inside, other=0.0)
    length = tl.zeros((SIZE, STRIP), tl.float32)
    widths = (w0, w1, w2, w3, w4, w5, w6, w7)
    for strip in range(program, strips, programs):
        leaf, first = _leaf_of(strip, widths, STRIP)
        z, width = _choice(leaf, (z0, z1, z2, z3, z4, z5, z6, z7)), _choice(leaf, widths)
        drive = _choice(leaf, (d0, d1, d2, d3, d4, d5, d6, d7))
        out = _choice(leaf, (o0, o1, o2, o3, o4, o5, o6, o7))
        column = (strip - first) * STRIP + tl.arange(0, STRIP)
        here = (column[None, :] < width) & (row[:, None] < members)
        place = row[:, None].to(tl.int64) * width + column[None, :]
        own = tl.load(drive + place, mask=here, other=0.0)
        x = _centred(tl.load(z + place, mask=here, other=0.0), finite, count, here)
        moved = own + scale * tl.dot(matrix, x, input_precision=PRECISION)
        tl.store(out + place, moved, mask=here)
        length += own * own
    tl.store(squares + program * SIZE + row, tl.sum(length, axis=1))


def gram(leaves: Leaves, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrix [1, M, M] of the centred coordinates, and who is alive and finite [M]."""
    members, size = len(alive), _size(len(alive))
    strip, partial, bad = 1024 // size, [], []
    for places in _groups(leaves):
        group, widths, strips = _padded(leaves, places, strip)
        programs = min(strips, PROGRAMS)
        squares = torch.empty(programs, size, size, device=alive.device)
        spoilt = torch.empty(programs, size, device=alive.device)
        launch: Any = _gram_kernel[(programs,)]
        launch(
            alive, squares, spoilt, members, strips, *group, *widths,
            SIZE=size, STRIP=strip, **GRAM,
        )  # fmt: skip
        partial.append(squares)
        bad.append(spoilt)
    alive = alive & (torch.cat(bad).sum(0)[:members] == 0)
    total = torch.cat(partial).sum(0)[:members, :members]
    return torch.where(alive[:, None] & alive, total, 0.0)[None], alive


def plus_product(
    drives: Sequence[Tensor], B: Tensor, leaves: Leaves, alive: Tensor, scale: float
) -> tuple[list[Tensor], Tensor]:
    """drive + scale B z for each leaf, z centred; and the lengths of the drives [M]."""
    members, size = len(alive), _size(len(alive))
    drives = [drive.contiguous() for drive in drives]
    moved = [torch.empty_like(drive) for drive in drives]
    B, squares = B.contiguous(), []
    strip, options = _plus_options(size)
    for places in _groups(leaves):
        group, widths, strips = _padded(leaves, places, strip)
        own, out = (_padded(tensors, places, 1)[0] for tensors in (drives, moved))
        programs = min(strips, PROGRAMS)
        sums = torch.empty(programs, size, device=alive.device)
        launch: Any = _plus_kernel[(programs,)]
        launch(
            B, alive, sums, members, strips, scale, *own, *group, *out, *widths,
            SIZE=size, STRIP=strip, **options,
        )  # fmt: skip
        squares.append(sums)
    return moved, torch.cat(squares).sum(0)[:members].sqrt()


def _plus_options(size: int) -> tuple[int, dict[str, Any]]:
    """Width of a strip and how it is multiplied: few members are faster without tensor cores."""
    if size == 16:
        return 128, {"PRECISION": "ieee", "num_warps": 1}
    return 4096 // size, {"PRECISION": "tf32x3", "num_warps": 4}


def _groups(leaves: Leaves) -> Iterator[list[int]]:
    """Places of the leaves that are served together: rows that start aligned are read in blocks."""
    for aligned in (True, False):
        places = [i for i, leaf in enumerate(leaves) if (leaf.shape[-1] % 16 == 0) is aligned]
        for start in range(0, len(places), GROUP):
            yield places[start : start + GROUP]


def _padded(
    leaves: Sequence[Tensor], places: list[int], strip: int
) -> tuple[list[Tensor], list[int], int]:
    """Eight leaves and their widths, the missing ones of width zero, and the strips of all."""
    chosen = [leaves[i] for i in places]
    widths = [leaf.shape[-1] for leaf in chosen]
    strips = sum(triton.cdiv(width, strip) for width in widths)
    missing = GROUP - len(places)
    return [*chosen, *([chosen[0]] * missing)], [*widths, *([0] * missing)], strips


def _size(members: int) -> int:
    return max(16, triton.next_power_of_2(members))
