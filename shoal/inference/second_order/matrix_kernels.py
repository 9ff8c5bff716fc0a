"""How kernels go through a batch of images with channels last: a matrix of pixels and channels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Matrix", "add_shares", "channel", "load", "tile"]

TILE = 2048
"""Numbers that a program holds at a time."""

COLUMNS = 64
"""Of a tile: so many numbers of half precision are one line of the cache."""

PROGRAMS = 528
"""That sum over rows: four for each multiprocessor of a large GPU."""


class Matrix:
    """A batch with channels last: rows are pixels, columns channels."""

    def __init__(self, x: Tensor) -> None:
        self.shape, self.width = x.shape, x.shape[1]
        self.height = x.numel() // self.width
        self.columns = min(COLUMNS, 1 << (self.width - 1).bit_length())
        self.rows = TILE // self.columns
        self.across = -(-self.width // self.columns)
        tiles = -(-self.height // self.rows)
        wanted = max(PROGRAMS // self.across, 1)
        self.strip = -(-tiles // min(tiles, wanted)) * self.rows
        self.programs = -(-self.height // self.strip)
        self.tile: dict[str, Any] = {"ROWS": self.rows, "COLUMNS": self.columns}
        self.elementwise = (tiles, self.across)
        self.strips = (self.programs, self.across)
        self.size = (self.height, self.width)

    def shares(self, count: int, like: Tensor) -> Tensor:
        """Room for what the programs have summed."""
        return like.new_empty(self.programs, count, self.width, dtype=torch.float32)

    def summed(self, shares: Tensor) -> Tensor:
        """[count, C]."""
        programs, count, width = shares.shape
        sums = shares.new_empty(count, width)
        grid = (-(-count * width // 16),)
        add_shares[grid](shares, sums, programs, count * width, PROGRAMS=64, COLUMNS=16)
        return sums


@triton.jit
def tile(row, height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Places of the numbers of a tile, which of them exist, and its columns."""
    rows = row + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    return rows[:, None].to(tl.int64) * width + columns[None, :], inside, columns


@triton.jit
def load(t, place, inside):
    return tl.load(t + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def channel(t, columns, width, default, GIVEN: tl.constexpr):
    """One number for each column."""
    if GIVEN:
        return tl.load(t + columns, mask=columns < width, other=0.0).to(tl.float32)
    else:
        return tl.full(columns.shape, default, tl.float32)


@triton.jit
def add_shares(
    shares, sums, programs, width, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums over the programs."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = columns < width
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, programs, PROGRAMS):
        rows = start + tl.arange(0, PROGRAMS)
        inside = (rows[:, None] < programs) & here[None, :]
        place = rows[:, None] * width + columns[None, :]
        total += tl.sum(tl.load(shares + place, mask=inside, other=0.0), 0)
    tl.store(sums + columns, total, mask=here)
