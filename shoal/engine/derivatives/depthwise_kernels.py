"""A depthwise convolution and its gradients as Triton kernels, for images with channels last.

Each channel c has a filter of its own, y[p, q] = Σ_ij w[i, j] x[p s + i d - o, q s + j d - o] for
stride s, dilation d and padding o. The gradient at the input gathers, for every pixel, what the
filter has made of it; the gradient at the filter is a sum over all pixels of y.

Libraries build kernels of their own for every shape of such a layer, at half a second each. These
are built for a filter and a stride, and kept on disk.
"""

import triton
import triton.language as tl

from shoal.engine.derivatives.matrix_kernels import channel, load, tile

__all__ = ["at_input", "outputs", "sums_at_weight"]

_SIZES = ["height", "tall", "wide", "down", "across"]
"""Layers of other sizes share a kernel: nothing is aligned by these numbers."""


@triton.jit
def _pixels(rows, tall, wide):
    """Image, row and column of pixels that are counted from the first image on."""
    return rows // (tall * wide), rows // wide % tall, rows % wide


@triton.jit
def _point(weight, columns, width, points):
    """One point of the filters of these channels, [1, COLUMNS]."""
    found = tl.load(weight + columns * points, mask=columns < width, other=0.0)
    return found.to(tl.float32)[None, :]


@triton.jit
def _met(x, image, h, w, tall, wide, columns, width, inside):
    """What lies in pixels (h, w), zeros outside of the image."""
    there = (h >= 0) & (h < tall) & (w >= 0) & (w < wide)
    source = ((image * tall + h) * wide + w).to(tl.int64) * width
    return load(x, source[:, None] + columns[None, :], there[:, None] & inside)


@triton.jit(do_not_specialize=_SIZES)
def outputs(
    x, weight, bias, out, height, width, tall, wide, down, across,
    DEEP: tl.constexpr, LONG: tl.constexpr, STRIDE_DOWN: tl.constexpr, STRIDE_ACROSS: tl.constexpr,
    PAD_DOWN: tl.constexpr, PAD_ACROSS: tl.constexpr, GAP_DOWN: tl.constexpr,
    GAP_ACROSS: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y + bias, `down` x `across` pixels, from images of `tall` x `wide` pixels."""
    first = tl.program_id(0) * ROWS
    place, inside, columns = tile(first, height, width, ROWS, COLUMNS)
    image, p, q = _pixels(first + tl.arange(0, ROWS), down, across)
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    found += channel(bias, columns, width, 0.0, BIASED)[None, :]
    for i in range(DEEP):
        for j in tl.static_range(LONG):
            h, w = p * STRIDE_DOWN + i * GAP_DOWN, q * STRIDE_ACROSS + j * GAP_ACROSS
            h, w = h - PAD_DOWN, w - PAD_ACROSS
            met = _met(x, image, h, w, tall, wide, columns, width, inside)
            found += met * _point(weight + i * LONG + j, columns, width, DEEP * LONG)
    tl.store(out + place, found, mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def at_input(
    g, weight, out, height, width, tall, wide, down, across,
    DEEP: tl.constexpr, LONG: tl.constexpr, STRIDE_DOWN: tl.constexpr, STRIDE_ACROSS: tl.constexpr,
    PAD_DOWN: tl.constexpr, PAD_ACROSS: tl.constexpr, GAP_DOWN: tl.constexpr,
    GAP_ACROSS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dgrad(g, w) on images of `tall` x `wide` pixels, from those of `down` x `across`."""
    first = tl.program_id(0) * ROWS
    place, inside, columns = tile(first, height, width, ROWS, COLUMNS)
    image, h, w = _pixels(first + tl.arange(0, ROWS), tall, wide)
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(DEEP):
        for j in tl.static_range(LONG):
            p, q = h + PAD_DOWN - i * GAP_DOWN, w + PAD_ACROSS - j * GAP_ACROSS
            step = ((p % STRIDE_DOWN == 0) & (q % STRIDE_ACROSS == 0))[:, None] & inside
            p, q = p // STRIDE_DOWN, q // STRIDE_ACROSS
            met = _met(g, image, p, q, down, across, columns, width, step)
            found += met * _point(weight + i * LONG + j, columns, width, DEEP * LONG)
    tl.store(out + place, found, mask=inside)


@triton.jit(do_not_specialize=[*_SIZES, "strip"])
def sums_at_weight(
    x, g, shares, height, width, strip, tall, wide, down, across,
    DEEP: tl.constexpr, LONG: tl.constexpr, STRIDE_DOWN: tl.constexpr, STRIDE_ACROSS: tl.constexpr,
    PAD_DOWN: tl.constexpr, PAD_ACROSS: tl.constexpr, GAP_DOWN: tl.constexpr,
    GAP_ACROSS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """wgrad(x, g) of one row of the filter, of up to five points, over a strip of pixels of g."""
    tl.static_assert(LONG <= 5)  # a sum has a name for each point: Triton has no lists of tiles
    first, i = tl.program_id(0) * strip, tl.program_id(2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    one = tl.zeros([ROWS, COLUMNS], tl.float32)
    two, three, four, five = one, one, one, one
    for row in tl.range(first, tl.minimum(first + strip, height), ROWS):
        place, inside, columns = tile(row, height, width, ROWS, COLUMNS)
        image, p, q = _pixels(row + tl.arange(0, ROWS), down, across)
        h, w = p * STRIDE_DOWN + i * GAP_DOWN - PAD_DOWN, q * STRIDE_ACROSS - PAD_ACROSS
        pull = load(g, place, inside)
        one += pull * _met(x, image, h, w, tall, wide, columns, width, inside)
        if LONG > 1:
            w += GAP_ACROSS
            two += pull * _met(x, image, h, w, tall, wide, columns, width, inside)
        if LONG > 2:
            w += GAP_ACROSS
            three += pull * _met(x, image, h, w, tall, wide, columns, width, inside)
        if LONG > 3:
            w += GAP_ACROSS
            four += pull * _met(x, image, h, w, tall, wide, columns, width, inside)
        if LONG > 4:
            w += GAP_ACROSS
            five += pull * _met(x, image, h, w, tall, wide, columns, width, inside)
    share = shares + (tl.program_id(0) * DEEP + i).to(tl.int64) * LONG * width + columns
    here = columns < width
    tl.store(share, tl.sum(one, 0), mask=here)
    if LONG > 1:
        tl.store(share + width, tl.sum(two, 0), mask=here)
    if LONG > 2:
        tl.store(share + 2 * width, tl.sum(three, 0), mask=here)
    if LONG > 3:
        tl.store(share + 3 * width, tl.sum(four, 0), mask=here)
    if LONG > 4:
        tl.store(share + 4 * width, tl.sum(five, 0), mask=here)
