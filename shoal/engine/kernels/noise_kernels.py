r"""Normal noise by one Triton kernel: keys, hashes, and the method of Box & Muller.

The numbers are those of `core.random.normal_stream`, to rounding. torch takes about thirty kernels
for them, with eight bytes a number in each.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["plus_normal"]

BLOCK = 1024
"""Pairs of numbers that a program draws."""

_GOLDEN: tl.constexpr = tl.constexpr(-7046029254386353131)
_MIX1: tl.constexpr = tl.constexpr(-4658895280553007687)
_MIX2: tl.constexpr = tl.constexpr(-7723592293110705685)


@triton.jit
def _shifted(x, BITS: tl.constexpr):
    """A shift to the right that fills with zeros."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _hashed(x):
    """See `core.random.hashed`."""
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX1
    x = (x ^ _shifted(x, 27)) * _MIX2
    return x ^ _shifted(x, 31)


@triton.jit(do_not_specialize=["seed"])
def _plus_normal_kernel(
    x, scale, now, seed, out, width, scale_by_row, scale_by_column, BLOCK: tl.constexpr
):  # fmt: skip
    chain = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = _hashed(_hashed(tl.load(now) * _GOLDEN + seed) + chain)
    bits = _hashed(pair * _GOLDEN + key)
    high = (_shifted(bits, 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    radius = tl.sqrt(-2.0 * tl.log(high))
    angle = (bits & 0xFFFFFFFF).to(tl.float32) * 1.4629180792671596e-09
    for odd in tl.static_range(2):
        column = 2 * pair + odd
        inside = column < width
        noise = radius * (tl.sin(angle) if odd else tl.cos(angle))
        place = chain * width + column
        here = chain * scale_by_row + column * scale_by_column
        factor = tl.load(scale + here, mask=inside, other=0.0)
        before = tl.load(x + place, mask=inside, other=0.0)
        tl.store(out + place, before + factor * noise, mask=inside)


def plus_normal(x: Tensor, scale: Tensor, now: Tensor, seed: int) -> Tensor:
    """x + scale ξ for chains x [M, D].

    Args:
        x: chains.
        scale: deviations that broadcast to x.
        now: number of the step, a scalar on the device.
        seed: 63 bits for the purpose of the noise.
    """
    x = x.contiguous()
    scale, out = scale.expand_as(x), torch.empty_like(x)
    chains, width = x.shape
    launch: Any = _plus_normal_kernel[(chains, triton.cdiv((width + 1) // 2, BLOCK))]
    launch(x, scale, now, seed, out, width, *scale.stride(), BLOCK=BLOCK, num_warps=4)
    return out
