"""Members' tensors [M, ..., C] as matrices of rows [M, N, C], and how kernels go through them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RowOrder", "Strips", "as_rows"]


class RowOrder(NamedTuple):
    """How the axes between members and features were folded into rows.

    Attributes:
        sizes: sizes of these axes.
        order: their order in memory.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    def restored(self, rows: Tensor) -> Tensor:
        """Rows [M, N, C] as [M, ..., C], without a copy."""
        turned = rows.reshape(len(rows), *(self.sizes[i] for i in self.order), rows.shape[-1])
        back = [self.order.index(i) + 1 for i in range(len(self.sizes))]
        return turned.permute(0, *back, turned.ndim - 1)

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor [M, ..., C] of these sizes as rows of this order."""
        turned = tensor.permute(0, *(i + 1 for i in self.order), tensor.ndim - 1)
        return turned.reshape(len(tensor), -1, tensor.shape[-1])


def as_rows(tensor: Tensor) -> tuple[Tensor, RowOrder]:
    """A tensor [M, ..., C] as rows [M, N, C] in the order of its memory."""
    sizes = tuple(tensor.shape[1:-1])
    order = sorted(range(len(sizes)), key=lambda i: -tensor.stride(i + 1))
    row_order = RowOrder(sizes, tuple(order))
    return row_order.rows(tensor), row_order


class Strips:
    """How about `programs` programs go through rows [M, N, C], some rows (`tile`) at a time.

    Attributes:
        size: rows, columns, and rows of a strip.
        programs: number of strips per member.
    """

    def __init__(self, rows: Tensor, tile: int, programs: int) -> None:
        members, height, width = rows.shape
        strips = max(1, programs // members)
        # Whole tiles, so that only the last strip has rows to leave out.
        strip = max(tile, math.ceil(height / strips / tile) * tile)
        self.size = (height, width, strip)
        self.programs = max(1, math.ceil(height / strip))
        self.members, self.width = members, width

    def shares(self, count: int, like: Tensor) -> Tensor:
        """Room for `count` sums of each program."""
        shape = (self.members, self.programs, count, self.width)
        return torch.empty(shape, dtype=torch.float32, device=like.device)

    @staticmethod
    def summed(shares: Tensor) -> Tensor:
        """Sums over all rows [count, M, C]."""
        return shares.sum(1).transpose(0, 1)
