r"""Score estimators: regularised inverses of the kernel matrix.

All estimate $∇ \log ρ$ of the members' distribution ρ as $R(K) L z$, where $L z$ is the summed
kernel gradient. They differ only in the regularised inverse $R(K)$.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry
from shoal.engine.kernels.small_matrices import eigenpairs, solve

__all__ = ["KDE", "SGE", "SSGE", "Estimator", "needs_eigenpairs", "registry"]

registry = Registry("estimator")


class Estimator(Protocol):
    """R(K) L from the kernel matrix K [M, M] and the Laplacians L [S, M, M]."""

    def __call__(self, K: Tensor, L: Tensor) -> Tensor:
        """The matrices B [S, M, M]; B z is the estimated score."""
        ...


@registry.register("kde", cite=("liu2019understanding", "dangelo2021repulsive"))
@dataclass(frozen=True)
class KDE:
    """Kernel density estimate, R(K) = diag(K 1)^-1: the gradient of log sum_j k(z_i, z_j)."""

    def __call__(self, K: Tensor, L: Tensor) -> Tensor:
        """Each row of L divided by its row sum of K; rows of diverged members are zero."""
        total = K.sum(-1, keepdim=True)
        return L / torch.where(total > 0, total, 1.0)


@registry.register("sge", cite=("li2018gradient", "dangelo2021repulsive"))
@dataclass(frozen=True)
class SGE:
    """Stein gradient estimate, R(K) = (K + eta 1)^-1.

    Li & Turner (2018), arXiv 1705.07107.

    Attributes:
        eta: ridge of the inverse; 0 inverts K itself, a wide kernel needs about 1.
    """

    eta: float = 0.01

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise ConfigError(f"eta must be zero or positive, not {self.eta}")

    def __call__(self, K: Tensor, L: Tensor) -> Tensor:
        """Solve (K + eta 1) B = L; without a ridge, in the range of K."""
        if self.eta == 0:
            eigenvalues, U = eigenpairs(K)
            keep = eigenvalues > _negligible(eigenvalues)
            inverse = torch.where(keep, 1 / torch.where(keep, eigenvalues, 1.0), 0.0)
            return (U * inverse) @ (U.mT @ L)
        return solve(_ridged(K, self.eta), L)


@registry.register("ssge", cite=("shi2018spectral", "dangelo2021repulsive"))
@dataclass(frozen=True)
class SSGE:
    """Spectral Stein gradient estimate: inverts only the leading eigenpairs of K.

    With K = sum_j lambda_j u_j u_j^T, R(K) = sum_{j <= J} lambda_j / (lambda_j + eta)² u_j u_j^T.
    Shi, Sun & Zhu (2018), arXiv 1806.02925, have eta = 0 and truncate the spectrum.

    Attributes:
        share: keep the fewest leading eigenpairs with this share of the trace.
        pairs: largest number of eigenpairs.
        eta: ridge of the eigenvalues; released code keeps all pairs with eta = 0.01.
    """

    share: float = 0.99
    pairs: int | None = None
    eta: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share must lie in (0, 1], not {self.share}")
        if self.eta < 0:
            raise ConfigError(f"eta must be zero or positive, not {self.eta}")
        if self.pairs is not None and self.pairs < 1:
            raise ConfigError(f"pairs must be at least 1, not {self.pairs}")

    def __call__(self, K: Tensor, L: Tensor) -> Tensor:
        """U Λ (Λ + eta)^-2 U^T L; for the full spectrum K (K + eta 1)^-2 L, by two solves."""
        if self.cut_off:
            U, eigenvalues, inverse = self.spectrum(K)
            return (U * (eigenvalues * inverse)) @ (U.mT @ L)
        return K @ self.inverse_square(K, L)

    @property
    def cut_off(self) -> bool:
        """Whether the spectrum is truncated, which needs the eigenpairs."""
        return self.share < 1 or self.pairs is not None or self.eta == 0

    def inverse_square(self, K: Tensor, L: Tensor) -> Tensor:
        """(K + eta 1)^-2 L, in the space of the kept eigenpairs."""
        if self.cut_off:
            U, _, inverse = self.spectrum(K)
            return (U * inverse) @ (U.mT @ L)
        ridged = _ridged(K, self.eta)
        return solve(ridged, solve(ridged, L))

    def spectrum(self, K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvectors [M, M], eigenvalues and 1 / (lambda + eta)², zero for omitted pairs."""
        eigenvalues, U = eigenpairs(K)
        eigenvalues = eigenvalues.clamp(min=0)
        before = eigenvalues.cumsum(-1) - eigenvalues
        leading = before < self.share * eigenvalues.sum()
        keep = leading & (eigenvalues > _negligible(eigenvalues))
        if self.pairs is not None:
            keep = keep & (torch.arange(len(keep), device=K.device) < self.pairs)
        ridge = torch.where(keep, eigenvalues + self.eta, 1.0)
        return U, eigenvalues, torch.where(keep, ridge.pow(-2), 0.0)


def needs_eigenpairs(estimator: Estimator) -> bool:
    """Whether the estimator truncates the spectrum of K, which needs all eigenpairs."""
    if isinstance(estimator, SSGE):
        return estimator.cut_off
    return isinstance(estimator, SGE) and estimator.eta == 0


def _negligible(eigenvalues: Tensor) -> Tensor:
    """Threshold below which an eigenvalue is rounding error; the largest comes first."""
    return torch.finfo(eigenvalues.dtype).eps * len(eigenvalues) * eigenvalues[0]


def _ridged(K: Tensor, eta: float) -> Tensor:
    return K + eta * torch.eye(len(K), dtype=K.dtype, device=K.device)
