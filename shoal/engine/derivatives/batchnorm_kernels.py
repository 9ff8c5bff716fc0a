"""Batch normalisation as Triton kernels: the formulas of `formulas`, each one read of its tensors.

An image with its channels last is a matrix of rows (pixels of the batch) and columns (channels).
Every quantity needs sums over the rows first and an elementwise pass afterwards. Sums are taken by
programs that each go through a strip of rows and write their share; a small kernel adds the shares
in a fixed order, so that results do not depend on which program ends first.

SIGNS says how the signs of the rectifier are found: 0 there is none, 1 by the outputs, 2 by
γ h + β.
"""

import triton
import triton.language as tl

from shoal.engine.derivatives.matrix_kernels import STAGES, channel, load, tile, total

__all__ = [
    "backward_pass",
    "normalise",
    "second",
    "settle_moments",
    "sums_of_moments",
    "sums_of_pull",
    "sums_of_second",
]


@triton.jit
def _layer(weight, bias, mean, rstd, columns, width, AFFINE: tl.constexpr):
    """γ, β, mean and 1 / std."""
    gamma = channel(weight, columns, width, 1.0, AFFINE)
    beta = channel(bias, columns, width, 0.0, AFFINE)
    centre = channel(mean, columns, width, 0.0, True)
    return gamma, beta, centre, channel(rstd, columns, width, 0.0, True)


@triton.jit
def _normalised(x, place, inside, centre, r):
    """h."""
    return (load(x, place, inside) - centre[None, :]) * r[None, :]


@triton.jit
def _rectified(t, h, out, place, inside, gamma, beta, SIGNS: tl.constexpr):
    """t where the rectifier lets it pass."""
    if SIGNS == 1:
        return tl.where(load(out, place, inside) > 0, t, 0.0)
    elif SIGNS == 2:
        return tl.where(h * gamma[None, :] + beta[None, :] > 0, t, 0.0)
    else:
        return t


