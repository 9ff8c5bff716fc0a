"""Linear algebra of matrices as small as the ensemble, which never makes a GPU wait for the host.

On a GPU with Triton, matrices of single precision and at most 64 rows are handled by kernels of one
program each (`small_kernels`); everything else by torch.linalg.
"""

import torch
from torch import Tensor

try:
    from shoal.engine.kernels import small_kernels
except Exception:  # no Triton here, or one that does not work
    small_kernels = None

__all__ = ["eigenpairs", "solve", "waits_for_host"]


def eigenpairs(K: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [M], the largest first, and eigenvectors [M, M] of a symmetric matrix.

    >>> eigenpairs(torch.diag(torch.tensor([1.0, 3.0, 2.0])))[0]
    tensor([3., 2., 1.])
    """
    if small_kernels is None or not _in_registers(K.device, K.dtype, len(K)):
        values, vectors = torch.linalg.eigh(K)
        return values.flip(-1), vectors.flip(-1)
    values, vectors = small_kernels.eigenpairs(K)
    values, order = values.sort(descending=True)
    return values, vectors.index_select(-1, order)


def solve(K: Tensor, L: Tensor) -> Tensor:
    """K^-1 L for a positive definite K [M, M] and L [..., M, M].

    >>> solve(torch.diag(torch.tensor([2.0, 4.0])), torch.eye(2)).diagonal()
    tensor([0.5000, 0.2500])
    """
    if small_kernels is None or not _in_registers(K.device, K.dtype, len(K)):
        return torch.linalg.solve_ex(K, L).result
    return small_kernels.inverse(K) @ L


def waits_for_host(device: torch.device, dtype: torch.dtype, members: int) -> bool:
    """Eigenpairs of such a matrix come from a routine that waits, so that it cannot be captured."""
    return not _in_registers(device, dtype, members)


def _in_registers(device: torch.device, dtype: torch.dtype, members: int) -> bool:
    small = small_kernels is not None and members <= small_kernels.LARGEST
    return small and device.type == "cuda" and dtype == torch.float32
