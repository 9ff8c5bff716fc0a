"""Strips of coordinates: eight leaves to a launch, and each program finds the leaf of its strip."""

import triton
import triton.language as tl

__all__ = ["choice", "leaf_of"]


@triton.jit
def leaf_of(strip, widths, STRIP: tl.constexpr):
    """Which leaf a strip belongs to, and the first strip of that leaf."""
    leaf, first, edge = 0, 0, 0
    for i in tl.static_range(8):
        edge_before = edge
        edge += tl.cdiv(widths[i], STRIP)
        leaf = tl.where(strip >= edge, i + 1, leaf)
        first = tl.where(strip >= edge_before, edge_before, first)
    return leaf, first


@triton.jit
def choice(leaf, options):
    """options[leaf]: an entry of a tuple that is only known when the kernel runs."""
    chosen = options[0]
    for i in tl.static_range(1, 8):
        chosen = tl.where(leaf == i, options[i], chosen)
    return chosen
