"""A bias and an activation with two derivatives, as Triton kernels.

Rows [M, N, C] belong to members, each with a bias [M, C]. Programs go through strips of rows, for
some columns of a member; sums over rows leave a program as its share [M, programs, C].
"""

import triton
import triton.language as tl

__all__ = ["KINDS", "activate", "activate_back", "activate_twice", "column_sums"]

KINDS = {"gelu": 0, "gelu-tanh": 1, "relu": 2, "silu": 3, "none": 4}
"""Number of an activation in the kernels; "none" only adds the bias."""

_FIRST = tl.constexpr(0.7978845608028654)  # sqrt(2 / π)
_THIRD = tl.constexpr(0.044715)


@triton.jit
def _tanh(z):
    return 2 * tl.sigmoid(2 * z) - 1


@triton.jit
def _normal(z, FAST: tl.constexpr):
    """Distribution function and density of the standard normal distribution.

    The fast form is right to 8e-8 (Abramowitz & Stegun, 7.1.26); it needs no second exponential.
    """
    density = tl.exp(-0.5 * z * z)
    if FAST:
        t = 1.0 / (1.0 + 0.23164188 * tl.abs(z))
        tail = -0.7265760135 + t * 0.5307027145
        tail = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * tail))
        tail *= t * density
        below = tl.where(z < 0, tail, 1.0 - tail)
    else:
        below = 0.5 * (1 + tl.erf(z * 0.7071067811865476))
    return below, 0.3989422804014327 * density


@triton.jit
def _value(z, KIND: tl.constexpr, FAST: tl.constexpr):
    if KIND == 0:
        below, _ = _normal(z, FAST)
        return z * below
    elif KIND == 1:
        return 0.5 * z * (1 + _tanh(_FIRST * (z + _THIRD * z * z * z)))
    elif KIND == 2:
        return tl.maximum(z, 0.0)
    elif KIND == 3:
        return z * tl.sigmoid(z)
    else:
        return z


@triton.jit
def _slopes(z, KIND: tl.constexpr, FAST: tl.constexpr):
    """First and second derivative."""
    if KIND == 0:
        below, density = _normal(z, FAST)
        return below + z * density, density * (2 - z * z)
    elif KIND == 1:
        t = _tanh(_FIRST * (z + _THIRD * z * z * z))
        inner, bend = _FIRST * (1 + 3 * _THIRD * z * z), 6 * _FIRST * _THIRD * z
        rest = 1 - t * t
        first = 0.5 * (1 + t) + 0.5 * z * rest * inner
        return first, rest * (inner + 0.5 * z * (bend - 2 * t * inner * inner))
    elif KIND == 2:
        return tl.where(z > 0, 1.0, 0.0), tl.zeros_like(z)
    else:
        s = tl.sigmoid(z)
        rest = s * (1 - s)
        return s + z * rest, rest * (2 + z * (1 - 2 * s))


@triton.jit
def _tile(row, last, columns, width, ROWS: tl.constexpr):
    rows = row + tl.arange(0, ROWS)
    place = rows.to(tl.int64)[:, None] * width + columns[None, :]
    return place, (rows < last)[:, None] & (columns < width)[None, :]


@triton.jit
def _bias(bias, member, columns, width, BIASED: tl.constexpr):
    if BIASED:
        found = tl.load(bias + member * width + columns, mask=columns < width, other=0.0)
        return found.to(tl.float32)[None, :]
    else:
        return tl.zeros([1, columns.shape[0]], tl.float32)


@triton.jit
def activate(
    z, bias, y, height, width, strip, KIND: tl.constexpr, FAST: tl.constexpr,
    BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """f(z + bias)."""
    member, first = tl.program_id(2), tl.program_id(0) * strip
    start, last = member.to(tl.int64) * height * width, tl.minimum(first + strip, height)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offset = _bias(bias, member, columns, width, BIASED)
    for row in tl.range(first, last, ROWS, num_stages=2):
        place, inside = _tile(row, last, columns, width, ROWS)
        place += start
        values = tl.load(z + place, mask=inside, other=0.0).to(tl.float32) + offset
        tl.store(y + place, _value(values, KIND, FAST).to(y.dtype.element_ty), mask=inside)


@triton.jit
def activate_back(
    z, bias, g, at_z, shares, height, width, strip, KIND: tl.constexpr, FAST: tl.constexpr,
    BIASED: tl.constexpr, SUMMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """g f'(z + bias), and shares of its sum over rows."""
    member, first = tl.program_id(2), tl.program_id(0) * strip
    start, last = member.to(tl.int64) * height * width, tl.minimum(first + strip, height)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offset = _bias(bias, member, columns, width, BIASED)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for row in tl.range(first, last, ROWS, num_stages=2):
        place, inside = _tile(row, last, columns, width, ROWS)
        place += start
        slope, _ = _slopes(
            tl.load(z + place, mask=inside, other=0.0).to(tl.float32) + offset, KIND, FAST
        )
        found = slope * tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(at_z + place, found.to(at_z.dtype.element_ty), mask=inside)
        if SUMMED:
            total += found
    if SUMMED:
        share = shares + (member * tl.num_programs(0) + tl.program_id(0)) * width + columns
        tl.store(share, tl.sum(total, 0), mask=columns < width)


@triton.jit
def activate_twice(
    z, bias, g, u, at_g, at_z, shares, height, width, strip, KIND: tl.constexpr,
    FAST: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Derivative of `activate_back` for a cotangent u: u f' at g, u g f'' at z, its sums."""
    member, first = tl.program_id(2), tl.program_id(0) * strip
    start, last = member.to(tl.int64) * height * width, tl.minimum(first + strip, height)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    offset = _bias(bias, member, columns, width, BIASED)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for row in tl.range(first, last, ROWS, num_stages=2):
        place, inside = _tile(row, last, columns, width, ROWS)
        place += start
        slope, bend = _slopes(
            tl.load(z + place, mask=inside, other=0.0).to(tl.float32) + offset, KIND, FAST
        )
        cotangent = tl.load(u + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(at_g + place, (cotangent * slope).to(at_g.dtype.element_ty), mask=inside)
        found = cotangent * bend * tl.load(g + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(at_z + place, found.to(at_z.dtype.element_ty), mask=inside)
        total += found
    share = shares + (member * tl.num_programs(0) + tl.program_id(0)) * width + columns
    tl.store(share, tl.sum(total, 0), mask=columns < width)


@triton.jit
def column_sums(t, shares, height, width, strip, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Shares of the sums over rows."""
    member, first = tl.program_id(2), tl.program_id(0) * strip
    start, last = member.to(tl.int64) * height * width, tl.minimum(first + strip, height)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for row in tl.range(first, last, ROWS, num_stages=2):
        place, inside = _tile(row, last, columns, width, ROWS)
        total += tl.load(t + place + start, mask=inside, other=0.0).to(tl.float32)
    share = shares + (member * tl.num_programs(0) + tl.program_id(0)) * width + columns
    tl.store(share, tl.sum(total, 0), mask=columns < width)
