"""The two products with the coordinates for few members: one thread has a column of all members.

With the members as separate vectors no row is padded, nothing is exchanged between threads, and the
Gram matrix is half as much work, since it is symmetric. This takes a third of the instructions of
products by tensor cores, which spend theirs on splitting numbers and on sixteen rows for ten
members. The unrolled code grows with the square of their number.
"""

import triton
import triton.language as tl

from shoal.engine.kernels.strip_kernels import choice, leaf_of
from shoal.engine.kernels.update_kernels import moved

__all__ = ["gram_kernel", "plus_kernel"]


@triton.jit
def _alive(alive, MEMBERS: tl.constexpr):
    """Which members are finite, and how many."""
    finite, count = (), 0.0
    for i in tl.static_range(MEMBERS):
        sound = tl.load(alive + i) != 0
        finite = finite + (sound,)
        count += tl.where(sound, 1.0, 0.0)
    return finite, tl.maximum(count, 1.0)


@triton.jit
def _rows(z, width, column, finite, count, MEMBERS: tl.constexpr):
    """Coordinates of every member, and their mean over finite members."""
    xs, centre = (), tl.zeros_like(column).to(tl.float32)
    for i in tl.static_range(MEMBERS):
        place = tl.cast(i, tl.int64) * width + column
        x = tl.load(z + place, mask=column < width, other=0.0)
        xs = xs + (x,)
        centre += tl.where((tl.abs(x) < float("inf")) & finite[i], x, 0.0)
    return xs, centre / count


@triton.jit
def gram_kernel(
    alive, out, strips,
    z0, z1, z2, z3, z4, z5, z6, z7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    MEMBERS: tl.constexpr, SIZE: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """Partial Gram matrices [programs, SIZE, SIZE] of the centred coordinates."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    finite, count = _alive(alive, MEMBERS)
    totals = ()
    for _ in tl.static_range(MEMBERS * (MEMBERS + 1) // 2):
        totals = totals + (tl.zeros((STRIP // 4,), tl.float32),)
    widths = (w0, w1, w2, w3, w4, w5, w6, w7)
    for strip in range(program, strips, programs):
        leaf, first = leaf_of(strip, widths, STRIP)
        z, width = choice(leaf, (z0, z1, z2, z3, z4, z5, z6, z7)), choice(leaf, widths)
        column = (strip - first) * STRIP + tl.arange(0, STRIP)
        xs, centre = _rows(z, width, column, finite, count, MEMBERS)
        ys, more = (), ()
        for i in tl.static_range(MEMBERS):
            y = tl.where(tl.abs(xs[i]) < float("inf"), xs[i] - centre, float("nan"))
            ys = ys + (tl.where(finite[i], y, 0.0),)
        for i in tl.static_range(MEMBERS):
            for j in tl.static_range(i + 1):
                products = tl.reshape(ys[i] * ys[j], (STRIP // 4, 4))
                more = more + (totals[i * (i + 1) // 2 + j] + tl.sum(products, axis=1),)
        totals = more
    for i in tl.static_range(MEMBERS):
        for j in tl.static_range(i + 1):
            total = tl.sum(totals[i * (i + 1) // 2 + j])
            tl.store(out + program * SIZE * SIZE + i * SIZE + j, total)
            tl.store(out + program * SIZE * SIZE + j * SIZE + i, total)


@triton.jit
def plus_kernel(
    B, alive, squares, strips, scale,
    d0, d1, d2, d3, d4, d5, d6, d7,
    z0, z1, z2, z3, z4, z5, z6, z7,
    o0, o1, o2, o3, o4, o5, o6, o7,
    p0, p1, p2, p3, p4, p5, p6, p7,
    q0, q1, q2, q3, q4, q5, q6, q7,
    m0, m1, m2, m3, m4, m5, m6, m7,
    w0, w1, w2, w3, w4, w5, w6, w7,
    rate, step, a, b, eps, decay,
    MEMBERS: tl.constexpr, SIZE: tl.constexpr, STRIP: tl.constexpr, MULTIPLES: tl.constexpr,
    MEASURED: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """drive + multiple * coordinates + scale B z, or weights moved by it; squares of the drives."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    finite, count = _alive(alive, MEMBERS)
    lengths, matrix = (), ()
    rate, step = tl.load(rate), tl.load(step)
    for i in tl.static_range(MEMBERS):
        lengths = lengths + (tl.zeros((STRIP,), tl.float32),)
        for j in tl.static_range(MEMBERS):
            matrix = matrix + (scale * tl.load(B + i * MEMBERS + j),)
    widths = (w0, w1, w2, w3, w4, w5, w6, w7)
    for strip in range(program, strips, programs):
        leaf, first = leaf_of(strip, widths, STRIP)
        z, width = choice(leaf, (z0, z1, z2, z3, z4, z5, z6, z7)), choice(leaf, widths)
        drive = choice(leaf, (d0, d1, d2, d3, d4, d5, d6, d7))
        out = choice(leaf, (o0, o1, o2, o3, o4, o5, o6, o7))
        first_state = choice(leaf, (p0, p1, p2, p3, p4, p5, p6, p7))
        second_state = choice(leaf, (q0, q1, q2, q3, q4, q5, q6, q7))
        multiple = choice(leaf, (m0, m1, m2, m3, m4, m5, m6, m7))
        column = (strip - first) * STRIP + tl.arange(0, STRIP)
        xs, centre = _rows(z, width, column, finite, count, MEMBERS)
        ys, more = (), ()
        for i in tl.static_range(MEMBERS):
            sound = (tl.abs(xs[i]) < float("inf")) & finite[i]
            ys = ys + (tl.where(sound, xs[i] - centre, 0.0),)
        for i in tl.static_range(MEMBERS):
            place = tl.cast(i, tl.int64) * width + column
            own = tl.load(drive + place, mask=column < width, other=0.0)
            if MULTIPLES:
                own += multiple * xs[i]
            more = more + (lengths[i] + own * own,)
            for j in tl.static_range(MEMBERS):
                own += matrix[i * MEMBERS + j] * ys[j]
            own = moved(
                xs[i], own, first_state, second_state, place, column < width,
                rate, step, a, b, eps, decay, UPDATE,
            )  # fmt: skip
            tl.store(out + place, own, mask=column < width)
        lengths = more
    if MEASURED:
        for i in tl.static_range(MEMBERS):
            tl.store(squares + program * SIZE + i, tl.sum(lengths[i]))
