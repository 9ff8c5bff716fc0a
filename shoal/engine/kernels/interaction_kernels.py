r"""From the Gram matrix of the members to the matrices of the push, by one Triton program.

Squared distances, median bandwidth, kernel, its slope and the flow are M x M matrices, for which
torch starts about sixty kernels. For at most 64 members all of them fit into the registers of one
program. The formulas are those of `shoal.interaction`, which are also the reference of the tests.

The median of n numbers is the (n + 1) / 2-th smallest. Positive floats are ordered like their bits
read as integers, so 31 halvings of the integers find it exactly, without sorting.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "FLOWS",
    "KERNELS",
    "LARGEST",
    "Matrices",
    "matrices",
    "new_matrices",
    "store_matrices",
]

LARGEST = 64
"""Members whose matrices stay in registers."""

KERNELS = ("rbf", "laplace", "imq", "matern-1.5", "matern-2.5")
"""Kernels that the program knows."""

FLOWS = ("kde", "stein", "laplacian")
"""What becomes of L: divided by the row sums of K, divided by M, or left to a score estimator."""


class Matrices(NamedTuple):
    """The matrices of one step.

    Attributes:
        K: kernel matrix [M, M], zero for diverged members.
        B: R(K) L, or L for the flow "laplacian" [1, M, M].
        mix: K / M for the flow "stein"; None for others.
        h2: squared bandwidth [1, 1, 1].
        summary: squared bandwidth and effective number of members [2].
        lengths: |B z| of each member [M]; None for the flow "laplacian".
    """

    K: Tensor
    B: Tensor
    mix: Tensor | None
    h2: Tensor
    summary: Tensor
    lengths: Tensor | None


@triton.jit
def _middle(d2, counted, n):
    """Median of the counted numbers, which are zero or positive; 0 for none."""
    bits = d2.to(tl.int32, bitcast=True)
    place = tl.maximum((n - 1) // 2, 0)
    low, high = n * 0, n * 0 + 0x7F800000  # zero and infinity
    for _ in range(31):
        half = low + (high - low) // 2
        enough = tl.sum(tl.where(counted & (bits <= half), 1, 0)) > place
        low, high = tl.where(enough, low, half + 1), tl.where(enough, half, high)
    lower = high.to(tl.float32, bitcast=True)
    upto = tl.sum(tl.where(counted & (bits <= high), 1, 0))
    above = tl.min(tl.where(counted & (bits > high), d2, float("inf")))
    upper = tl.where(upto > n // 2, lower, above)
    return tl.where(n > 0, 0.5 * (lower + upper), 0.0)


@triton.jit
def _bandwidth(d2, counted, members, LOGARITHM: tl.constexpr):
    """Median of the counted pairs, over 2 ln(M + 1); their mean where the median is 0."""
    n = tl.sum(tl.where(counted, 1, 0))
    middle = _middle(d2, counted, n)
    if LOGARITHM:
        middle = middle / (2.0 * tl.log(members + 1.0))
    mean = tl.sum(tl.where(counted, d2, 0.0)) / tl.maximum(n, 1).to(tl.float32)
    return tl.where(middle > 0.0, middle, tl.where(mean > 0.0, mean, 1.0))


@triton.jit
def _value_and_slope(u, KERNEL: tl.constexpr):
    """phi(u) and phi'(u)."""
    if KERNEL == "rbf":
        value = tl.exp(-0.5 * u)
        slope = -0.5 * value
    elif KERNEL == "laplace":
        value = tl.exp(-tl.sqrt(u))
        r = tl.sqrt(tl.where(u > 0.0, u, 1.0))
        slope = tl.where(u > 0.0, -tl.exp(-r) / (2.0 * r), 0.0)
    elif KERNEL == "imq":
        value = 1.0 / tl.sqrt(1.0 + u)
        slope = -0.5 * value / (1.0 + u)
    elif KERNEL == "matern-1.5":
        r = tl.sqrt(3.0 * u)
        value = (1.0 + r) * tl.exp(-r)
        slope = -1.5 * tl.exp(-r)
    else:
        r = tl.sqrt(5.0 * u)
        value = (1.0 + r + r * r / 3.0) * tl.exp(-r)
        slope = -5.0 / 6.0 * (1.0 + r) * tl.exp(-r)
    return value, slope


