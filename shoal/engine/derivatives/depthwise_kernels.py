"""Gradients of a depthwise convolution as Triton kernels, for images with their channels last.

Each channel c has a filter of its own, y[p, q] = Σ_ij w[i, j] x[p s + i d - o, q s + j d - o] for
stride s, dilation d and padding o. The gradient at the input gathers, for every pixel, what the
filter has made of it; the gradient at the filter is a sum over all pixels of y.

Libraries build kernels of their own for every shape of such a layer, at half a second each. These
are built for a filter and a stride, and kept on disk.
"""

import triton
import triton.language as tl

from shoal.engine.derivatives.matrix_kernels import load, tile

__all__ = ["at_input", "sums_at_weight"]

_SIZES = ["height", "tall", "wide", "down", "across"]
"""Layers of other sizes share a kernel: nothing is aligned by these numbers."""


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
    rows = first + tl.arange(0, ROWS)
    image, h, w = rows // (tall * wide), rows // wide % tall, rows % wide
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in range(DEEP):
        for j in tl.static_range(LONG):
            p, q = h + PAD_DOWN - i * GAP_DOWN, w + PAD_ACROSS - j * GAP_ACROSS
            met = (p >= 0) & (q >= 0) & (p % STRIDE_DOWN == 0) & (q % STRIDE_ACROSS == 0)
            p, q = p // STRIDE_DOWN, q // STRIDE_ACROSS
            met = met & (p < down) & (q < across)
            source = ((image * down + p) * across + q).to(tl.int64)
            there = source[:, None] * width + columns[None, :]
            factor = tl.load(
                weight + columns * DEEP * LONG + i * LONG + j, mask=columns < width, other=0.0
            ).to(tl.float32)
            found += load(g, there, met[:, None] & inside) * factor[None, :]
    tl.store(out + place, found, mask=inside)


@triton.jit(do_not_specialize=[*_SIZES, "strip"])
def sums_at_weight(
    x, g, shares, height, width, strip, tall, wide, down, across,
    DEEP: tl.constexpr, LONG: tl.constexpr, STRIDE_DOWN: tl.constexpr, STRIDE_ACROSS: tl.constexpr,
    PAD_DOWN: tl.constexpr, PAD_ACROSS: tl.constexpr, GAP_DOWN: tl.constexpr,
    GAP_ACROSS: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """wgrad(x, g) of one row of the filter, over a strip of pixels of g; TAPS is at least LONG."""
    first, i = tl.program_id(0) * strip, tl.program_id(2)
    taps = tl.arange(0, TAPS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([TAPS, ROWS, COLUMNS], tl.float32)
    for row in tl.range(first, tl.minimum(first + strip, height), ROWS):
        place, inside, columns = tile(row, height, width, ROWS, COLUMNS)
        rows = row + tl.arange(0, ROWS)
        image, p, q = rows // (down * across), rows // across % down, rows % across
        h = p * STRIDE_DOWN + i * GAP_DOWN - PAD_DOWN
        w = (q * STRIDE_ACROSS - PAD_ACROSS)[None, :] + (taps * GAP_ACROSS)[:, None]
        met = ((h >= 0) & (h < tall))[None, :] & (w >= 0) & (w < wide)
        met = met & (taps < LONG)[:, None]
        source = ((image * tall + h)[None, :] * wide + w).to(tl.int64)
        there = source[:, :, None] * width + columns[None, None, :]
        seen = load(x, there, met[:, :, None] & inside[None, :, :])
        sums += seen * load(g, place, inside)[None, :, :]
    share = shares + (tl.program_id(0) * DEEP + i).to(tl.int64) * LONG * width
    there = taps[:, None] * width + columns[None, :]
    here = (taps < LONG)[:, None] & (columns < width)[None, :]
    tl.store(share + there, tl.sum(sums, 1), mask=here)
