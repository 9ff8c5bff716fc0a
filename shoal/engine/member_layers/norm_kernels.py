"""Layer and RMS normalisation of rows with what is added before them, as Triton kernels.

Rows [M, N, C] belong to members, which have a scale γ, a shift β and a bias of their own [M, C]. A
program holds whole rows, so that their means need no pass of their own, and goes through a strip of
them. Sums over rows leave a program as its share [M, programs, C].

    s = x + residual + bias,  h = (s - <s>) r,  y = γ h + β,  r = 1 / std.

CENTRED is False for RMS normalisation, which subtracts no mean.
"""

import triton
import triton.language as tl

__all__ = ["add_norm", "norm_back", "norm_twice"]


@triton.jit
def _tile(row, last, width, ROWS: tl.constexpr, C: tl.constexpr):
    """Places of a tile of rows in the matrix of one member, and which of them exist."""
    rows, columns = row + tl.arange(0, ROWS), tl.arange(0, C)
    place = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return place, (rows < last)[:, None] & (columns < width)[None, :]


@triton.jit
def _numbers(pointer, member, columns, width, default, GIVEN: tl.constexpr):
    """Numbers [1, C] of a member; a constant where they are not given."""
    if GIVEN:
        found = tl.load(pointer + member * width + columns, mask=columns < width, other=0.0)
        return found.to(tl.float32)[None, :]
    else:
        return tl.full([1, columns.shape[0]], default, tl.float32)


@triton.jit
def _normalised(s, inside, width, eps, CENTRED: tl.constexpr):
    """h and r of rows s."""
    if CENTRED:
        s = tl.where(inside, s - (tl.sum(s, 1) / width)[:, None], 0.0)
    r = tl.rsqrt(tl.sum(s * s, 1) / width + eps)[:, None]
    return s * r, r


@triton.jit
def _mean(t, width):
    return (tl.sum(t, 1) / width)[:, None]


@triton.jit
def _projected(t, h, inside, width, CENTRED: tl.constexpr):
    """t - <t> - h <t h>."""
    found = t - h * _mean(t * h, width)
    if CENTRED:
        found = tl.where(inside, found - _mean(t, width), 0.0)
    return found


@triton.jit
def add_norm(
    x, residual, bias, gamma, beta, s, y, height, width, strip, eps, RESIDUAL: tl.constexpr,
    BIASED: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, CENTRED: tl.constexpr,
    ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """s, if anything is added, and y."""
    member, first = tl.program_id(1), tl.program_id(0) * strip
    start, last = member.to(tl.int64) * height * width, tl.minimum(first + strip, height)
    columns = tl.arange(0, C)
    scale = _numbers(gamma, member, columns, width, 1.0, SCALED)
    shift = _numbers(beta, member, columns, width, 0.0, SHIFTED)
    offset = _numbers(bias, member, columns, width, 0.0, BIASED)
    for row in tl.range(first, last, ROWS, num_stages=2):
        place, inside = _tile(row, last, width, ROWS, C)
        place += start
        found = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + offset
        if RESIDUAL:
            found += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL or BIASED:
            # What is stored is what later passes normalise.
            found = found.to(s.dtype.element_ty)
            tl.store(s + place, found, mask=inside)
            found = found.to(tl.float32)
        h, _ = _normalised(found, inside, width, eps, CENTRED)
        tl.store(y + place, (scale * h + shift).to(y.dtype.element_ty), mask=inside)


@triton.jit
def norm_back(
    s, at_y, at_s, gamma, at_x, shares, height, width, strip, eps, BESIDE: tl.constexpr,
    SUMMED: tl.constexpr, SCALED: tl.constexpr, CENTRED: tl.constexpr, ROWS: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """at_s + r (a - <a> - h <a h>) with a = γ g, and shares of Σ g h, Σ g and the sum of it."""
    member, first = tl.program_id(1), tl.program_id(0) * strip
    start, last = member.to(tl.int64) * height * width, tl.minimum(first + strip, height)
    columns = tl.arange(0, C)
    scale = _numbers(gamma, member, columns, width, 1.0, SCALED)
    along = tl.zeros([ROWS, C], tl.float32)
    upper, total = along, along
    for row in tl.range(first, last, ROWS, num_stages=2):
        place, inside = _tile(row, last, width, ROWS, C)
        place += start
        values = tl.load(s + place, mask=inside, other=0.0).to(tl.float32)
        h, r = _normalised(values, inside, width, eps, CENTRED)
        g = tl.load(at_y + place, mask=inside, other=0.0).to(tl.float32)
        found = r * _projected(scale * g, h, inside, width, CENTRED)
        if BESIDE:
            found += tl.load(at_s + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(at_x + place, found.to(at_x.dtype.element_ty), mask=inside)
        if SUMMED:
            along += g * h
            upper += g
            total += found
    if SUMMED:
        share = shares + (member * tl.num_programs(0) + tl.program_id(0)) * 3 * width + columns
        tl.store(share, tl.sum(along, 0), mask=columns < width)
        tl.store(share + width, tl.sum(upper, 0), mask=columns < width)
        tl.store(share + 2 * width, tl.sum(total, 0), mask=columns < width)


@triton.jit
def norm_twice(
    s, at_y, u, gamma, at_g, at_s, shares, height, width, strip, eps, SCALED: tl.constexpr,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Derivative of `norm_back` at g and s for a cotangent u, and shares of that at γ.

    at_g = γ r (u - <u> - h <u h>), at_γ = Σ g r (u - <u> - h <u h>),
    at_s = r^2 (2 h <a h><u h> - h A - <u h>(a - <a>) - <a h>(u - <u>)),
    A = <a u> - <a><u> - <a h><u h>.
    """
    member, first = tl.program_id(1), tl.program_id(0) * strip
    start, last = member.to(tl.int64) * height * width, tl.minimum(first + strip, height)
    columns = tl.arange(0, C)
    scale = _numbers(gamma, member, columns, width, 1.0, SCALED)
    along = tl.zeros([ROWS, C], tl.float32)
    for row in tl.range(first, last, ROWS, num_stages=2):
        place, inside = _tile(row, last, width, ROWS, C)
        place += start
        values = tl.load(s + place, mask=inside, other=0.0).to(tl.float32)
        h, r = _normalised(values, inside, width, eps, CENTRED)
        g = tl.load(at_y + place, mask=inside, other=0.0).to(tl.float32)
        cotangent = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
        a = scale * g
        if CENTRED:
            a = tl.where(inside, a - _mean(a, width), 0.0)
            cotangent = tl.where(inside, cotangent - _mean(cotangent, width), 0.0)
        on_a, on_u = _mean(a * h, width), _mean(cotangent * h, width)
        straight = r * (cotangent - h * on_u)
        along += g * straight
        tl.store(at_g + place, (scale * straight).to(at_g.dtype.element_ty), mask=inside)
        both = _mean(a * cotangent, width)
        found = r * r * (h * (3 * on_a * on_u - both) - on_u * a - on_a * cotangent)
        tl.store(at_s + place, found.to(at_s.dtype.element_ty), mask=inside)
    share = shares + (member * tl.num_programs(0) + tl.program_id(0)) * width + columns
    tl.store(share, tl.sum(along, 0), mask=columns < width)
