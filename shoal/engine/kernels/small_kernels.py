"""Eigenpairs and inverse of a small symmetric matrix, each by one Triton program.

A matrix of at most 64 x 64 fits into the registers of one program. The routines of torch.linalg for
a GPU are made for large matrices: those for eigenpairs wait for the host to see whether they have
converged, so that a step that calls them cannot be captured.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["LARGEST", "eigenpairs", "inverse"]

LARGEST = 64
"""Rows of the largest matrix that stays in registers."""

SWEEPS = 15
"""Jacobi's method converges quadratically: four to six sweeps are usual in single precision."""


@triton.jit
def _loaded(matrix, members, row, column):
    inside = (row < members) & (column < members)
    return tl.load(matrix + row * members + column, mask=inside, other=0.0)


@triton.jit
def _rotation(own, other, between, first):
    """Cosine and signed sine that bring `between` to zero; of the pair, one is `first`."""
    angle = (other - own) / (2.0 * tl.where(between == 0.0, 1.0, between))
    positive = (angle > 0.0) | ((angle == 0.0) & first)
    tangent = 1.0 / (tl.abs(angle) + tl.sqrt(angle * angle + 1.0))
    tangent = tl.where(between == 0.0, 0.0, tl.where(positive, tangent, -tangent))
    cosine = 1.0 / tl.sqrt(tangent * tangent + 1.0)
    return cosine, tangent * cosine


@triton.jit
def _eigen_kernel(matrix, values, vectors, members, SIZE: tl.constexpr, SWEEPS: tl.constexpr):
    """Jacobi: in round k every row i is rotated against row i xor k, all pairs at once."""
    index = tl.arange(0, SIZE)
    row, column = index[:, None], index[None, :]
    A = _loaded(matrix, members, row, column)
    U = tl.where(row == column, 1.0, 0.0)
    sweep = 0
    rest = tl.sum(tl.where(row == column, 0.0, A * A))
    enough = 1e-13 * tl.sum(A * A)
    while (sweep < SWEEPS) & (rest > enough):
        for k in range(1, SIZE):
            pair, same = column == (row ^ k), row == column
            diagonal = tl.where(same, A, 0.0)
            own, across = tl.sum(diagonal, axis=1), tl.sum(diagonal, axis=0)
            other = tl.sum(tl.where(pair, across[None, :], 0.0), axis=1)
            # Both of a pair take the entry above the diagonal: the one below differs by rounding,
            # and two different angles would be no rotation.
            upper = tl.where(pair & (row < column), A, 0.0)
            between = tl.sum(upper, axis=1)
            between += tl.sum(tl.where(same, tl.sum(upper, axis=0)[None, :], 0.0), axis=1)
            c, s = _rotation(own, other, between, index < (index ^ k))
            swapped = tl.gather(A, tl.broadcast_to(row ^ k, (SIZE, SIZE)), 0)
            A = c[:, None] * A - s[:, None] * swapped
            c = tl.sum(tl.where(same, c[:, None], 0.0), axis=0)
            s = tl.sum(tl.where(same, s[:, None], 0.0), axis=0)
            turned = tl.broadcast_to(column ^ k, (SIZE, SIZE))
            A = c[None, :] * A - s[None, :] * tl.gather(A, turned, 1)
            A = tl.where(pair, 0.0, A)
            U = c[None, :] * U - s[None, :] * tl.gather(U, turned, 1)
        rest = tl.sum(tl.where(row == column, 0.0, A * A))
        sweep += 1
    tl.store(values + index, tl.sum(tl.where(row == column, A, 0.0), axis=1), mask=index < members)
    inside = (row < members) & (column < members)
    tl.store(vectors + row * members + column, U, mask=inside)


@triton.jit
def _inverse_kernel(matrix, out, members, SIZE: tl.constexpr):
    """Gauss-Jordan without exchanges of rows, which a positive definite matrix does not need."""
    index = tl.arange(0, SIZE)
    row, column = index[:, None], index[None, :]
    A = _loaded(matrix, members, row, column)
    A = tl.where((row == column) & (row >= members), 1.0, A)
    for k in range(SIZE):
        across = tl.sum(tl.where(row == k, A, 0.0), axis=0)
        down = tl.sum(tl.where(column == k, A, 0.0), axis=1)
        pivot = 1.0 / tl.sum(tl.where(index == k, across, 0.0))
        rest = A - down[:, None] * (across * pivot)[None, :]
        A = tl.where(row == k, (across * pivot)[None, :], rest)
        A = tl.where(column == k, tl.where(row == k, pivot, -(down * pivot)[:, None]), A)
    inside = (row < members) & (column < members)
    tl.store(out + row * members + column, A, mask=inside)


def eigenpairs(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, in no particular order."""
    matrix = matrix.contiguous()
    values, vectors = torch.empty_like(matrix[0]), torch.empty_like(matrix)
    size = triton.next_power_of_2(len(matrix))
    launch: Any = _eigen_kernel[(1,)]
    launch(matrix, values, vectors, len(matrix), size, SWEEPS, num_warps=_warps(size))
    return values, vectors


def inverse(matrix: Tensor) -> Tensor:
    """Of a positive definite matrix."""
    matrix, size = matrix.contiguous(), triton.next_power_of_2(len(matrix))
    out = torch.empty_like(matrix)
    launch: Any = _inverse_kernel[(1,)]
    launch(matrix, out, len(matrix), size, num_warps=_warps(size))
    return out


def _warps(size: int) -> int:
    return 1 if size <= 16 else 4
