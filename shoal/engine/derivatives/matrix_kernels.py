"""How kernels go through a batch of images with channels last: a matrix of pixels and channels."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "SHARES",
    "STAGES",
    "Matrix",
    "add_shares",
    "channel",
    "grid_of_shares",
    "load",
    "tile",
    "total",
]

PASS = 1024
"""Numbers that a program of an elementwise pass takes."""

SUM = 2048
"""Numbers that a program of a sum holds at a time."""

WARPS = 2
"""Of a program: small ones find a place beside those of other members."""

COLUMNS = 64
"""Of a tile: so many numbers of half precision are one line of the cache."""

PROGRAMS = 528
"""That sum over rows: four for each multiprocessor of a large GPU."""

STAGES = tl.constexpr(3)
"""Tiles of a sum that are on their way at a time."""

SHARES = {"TOGETHER": 256, "COLUMNS": 8}
"""How many shares are added at a time, for how many channels."""


class Matrix:
    """A batch with channels last: rows are pixels, columns channels.

    Attributes:
        size: pixels and channels.
        passes: programs of an elementwise pass, down and across.
        pass_tile: what each of them takes.
        sums: programs of a sum over rows.
        sum_tile: what each of them holds at a time.
        strip: rows that it goes through.
    """

    def __init__(self, x: Tensor) -> None:
        self.width = x.shape[1]
        self.height = x.numel() // self.width
        self.size = (self.height, self.width)
        self.columns = min(COLUMNS, 1 << (self.width - 1).bit_length())
        self.across = -(-self.width // self.columns)
        self.pass_tile, self.sum_tile = self._tile(PASS), self._tile(SUM)
        self.passes = (-(-self.height // self.pass_tile["ROWS"]), self.across)
        tiles = -(-self.height // self.sum_tile["ROWS"])
        wanted = max(PROGRAMS // self.across, 1)
        self.strip = -(-tiles // min(tiles, wanted)) * self.sum_tile["ROWS"]
        self.sums = (-(-self.height // self.strip), self.across)

    def _tile(self, numbers: int) -> dict[str, Any]:
        rows = numbers // self.columns
        return {"ROWS": rows, "COLUMNS": self.columns, "num_warps": WARPS}

    def shares(self, count: int, like: Tensor) -> Tensor:
        """Room for what the programs have summed."""
        return like.new_empty(self.sums[0], count, self.width, dtype=torch.float32)

    def summed(self, shares: Tensor) -> Tensor:
        """[count, C]."""
        programs, count, width = shares.shape
        sums = shares.new_empty(count, width)
        add_shares[grid_of_shares(count * width)](shares, sums, programs, count * width, **SHARES)
        return sums


def grid_of_shares(width: int) -> tuple[int]:
    """Programs that add the shares of so many channels."""
    return (-(-width // SHARES["COLUMNS"]),)


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
def total(
    shares, columns, programs, width, stride, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums over the programs, whose shares lie `stride` numbers apart.

    Within the loop, tiles are added: to sum over a tile, its threads have to wait for each other.
    """
    found = tl.zeros([TOGETHER, COLUMNS], tl.float32)
    for start in range(0, programs, TOGETHER):
        rows = start + tl.arange(0, TOGETHER)
        inside = (rows[:, None] < programs) & (columns[None, :] < width)
        place = rows[:, None] * stride + columns[None, :]
        found += tl.load(shares + place, mask=inside, other=0.0)
    return tl.sum(found, 0)


@triton.jit
def add_shares(
    shares, sums, programs, width, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums over the programs."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    found = total(shares, columns, programs, width, width, TOGETHER, COLUMNS)
    tl.store(sums + columns, found, mask=columns < width)
