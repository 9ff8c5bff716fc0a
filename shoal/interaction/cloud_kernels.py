"""The two products with the coordinates as Triton kernels, each one read of them.

A program takes a strip of coordinates of all members into registers, centres it there, and either
multiplies it with itself or with B. Partial Gram matrices are written side by side and summed, so
that the result does not depend on the order in which the programs end.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.core.types import Leaves

__all__ = ["gram", "plus_product"]

OPTIONS: dict[str, Any] = {"STRIP": 128, "PRECISION": "tf32x3", "num_warps": 4}
"""Coordinates in a strip; products by tensor cores in three passes, which keep single precision."""

PROGRAMS = 1056
"""Eight for each multiprocessor of a large GPU; each goes through two strips or more."""


@triton.jit
def _strip(z, alive, row, column, members, width, inside):
    """Centred coordinates of the living, and how many of each member's are not finite."""
    here = inside & (column[None, :] < width) & (row[:, None] < members)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    x = tl.load(z + place, mask=here, other=0.0)
    lives = tl.load(alive + row, mask=row < members, other=0) != 0
    finite = tl.abs(x) < float("inf")
    bad = tl.sum(tl.where(finite, 0.0, 1.0), axis=1)
    x = tl.where(finite & lives[:, None], x, 0.0)
    count = tl.maximum(tl.sum(tl.where(lives, 1.0, 0.0)), 1.0)
    centre = tl.sum(x, axis=0) / count
    return tl.where(lives[:, None] & here, x - centre[None, :], 0.0), bad


@triton.jit
def _gram_kernel(
    z,
    alive,
    out,
    bad_out,
    members,
    width,
    strips,
    SIZE: tl.constexpr,
    STRIP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    worst = tl.zeros((SIZE,), tl.float32)
    for strip in range(program, strips, programs):
        column = strip * STRIP + tl.arange(0, STRIP)
        x, bad = _strip(z, alive, row, column, members, width, True)
        total += tl.dot(x, tl.trans(x), input_precision=PRECISION)
        worst += bad
    square = program * SIZE * SIZE + row[:, None] * SIZE + row[None, :]
    tl.store(out + square, total)
    tl.store(bad_out + program * SIZE + row, worst)


@triton.jit
def _plus_kernel(
    drive,
    B,
    z,
    alive,
    out,
    squares,
    members,
    width,
    scale,
    SIZE: tl.constexpr,
    STRIP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.arange(0, SIZE)
    column = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    x, _ = _strip(z, alive, row, column, members, width, True)
    inside = (row[:, None] < members) & (row[None, :] < members)
    matrix = tl.load(B + row[:, None] * members + row[None, :], mask=inside, other=0.0)
    here = (row[:, None] < members) & (column[None, :] < width)
    place = row[:, None].to(tl.int64) * width + column[None, :]
    own = tl.load(drive + place, mask=here, other=0.0)
    moved = own + scale * tl.dot(matrix, x, input_precision=PRECISION)
    tl.store(out + place, moved, mask=here)
    tl.store(squares + tl.program_id(0) * SIZE + row, tl.sum(own * own, axis=1))


def gram(leaves: Leaves, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrix [1, M, M] of the centred coordinates, and who is alive and finite [M]."""
    members, size = len(alive), _size(len(alive))
    partial, bad = [], []
    for leaf in leaves:
        width = leaf.shape[-1]
        strips = triton.cdiv(width, OPTIONS["STRIP"])
        programs = min(triton.cdiv(strips, 2), PROGRAMS)
        squares = torch.empty(programs, size, size, device=leaf.device)
        counts = torch.empty(programs, size, device=leaf.device)
        launch: Any = _gram_kernel[(programs,)]
        launch(leaf, alive, squares, counts, members, width, strips, SIZE=size, **OPTIONS)
        partial.append(squares)
        bad.append(counts)
    alive = alive & (torch.cat(bad).sum(0)[:members] == 0)
    total = torch.cat(partial).sum(0)[:members, :members]
    return torch.where(alive[:, None] & alive, total, 0.0)[None], alive


def plus_product(
    drives: Sequence[Tensor], B: Tensor, leaves: Leaves, alive: Tensor, scale: float
) -> tuple[list[Tensor], Tensor]:
    """drive + scale B z for each leaf, z centred; and the lengths of the drives [M]."""
    members, size = len(alive), _size(len(alive))
    B = B.contiguous()
    moved, squares = [], []
    for drive, leaf in zip(drives, leaves, strict=True):
        drive, width = drive.contiguous(), leaf.shape[-1]
        out, strips = torch.empty_like(drive), triton.cdiv(width, OPTIONS["STRIP"])
        sums = torch.empty(strips, size, device=drive.device)
        launch: Any = _plus_kernel[(strips,)]
        launch(drive, B, leaf, alive, out, sums, members, width, scale, SIZE=size, **OPTIONS)
        moved.append(out)
        squares.append(sums)
    return moved, torch.cat(squares).sum(0)[:members].sqrt()


def _size(members: int) -> int:
    return max(16, triton.next_power_of_2(members))
