"""The two products with the coordinates as Triton kernels, each one read of them.

A program takes a strip of coordinates of all members into registers, centres it there, and either
multiplies it with itself or with B. Partial Gram matrices are written side by side and summed, so
that the result does not depend on the order in which the programs end. One launch serves eight
leaves, since most leaves of a network are much smaller than a launch is worth. The eight largest
come first: in a residual network they hold nine tenths of the weights.

A member with a number that is not finite has a Gram matrix of NaN in its row and column, and
nowhere else: entry (i, j) reads the coordinates of i and j alone.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.core.types import Leaves
from shoal.engine.kernels import few_member_kernels
from shoal.engine.kernels.strip_kernels import choice, leaf_of

__all__ = ["gram", "plus_product"]

GRAM: dict[str, Any] = {"PRECISION": "tf32x3", "num_warps": 1}
"""Products by tensor cores in three passes, which keep single precision. A product is too small to
be shared: with one warp to a program, each does all of its own and many are under way."""

PROGRAMS = 4224
"""Thirty-two for each multiprocessor of a large GPU."""

FEW = 12
"""Members up to which `few_member_kernels` has fewer instructions; 0 selects tensor cores."""

FEW_STRIP = 128
"""Coordinates in a strip for few members: four for each thread of a warp."""

FEW_PROGRAMS = {"gram": 1584, "plus": 1056}
"""Twelve and eight for each multiprocessor of a large GPU, as many as its registers hold."""

STRIPS_EACH = 4
"""Strips that a program multiplies before it writes a Gram matrix as large as one strip."""

GROUP = 8
"""Leaves that one launch serves."""


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
    alive, out, members, strips,
    z0, z1, z2, z3, z4, z5, z6, z7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    SIZE: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = tl.arange(0, SIZE)
    finite, count = _finite_rows(alive, row, members)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    widths = (w0, w1, w2, w3, w4, w5, w6, w7)
    for strip in range(program, strips, programs):
        leaf, first = leaf_of(strip, widths, STRIP)
        z, width = choice(leaf, (z0, z1, z2, z3, z4, z5, z6, z7)), choice(leaf, widths)
        column = (strip - first) * STRIP + tl.arange(0, STRIP)
        here = (column[None, :] < width) & (row[:, None] < members)
        place = row[:, None].to(tl.int64) * width + column[None, :]
        x = tl.load(z + place, mask=here, other=0.0)
        spoilt = tl.where(finite[:, None], x * 0.0, 0.0)  # NaN for all that is not finite
        x = _centred(x, finite, count, here) + spoilt
        total += tl.dot(x, tl.trans(x), input_precision=PRECISION)
    square = program * SIZE * SIZE + row[:, None] * SIZE + row[None, :]
    tl.store(out + square, total)


@triton.jit
def _sum_kernel(
    partial, alive, gram, alive_out, members, count, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row of the Gram matrix: the sum of its parts, and whether its member is finite."""
    member, column = tl.program_id(0), tl.arange(0, SIZE)
    total = tl.zeros((BLOCK, SIZE), tl.float32)
    for start in range(0, count, BLOCK):
        part = start + tl.arange(0, BLOCK)
        place = part[:, None].to(tl.int64) * (SIZE * SIZE) + member * SIZE + column[None, :]
        total += tl.load(partial + place, mask=part[:, None] < count, other=0.0)
    row = tl.sum(total, axis=0)
    own = tl.sum(tl.where(column == member, row, 0.0))
    finite = (tl.load(alive + member) != 0) & (own == own)
    row = tl.where(row == row, row, 0.0)
    tl.store(gram + member * members + column, row, mask=column < members)
    tl.store(alive_out + member, finite)


