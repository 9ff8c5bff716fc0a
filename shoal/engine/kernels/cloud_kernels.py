"""The two products with the coordinates as Triton kernels, each one read of them.

A program takes a strip of coordinates of all members into registers, centres it there, and either
multiplies it with itself or with B. Partial Gram matrices are written side by side and summed, so
that the result does not depend on the order in which the programs end. One launch serves eight
leaves, since most leaves of a network are much smaller than a launch is worth. The eight largest
come first: in a residual network they hold nine tenths of the weights.

A member with a number that is not finite has a Gram matrix of NaN in its row and column, and
nowhere else: entry (i, j) reads the coordinates of i and j alone.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.core.types import Leaves
from shoal.engine.kernels import few_member_kernels
from shoal.engine.kernels.interaction_kernels import Matrices, new_matrices, store_matrices
from shoal.engine.kernels.strip_kernels import choice, leaf_of
from shoal.engine.kernels.update_kernels import Update, moved

__all__ = ["few_coordinates", "gram", "gram_and_matrices", "move", "plus_product"]

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

FEW_PARTS = 64
"""Parts of a Gram matrix that one program sums faster than another launch begins."""

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
def _gram_of_strips(
    alive, members, strips,
    z0, z1, z2, z3, z4, z5, z6, z7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    SIZE: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The Gram matrix of this program's strips."""
    row = tl.arange(0, SIZE)
    finite, count = _finite_rows(alive, row, members)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    widths = (w0, w1, w2, w3, w4, w5, w6, w7)
    for strip in range(tl.program_id(0), strips, tl.num_programs(0)):
        leaf, first = leaf_of(strip, widths, STRIP)
        z, width = choice(leaf, (z0, z1, z2, z3, z4, z5, z6, z7)), choice(leaf, widths)
        column = (strip - first) * STRIP + tl.arange(0, STRIP)
        here = (column[None, :] < width) & (row[:, None] < members)
        place = row[:, None].to(tl.int64) * width + column[None, :]
        x = tl.load(z + place, mask=here, other=0.0)
        spoilt = tl.where(finite[:, None], x * 0.0, 0.0)  # NaN for all that is not finite
        x = _centred(x, finite, count, here) + spoilt
        total += tl.dot(x, tl.trans(x), input_precision=PRECISION)
    return total