@triton.jit
def store_matrices(
    G, finite, K_out, B_out, mix_out, summary, lengths, members, h2_fixed,
    SIZE: tl.constexpr, KERNEL: tl.constexpr, FLOW: tl.constexpr,
    MEDIAN: tl.constexpr, LOGARITHM: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """All matrices from the Gram matrix [SIZE, SIZE] and the finite members [SIZE]."""
    index = tl.arange(0, SIZE)
    row, column = index[:, None], index[None, :]
    inside = (row < members) & (column < members)
    place = row * members + column
    living = tl.sum(tl.where(finite, 1.0, 0.0))
    pair = finite[:, None] & finite[None, :]
    own = tl.where(row == column, G, 0.0)
    d2 = tl.maximum(tl.sum(own, axis=1)[:, None] + tl.sum(own, axis=0)[None, :] - 2.0 * G, 0.0)
    d2 = tl.where(row == column, 0.0, d2)
    if MEDIAN:
        counted = pair if EVERY else pair & (row < column)
        h2 = _bandwidth(d2, counted, living, LOGARITHM)
    else:
        h2 = living * 0.0 + h2_fixed
    value, slope = _value_and_slope(d2 / h2, KERNEL)
    K = tl.where(pair, value, 0.0)
    W = tl.where(pair, slope / (0.5 * h2), 0.0)
    B = tl.where(row == column, tl.sum(W, axis=1)[:, None] - W, -W)
    if FLOW == "kde":
        total = tl.sum(K, axis=1)
        B = B / tl.where(total > 0.0, total, 1.0)[:, None]
    if FLOW == "stein":
        count = tl.maximum(living, 1.0)
        B = B / count
        tl.store(mix_out + place, K / count, mask=inside)
    if FLOW != "laplacian":  # |B z|² from the Gram matrix of z
        squares = tl.sum(tl.dot(B, G, input_precision="ieee") * B, axis=1)
        tl.store(lengths + index, tl.sqrt(tl.maximum(squares, 0.0)), mask=index < members)
    tl.store(K_out + place, K, mask=inside)
    tl.store(B_out + place, B, mask=inside)
    trace = tl.sum(tl.where(row == column, K, 0.0))
    tl.store(summary, h2)
    tl.store(summary + 1, trace * trace / tl.sum(K))


@triton.jit
def _interaction_kernel(
    gram, alive, K_out, B_out, mix_out, summary, lengths, members, h2_fixed,
    SIZE: tl.constexpr, KERNEL: tl.constexpr, FLOW: tl.constexpr,
    MEDIAN: tl.constexpr, LOGARITHM: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    index = tl.arange(0, SIZE)
    inside = (index[:, None] < members) & (index[None, :] < members)
    G = tl.load(gram + index[:, None] * members + index[None, :], mask=inside, other=0.0)
    finite = tl.load(alive + index, mask=index < members, other=0) != 0
    store_matrices(
        G, finite, K_out, B_out, mix_out, summary, lengths, members, h2_fixed,
        SIZE, KERNEL, FLOW, MEDIAN, LOGARITHM, EVERY,
    )  # fmt: skip


def new_matrices(alive: Tensor, flow: str) -> tuple[Matrices, tuple[Tensor, ...]]:
    """Matrices without values, and the tensors that `store_matrices` fills, in its order."""
    members = len(alive)
    squares = torch.empty(3, 1, members, members, device=alive.device)
    K, B, mix = squares[0, 0], squares[1], squares[2, 0]
    summary = torch.empty(2, device=alive.device)
    lengths = torch.empty(members, device=alive.device)
    stein, known = flow == "stein", flow != "laplacian"
    h2 = summary[:1].view(1, 1, 1)
    found = Matrices(K, B, mix if stein else None, h2, summary, lengths if known else None)
    return found, (K, B, mix, summary, lengths)


def matrices(
    gram: Tensor,
    alive: Tensor,
    kernel: str,
    flow: str,
    h2: float | None = None,
    logarithm: bool = True,
    every: bool = False,
) -> Matrices:
    """The matrices of the push between finite members.

    Args:
        gram: inner products of the centred members [1, M, M], zero for diverged members.
        alive: finite members [M].
        kernel: one of `KERNELS`.
        flow: one of `FLOWS`.
        h2: squared bandwidth; None for the median heuristic.
        logarithm: divide the median by 2 ln(M + 1).
        every: the median counts all M² pairs, each member with itself too.
    """
    members = len(alive)
    found, tensors = new_matrices(alive, flow)
    size = max(16, triton.next_power_of_2(members))
    launch: Any = _interaction_kernel[(1,)]
    launch(
        gram.contiguous(), alive, *tensors, members, 1.0 if h2 is None else h2,
        SIZE=size, KERNEL=kernel, FLOW=flow, MEDIAN=h2 is None, LOGARITHM=logarithm, EVERY=every,
        num_warps=1 if size == 16 else 4,
    )  # fmt: skip
    return found