@triton.jit
def _plus_kernel(
    B, alive, squares, members, own_members, first_own, strips, scale,
    d0, d1, d2, d3, d4, d5, d6, d7,
    z0, z1, z2, z3, z4, z5, z6, z7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    m0, m1, m2, m3, m4, m5, m6, m7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    SIZE: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
    MULTIPLES: tl.constexpr, FROZEN: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = tl.arange(0, SIZE)
    finite, count = _finite_rows(alive, row, members)
    inside = (row[:, None] < own_members) & (row[None, :] < members)
    matrix = tl.load(B + row[:, None] * members + row[None, :], mask=inside, other=0.0)
    length = tl.zeros((SIZE, STRIP), tl.float32)
    widths = (w0, w1, w2, w3, w4, w5, w6, w7)
    for strip in range(program, strips, programs):
        leaf, first = leaf_of(strip, widths, STRIP)
        z, width = choice(leaf, (z0, z1, z2, z3, z4, z5, z6, z7)), choice(leaf, widths)
        drive = choice(leaf, (d0, d1, d2, d3, d4, d5, d6, d7))
        out = choice(leaf, (o0, o1, o2, o3, o4, o5, o6, o7))
        column = (strip - first) * STRIP + tl.arange(0, STRIP)
        here = (column[None, :] < width) & (row[:, None] < members)
        mine = (column[None, :] < width) & (row[:, None] < own_members)
        place = row[:, None].to(tl.int64) * width + column[None, :]
        own = tl.load(drive + place, mask=mine, other=0.0)
        x = tl.load(z + place, mask=here, other=0.0)
        if MULTIPLES:
            theta = x
            if FROZEN:  # the trained members come after the frozen ones
                theta = tl.load(z + first_own * width + place, mask=mine, other=0.0)
            own += choice(leaf, (m0, m1, m2, m3, m4, m5, m6, m7)) * theta
        x = _centred(x, finite, count, here)
        moved = own + scale * tl.dot(matrix, x, input_precision=PRECISION)
        tl.store(out + place, moved, mask=mine)
        length += own * own
    tl.store(squares + program * SIZE + row, tl.sum(length, axis=1))


@triton.jit
def _length_kernel(squares, out, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The norm of one member, from the squares of its parts."""
    member = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        part = start + tl.arange(0, BLOCK)
        total += tl.load(squares + part * SIZE + member, mask=part < count, other=0.0)
    tl.store(out + member, tl.sqrt(tl.sum(total)))


def gram(leaves: Leaves, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Gram matrix [1, M, M] of the centred coordinates, and who is alive and finite [M]."""
    members, size = len(alive), _size(len(alive))
    few, most = members <= FEW, FEW_PROGRAMS["gram"] if members <= FEW else PROGRAMS
    strip = FEW_STRIP if few else 1024 // size
    groups = [_padded(leaves, places, strip) for places in _groups(leaves)]
    programs = [min(triton.cdiv(strips, STRIPS_EACH), most) for _, _, strips in groups]
    partial = torch.empty(sum(programs), size, size, device=alive.device)
    kernel: Any = few_member_kernels.gram_kernel if few else _gram_kernel
    options = {"MEMBERS": members, "num_warps": 1} if few else GRAM
    begun = 0
    for (group, widths, strips), count in zip(groups, programs, strict=True):
        sizes = (strips,) if few else (members, strips)
        kernel[(count,)](
            alive, partial[begun:], *sizes, *group, *widths, SIZE=size, STRIP=strip, **options
        )
        begun += count
    total = torch.empty(1, members, members, device=alive.device)
    found = torch.empty_like(alive)
    launch: Any = _sum_kernel[(members,)]
    launch(partial, alive, total, found, members, begun, SIZE=size, BLOCK=4096 // size)
    return total, found


def plus_product(
    drives: Sequence[Tensor],
    B: Tensor,
    leaves: Leaves,
    alive: Tensor,
    scale: float,
    multiples: Sequence[float] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """drive + scale B z for each leaf, z centred, in place; and the lengths of the drives [m].

    Args:
        drives: of the trained members [m, D].
        B: [m, M]; the trained members are the last m of all M.
        leaves: coordinates of all members [M, 1, D].
        alive: finite members [M].
        scale: factor of the push.
        multiples: for each leaf, how often the drive has the coordinates added to it first, as a
            Gaussian prior requires; None for never.
    """
    members, own_members, size = len(alive), len(B), _size(len(alive))
    drives = [drive.contiguous() for drive in drives]
    compiling, frozen = torch.compiler.is_compiling(), members - own_members
    moved = [torch.empty_like(drive) for drive in drives] if compiling else drives
    factors = [0.0] * len(drives) if multiples is None else list(multiples)
    few = members <= FEW and not frozen
    most, (strip, options) = FEW_PROGRAMS["plus"] if few else PROGRAMS, _plus_options(size, few)
    chosen = list(_groups(leaves))
    groups = [_padded(leaves, places, strip) for places in chosen]
    programs = [min(strips, most) for _, _, strips in groups]
    squares, begun, B = torch.empty(sum(programs), size, device=alive.device), 0, B.contiguous()
    kernel: Any = few_member_kernels.plus_kernel if few else _plus_kernel
    options |= {"MEMBERS": members} if few else {"FROZEN": frozen > 0}
    for places, (group, widths, strips), count in zip(chosen, groups, programs, strict=True):
        own, out = (_padded(tensors, places, 1)[0] for tensors in (drives, moved))
        shares = [*(factors[i] for i in places), *[0.0] * (GROUP - len(places))]
        sizes = (strips,) if few else (members, own_members, frozen, strips)
        kernel[(count,)](
            B, alive, squares[begun:], *sizes, scale, *own, *group, *out, *shares, *widths,
            SIZE=size, STRIP=strip, MULTIPLES=multiples is not None, **options,
        )  # fmt: skip
        begun += count
    lengths = torch.empty(own_members, device=alive.device)
    launch: Any = _length_kernel[(own_members,)]
    launch(squares, lengths, begun, SIZE=size, BLOCK=1024)
    return moved, lengths


def _plus_options(size: int, few: bool) -> tuple[int, dict[str, Any]]:
    """Width of a strip and how it is multiplied: few members are faster without tensor cores."""
    if few:
        return FEW_STRIP, {"num_warps": 1}
    if size == 16:
        return 128, {"PRECISION": "ieee", "num_warps": 1}
    return 4096 // size, {"PRECISION": "tf32x3", "num_warps": 4}


def _groups(leaves: Leaves) -> Iterator[list[int]]:
    """Places of the leaves that are served together: rows that start aligned are read in blocks."""
    largest_first = sorted(range(len(leaves)), key=lambda i: -leaves[i].shape[-1])
    for aligned in (True, False):
        places = [i for i in largest_first if (leaves[i].shape[-1] % 16 == 0) is aligned]
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