@triton.jit
def sums_of_moments(
    x, shares, height, width, strip, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums of x - x[0] and its square: about a point of the cloud, nothing cancels."""
    first = tl.program_id(0) * strip
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    two = tl.zeros([ROWS, COLUMNS], tl.float32)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    origin = tl.load(x + columns, mask=columns < width, other=0.0).to(tl.float32)
    for row in tl.range(first, tl.minimum(first + strip, height), ROWS, num_stages=STAGES):
        place, inside, columns = tile(row, height, width, ROWS, COLUMNS)
        d = tl.where(inside, load(x, place, inside) - origin[None, :], 0.0)
        one += d
        two += d * d
    share = shares + tl.program_id(0) * 2 * width + columns
    tl.store(share, tl.sum(one, 0), mask=columns < width)
    tl.store(share + width, tl.sum(two, 0), mask=columns < width)


@triton.jit
def settle_moments(
    x, shares, running_mean, running_variance, found, programs, height, width, eps, momentum,
    FOLLOWED: tl.constexpr, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / std from the shares; the running mean and unbiased variance follow."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    here = columns < width
    # What is read of each channel is asked for first, so that it comes while shares are added.
    origin = channel(x, columns, width, 0.0, True)
    old_mean = channel(running_mean, columns, width, 0.0, FOLLOWED)
    old_variance = channel(running_variance, columns, width, 0.0, FOLLOWED)
    one = total(shares, columns, programs, width, 2 * width, TOGETHER, COLUMNS)
    two = total(shares + width, columns, programs, width, 2 * width, TOGETHER, COLUMNS)
    centre = one / height
    variance = tl.maximum(two / height - centre * centre, 0.0)
    mean = centre + origin
    tl.store(found + columns, mean, mask=here)
    tl.store(found + width + columns, 1 / tl.sqrt(variance + eps), mask=here)
    if FOLLOWED:
        unbiased = variance * (height / (height - 1))
        mean = old_mean * (1 - momentum) + mean * momentum
        variance = old_variance * (1 - momentum) + unbiased * momentum
        tl.store(running_mean + columns, mean, mask=here)
        tl.store(running_variance + columns, variance, mask=here)


@triton.jit
def normalise(
    x, residual, out, weight, bias, mean, rstd, height, width, AFFINE: tl.constexpr,
    RESIDUAL: tl.constexpr, RECTIFIED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """γ h + β + residual, rectified."""
    place, inside, columns = tile(tl.program_id(0) * ROWS, height, width, ROWS, COLUMNS)
    gamma, beta, centre, r = _layer(weight, bias, mean, rstd, columns, width, AFFINE)
    h = _normalised(x, place, inside, centre, r)
    y = h * gamma[None, :] + beta[None, :]
    if RESIDUAL:
        y += load(residual, place, inside)
    if RECTIFIED:
        y = tl.maximum(y, 0.0)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sums_of_pull(
    gradient, x, out, weight, bias, mean, rstd, shares, height, width, strip,
    AFFINE: tl.constexpr, SIGNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of g h and g."""
    first = tl.program_id(0) * strip
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    two = tl.zeros([ROWS, COLUMNS], tl.float32)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gamma, beta, centre, r = _layer(weight, bias, mean, rstd, columns, width, AFFINE)
    for row in tl.range(first, tl.minimum(first + strip, height), ROWS, num_stages=STAGES):
        place, inside, columns = tile(row, height, width, ROWS, COLUMNS)
        h = _normalised(x, place, inside, centre, r)
        g = load(gradient, place, inside)
        g = _rectified(g, h, out, place, inside, gamma, beta, SIGNS)
        one += g * h
        two += g
    share = shares + tl.program_id(0) * 2 * width + columns
    tl.store(share, tl.sum(one, 0), mask=columns < width)
    tl.store(share + width, tl.sum(two, 0), mask=columns < width)


@triton.jit
def backward_pass(
    gradient, x, out, more, weight, bias, mean, rstd, sums, at_mean, at_rstd, at_x, at_residual,
    height, width, AFFINE: tl.constexpr, SIGNS: tl.constexpr, MORE: tl.constexpr,
    CENTRED: tl.constexpr, SPREAD: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient at x, with what comes from elsewhere and at the moments, and at the residual."""
    place, inside, columns = tile(tl.program_id(0) * ROWS, height, width, ROWS, COLUMNS)
    gamma, beta, centre, r = _layer(weight, bias, mean, rstd, columns, width, AFFINE)
    h = _normalised(x, place, inside, centre, r)
    g = _rectified(load(gradient, place, inside), h, out, place, inside, gamma, beta, SIGNS)
    gh = channel(sums, columns, width, 0.0, True) / height
    g_mean = channel(sums + width, columns, width, 0.0, True) / height
    found = (gamma * r)[None, :] * (g - g_mean[None, :] - h * gh[None, :])
    if MORE:
        found += load(more, place, inside)
    if CENTRED:
        found += (channel(at_mean, columns, width, 0.0, True) / height)[None, :]
    if SPREAD:
        q = channel(at_rstd, columns, width, 0.0, True) / height
        found -= h * (r * r * q)[None, :]
    tl.store(at_x + place, found.to(at_x.dtype.element_ty), mask=inside)
    if RESIDUAL:
        tl.store(at_residual + place, g.to(at_residual.dtype.element_ty), mask=inside)


@triton.jit
def sums_of_second(
    u, gradient, x, out, weight, bias, mean, rstd, sums_gh, sums_g, shares, height, width, strip,
    AFFINE: tl.constexpr, SIGNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of u h, of u, and of u times g without what a constant and h explain of it."""
    first = tl.program_id(0) * strip
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    two = tl.zeros([ROWS, COLUMNS], tl.float32)
    three = tl.zeros([ROWS, COLUMNS], tl.float32)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gamma, beta, centre, r = _layer(weight, bias, mean, rstd, columns, width, AFFINE)
    gh = channel(sums_gh, columns, width, 0.0, True) / height
    g_mean = channel(sums_g, columns, width, 0.0, True) / height
    for row in tl.range(first, tl.minimum(first + strip, height), ROWS, num_stages=STAGES):
        place, inside, columns = tile(row, height, width, ROWS, COLUMNS)
        h = _normalised(x, place, inside, centre, r)
        g = load(gradient, place, inside)
        g = _rectified(g, h, out, place, inside, gamma, beta, SIGNS)
        v = load(u, place, inside)
        one += v * h
        two += v
        three += v * (g - g_mean[None, :] - h * gh[None, :])
    share = shares + tl.program_id(0) * 3 * width + columns
    tl.store(share, tl.sum(one, 0), mask=columns < width)
    tl.store(share + width, tl.sum(two, 0), mask=columns < width)
    tl.store(share + 2 * width, tl.sum(three, 0), mask=columns < width)


@triton.jit
def second(
    u, at_residual, gradient, x, out, weight, bias, mean, rstd, sums_gh, sums_g, sums, at_g, at_x,
    at_weight, height, width, AFFINE: tl.constexpr, SIGNS: tl.constexpr, RESIDUAL: tl.constexpr,
    INPUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Derivatives of `backward_pass` with respect to the gradient, the input (INPUT) and γ."""
    place, inside, columns = tile(tl.program_id(0) * ROWS, height, width, ROWS, COLUMNS)
    here = columns < width
    gamma, beta, centre, r = _layer(weight, bias, mean, rstd, columns, width, AFFINE)
    h = _normalised(x, place, inside, centre, r)
    g = _rectified(load(gradient, place, inside), h, out, place, inside, gamma, beta, SIGNS)
    v = load(u, place, inside)
    gh = channel(sums_gh, columns, width, 0.0, True) / height
    g_mean = channel(sums_g, columns, width, 0.0, True) / height
    uh = channel(sums, columns, width, 0.0, True) / height
    u_mean = channel(sums + width, columns, width, 0.0, True) / height
    a = channel(sums + 2 * width, columns, width, 0.0, True) / height
    change = (gamma * r)[None, :] * (v - u_mean[None, :] - h * uh[None, :])
    if RESIDUAL:
        change += load(at_residual, place, inside)
    change = _rectified(change, h, out, place, inside, gamma, beta, SIGNS)
    tl.store(at_g + place, change.to(at_g.dtype.element_ty), mask=inside)
    if INPUT:
        inner = h * (2 * gh * uh - a)[None, :] - uh[None, :] * (g - g_mean[None, :])
        inner -= gh[None, :] * (v - u_mean[None, :])
        inner *= (gamma * r * r)[None, :]
        tl.store(at_x + place, inner.to(at_x.dtype.element_ty), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(at_weight + columns, height * r * a, mask=here)