@triton.jit
def _gram_kernel(
    alive, out, members, strips,
    z0, z1, z2, z3, z4, z5, z6, z7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    SIZE: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    total = _gram_of_strips(
        alive, members, strips, z0, z1, z2, z3, z4, z5, z6, z7, w0, w1, w2, w3, w4, w5, w6, w7,
        SIZE, STRIP, PRECISION,
    )  # fmt: skip
    row = tl.arange(0, SIZE)
    square = tl.program_id(0) * SIZE * SIZE + row[:, None] * SIZE + row[None, :]
    tl.store(out + square, total)


@triton.jit
def _gram_and_matrices_kernel(
    alive, partial, done, gram, alive_out, K_out, B_out, mix_out, summary, lengths,
    members, strips, h2_fixed,
    z0, z1, z2, z3, z4, z5, z6, z7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    SIZE: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    KERNEL: tl.constexpr, FLOW: tl.constexpr,
    MEDIAN: tl.constexpr, LOGARITHM: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """The program that ends last sums all parts, always in the same order, and goes on alone."""
    programs = tl.num_programs(0)
    total = _gram_of_strips(
        alive, members, strips, z0, z1, z2, z3, z4, z5, z6, z7, w0, w1, w2, w3, w4, w5, w6, w7,
        SIZE, STRIP, PRECISION,
    )  # fmt: skip
    row = tl.arange(0, SIZE)
    square = row[:, None] * SIZE + row[None, :]
    tl.store(partial + tl.program_id(0) * SIZE * SIZE + square, total)
    tl.debug_barrier()  # all threads have written before one of them says so
    if tl.atomic_add(done, 1) == programs - 1:
        tl.store(done, 0)
        parts = tl.zeros((BLOCK, SIZE, SIZE), tl.float32)
        for start in range(0, programs, BLOCK):
            part = start + tl.arange(0, BLOCK)
            place = part[:, None, None] * (SIZE * SIZE) + square[None, :, :]
            here = (part < programs)[:, None, None]
            parts += tl.load(partial + place, mask=here, other=0.0, cache_modifier=".cg")
        G = tl.sum(parts, axis=0)
        own = tl.sum(tl.where(row[:, None] == row[None, :], G, 0.0), axis=1)
        finite = (tl.load(alive + row, mask=row < members, other=0) != 0) & (own == own)
        G = tl.where(G == G, G, 0.0)
        inside = (row[:, None] < members) & (row[None, :] < members)
        tl.store(gram + row[:, None] * members + row[None, :], G, mask=inside)
        tl.store(alive_out + row, finite, mask=row < members)
        store_matrices(
            G, finite, K_out, B_out, mix_out, summary, lengths, members, h2_fixed,
            SIZE, KERNEL, FLOW, MEDIAN, LOGARITHM, EVERY,
        )  # fmt: skip


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
    p0, p1, p2, p3, p4, p5, p6, p7,
    q0, q1, q2, q3, q4, q5, q6, q7,
    m0, m1, m2, m3, m4, m5, m6, m7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    rate, step, a, b, eps, decay,
    SIZE: tl.constexpr, STRIP: tl.constexpr, PRECISION: tl.constexpr, MULTIPLES: tl.constexpr,
    FROZEN: tl.constexpr, MEASURED: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    rate, step = tl.load(rate), tl.load(step)
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
        theta = x
        if MULTIPLES:
            if FROZEN:  # the trained members come after the frozen ones
                theta = tl.load(z + first_own * width + place, mask=mine, other=0.0)
            own += choice(leaf, (m0, m1, m2, m3, m4, m5, m6, m7)) * theta
        x = _centred(x, finite, count, here)
        velocity = own + scale * tl.dot(matrix, x, input_precision=PRECISION)
        after = moved(
            theta, velocity, choice(leaf, (p0, p1, p2, p3, p4, p5, p6, p7)),
            choice(leaf, (q0, q1, q2, q3, q4, q5, q6, q7)), place, mine,
            rate, step, a, b, eps, decay, UPDATE,
        )  # fmt: skip
        tl.store(out + place, after, mask=mine)
        length += own * own
    if MEASURED:
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


def few_coordinates(leaves: Leaves) -> bool:
    """Whether one program can sum the parts of the Gram matrix, and make the matrices of it."""
    strips = sum(triton.cdiv(leaf.shape[-1], 1024 // _size(len(leaf))) for leaf in leaves)
    return len(leaves) <= GROUP and strips <= FEW_PARTS


def gram_and_matrices(
    leaves: Leaves,
    alive: Tensor,
    kernel: str,
    flow: str,
    h2: float | None = None,
    logarithm: bool = True,
    every: bool = False,
) -> tuple[Tensor, Tensor, Matrices]:
    """`gram` of few coordinates and `interaction_kernels.matrices` of it, by one launch."""
    members, size = len(alive), _size(len(alive))
    strip = 1024 // size
    group, widths, strips = _padded(leaves, list(range(len(leaves))), strip)
    partial = torch.empty(strips, size, size, device=alive.device)
    total, found = torch.empty(1, members, members, device=alive.device), torch.empty_like(alive)
    result, tensors = new_matrices(alive, flow)
    launch: Any = _gram_and_matrices_kernel[(strips,)]
    launch(
        alive, partial, _counters(alive.device).take(), total, found, *tensors, members, strips,
        1.0 if h2 is None else h2, *group, *widths, SIZE=size, STRIP=strip, PRECISION="tf32x3",
        BLOCK=max(4096 // size**2, 1), KERNEL=kernel, FLOW=flow, MEDIAN=h2 is None,
        LOGARITHM=logarithm, EVERY=every, num_warps=4,
    )  # fmt: skip
    return total, found, result


class _Counters:
    """How many programs of a launch have ended; the last one sets its counter back.

    A captured launch keeps a counter of its own, since graphs may run beside each other. Other
    launches take turns.
    """

    HALF = 4096

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.zeros(2, self.HALF, dtype=torch.int32, device=device)
        self.used = [0, 0]

    def take(self) -> Tensor:
        """A counter at zero."""
        captured = self.memory.is_cuda and torch.cuda.is_current_stream_capturing()
        place = self.used[captured] % self.HALF
        self.used[captured] += 1
        return self.memory[int(captured), place]


_counters = functools.cache(_Counters)


def plus_product(
    drives: Sequence[Tensor],
    B: Tensor,
    leaves: Leaves,
    alive: Tensor,
    scale: float,
    multiples: Sequence[float] | None = None,
    measured: bool = True,
) -> tuple[list[Tensor], Tensor | None]:
    """drive + scale B z for each leaf, z centred, in place; and the lengths of the drives [m].

    Args:
        drives: of the trained members [m, D].
        B: [m, M]; the trained members are the last m of all M.
        leaves: coordinates of all members [M, 1, D].
        alive: finite members [M].
        scale: factor of the push.
        multiples: for each leaf, how often the drive has the coordinates added to it first, as a
            Gaussian prior requires; None for never.
        measured: whether lengths are wanted; None comes in their place otherwise.
    """
    drives = [drive.contiguous() for drive in drives]
    compiling = torch.compiler.is_compiling()
    out = [torch.empty_like(drive) for drive in drives] if compiling else drives
    still = Update.none(drives, B)
    return out, _plus(drives, out, B, leaves, alive, scale, multiples, still, measured)


def move(
    drives: Sequence[Tensor],
    B: Tensor,
    leaves: Leaves,
    alive: Tensor,
    scale: float,
    multiples: Sequence[float] | None,
    update: Update,
) -> Tensor:
    """Move the weights by an optimiser along drive + scale B z; returns the lengths of the drives.

    The arguments are those of `plus_product`; the leaves are the weights of the trained members,
    who are all there are.
    """
    drives = [drive.contiguous() for drive in drives]
    lengths = _plus(drives, leaves, B, leaves, alive, scale, multiples, update, True)
    assert lengths is not None
    return lengths


def _plus(
    drives: Sequence[Tensor],
    out: Sequence[Tensor],
    B: Tensor,
    leaves: Leaves,
    alive: Tensor,
    scale: float,
    multiples: Sequence[float] | None,
    update: Update,
    measured: bool,
) -> Tensor | None:
    members, own_members, size = len(alive), len(B), _size(len(alive))
    frozen = members - own_members
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
        several = drives, out, update.first, update.second
        own, to, *states = (_padded(tensors, places, 1)[0] for tensors in several)
        shares = [*(factors[i] for i in places), *[0.0] * (GROUP - len(places))]
        sizes = (strips,) if few else (members, own_members, frozen, strips)
        kernel[(count,)](
            B, alive, squares[begun:], *sizes, scale, *own, *group, *to, *states[0], *states[1],
            *shares, *widths, update.rate, update.step, *update.numbers, SIZE=size, STRIP=strip,
            MULTIPLES=multiples is not None, MEASURED=measured, UPDATE=update.kind, **options,
        )  # fmt: skip
        begun += count
    if not measured:
        return None
    lengths = torch.empty(own_members, device=alive.device)
    launch: Any = _length_kernel[(own_members,)]
    launch(squares, lengths, begun, SIZE=size, BLOCK=1024)
    return lengths


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
