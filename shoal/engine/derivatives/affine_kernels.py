"""Layers that scale and shift every channel by given numbers, as Triton kernels.

The matrix and its tiles are those of `matrix_kernels`. Nothing has to be summed before the one
elementwise pass; the gradients of γ and 1 / std are sums over rows, which its pass takes on the
way.

SCALED says whether mean and 1 / std are given, AFFINE and SHIFTED whether γ and β are, RECTIFIED
whether the layer ends in a rectifier, whose signs are those of its outputs.
"""

import triton
import triton.language as tl

from shoal.engine.derivatives.matrix_kernels import STAGES, channel, load, tile

__all__ = ["pass_back", "pass_twice", "shift", "sums"]


@triton.jit
def _factor(weight, rstd, columns, width, AFFINE: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """γ r."""
    gamma = channel(weight, columns, width, 1.0, AFFINE)
    return gamma * channel(rstd, columns, width, 1.0, SCALED)


@triton.jit
def _rectified(t, out, place, inside, RECTIFIED: tl.constexpr):
    """t where the rectifier lets it pass."""
    if RECTIFIED:
        return tl.where(load(out, place, inside) > 0, t, 0.0)
    else:
        return t


@triton.jit
def shift(
    x, residual, out, weight, bias, mean, rstd, height, width, AFFINE: tl.constexpr,
    SHIFTED: tl.constexpr, SCALED: tl.constexpr, RESIDUAL: tl.constexpr, RECTIFIED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """γ r (x - mean) + β + residual, rectified."""
    place, inside, columns = tile(tl.program_id(0) * ROWS, height, width, ROWS, COLUMNS)
    factor = _factor(weight, rstd, columns, width, AFFINE, SCALED)
    y = load(x, place, inside) - channel(mean, columns, width, 0.0, SCALED)[None, :]
    y = y * factor[None, :] + channel(bias, columns, width, 0.0, SHIFTED)[None, :]
    if RESIDUAL:
        y += load(residual, place, inside)
    if RECTIFIED:
        y = tl.maximum(y, 0.0)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def pass_back(
    t, beside, out, weight, rstd, at_x, passed, height, width, AFFINE: tl.constexpr,
    SCALED: tl.constexpr, RECTIFIED: tl.constexpr, BESIDE: tl.constexpr, BOTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """γ r t + beside behind the rectifier; and t behind it, if both are wanted."""
    place, inside, columns = tile(tl.program_id(0) * ROWS, height, width, ROWS, COLUMNS)
    factor = _factor(weight, rstd, columns, width, AFFINE, SCALED)
    value = load(t, place, inside)
    found = value * factor[None, :]
    if BESIDE:
        found += load(beside, place, inside)
    found = _rectified(found, out, place, inside, RECTIFIED)
    tl.store(at_x + place, found.to(at_x.dtype.element_ty), mask=inside)
    if BOTH:
        value = _rectified(value, out, place, inside, RECTIFIED)
        tl.store(passed + place, value.to(passed.dtype.element_ty), mask=inside)


@triton.jit
def pass_twice(
    u, beside, gradient, out, weight, rstd, at_g, shares, height, width, strip,
    AFFINE: tl.constexpr, SCALED: tl.constexpr, RECTIFIED: tl.constexpr, BESIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """γ r u + beside behind the rectifier, and this program's share of the sums of r g u, γ g u."""
    first = tl.program_id(0) * strip
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gamma = channel(weight, columns, width, 1.0, AFFINE)
    r = channel(rstd, columns, width, 1.0, SCALED)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for row in tl.range(first, tl.minimum(first + strip, height), ROWS, num_stages=STAGES):
        place, inside, columns = tile(row, height, width, ROWS, COLUMNS)
        v = load(u, place, inside)
        g = _rectified(load(gradient, place, inside), out, place, inside, RECTIFIED)
        total += v * g
        found = v * (gamma * r)[None, :]
        if BESIDE:
            found += load(beside, place, inside)
        found = _rectified(found, out, place, inside, RECTIFIED)
        tl.store(at_g + place, found.to(at_g.dtype.element_ty), mask=inside)
    share = shares + tl.program_id(0) * 2 * width + columns
    product = tl.sum(total, 0)
    tl.store(share, product * r, mask=columns < width)
    tl.store(share + width, product * gamma, mask=columns < width)


@triton.jit
def sums(t, shares, height, width, strip, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """This program's share of the sum over rows."""
    first = tl.program_id(0) * strip
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for row in tl.range(first, tl.minimum(first + strip, height), ROWS, num_stages=STAGES):
        place, inside, columns = tile(row, height, width, ROWS, COLUMNS)
        total += load(t, place, inside)
    share = shares + tl.program_id(0) * width + columns
    tl.store(share, tl.sum(total, 0), mask=columns < width)
