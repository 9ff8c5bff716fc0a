r"""Kernel Stein discrepancy: how far particles are from a density whose score alone is known.

$$ KSD² = \frac{1}{M²} \sum_{ij} u(x_i, x_j), \qquad
   u(x, y) = s(x)·s(y) k + s(x)·∇_y k + s(y)·∇_x k + ∇_x·∇_y k, $$

with the score s of the target and the inverse multiquadric $k = (1 + |x - y|² / h²)^{-1/2}$, for
which convergence of KSD to zero implies convergence in law. Gorham & Mackey (2017), arXiv
1703.01717. No reference is needed, so that any run can be judged.
"""

import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.tree import rows
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior
from shoal.training.step import Batch, forces

__all__ = ["ksd", "ksd_of_ensemble", "stein_kernel"]


def stein_kernel(x: Tensor, scores: Tensor, h2: float) -> Tensor:
    """u(x_i, x_j) [M, M] of particles [M, D] with scores [M, D]."""
    centred = x - x.mean(0)
    gram, cross = centred @ centred.mT, scores @ centred.mT
    squares = gram.diagonal()
    d2 = (squares[:, None] + squares - 2 * gram).clamp(min=0)
    u = 1 + d2 / h2
    # (s_i - s_j)·(x_i - x_j), from inner products alone.
    own = cross.diagonal()
    along = own[:, None] + own - cross - cross.mT
    trace = x.shape[1] * u.pow(-1.5) / h2 - 3 * u.pow(-2.5) * d2 / h2**2
    return scores @ scores.mT * u.rsqrt() + along * u.pow(-1.5) / h2 + trace


def ksd(x: Tensor, scores: Tensor, h2: float | None = None, unbiased: bool = False) -> float:
    """The discrepancy; unbiased, its square without the diagonal, of mean 0 for exact draws.

    Args:
        x: particles [M, D].
        scores: gradients of the log density there [M, D].
        h2: squared width of the kernel; by default the median of the squared distances.
        unbiased: the U-statistic of KSD², which can be negative.
    """
    if len(x) < 2 or x.shape != scores.shape:
        raise DataError(
            f"a Stein discrepancy needs two particles or more, each with a score; there came "
            f"{tuple(x.shape)} and {tuple(scores.shape)}"
        )
    x, scores = x.double(), scores.double()
    if h2 is None:
        h2 = float(torch.nn.functional.pdist(x).square().median().clamp(min=1e-300))
    u = stein_kernel(x, scores, h2)
    if unbiased:
        members = len(x)
        return float((u.sum() - u.trace()) / (members * (members - 1)))
    return float(u.mean().clamp(min=0).sqrt())


def ksd_of_ensemble(ensemble: Ensemble, posterior: Posterior, batch: Batch) -> float:
    """The discrepancy of a trained ensemble from its posterior, with all data in one batch."""
    velocity, _ = forces(ensemble, posterior, None, batch)
    weights = [rows(tensor.detach()) for tensor in ensemble.weights.values()]
    scores = [posterior.n * rows(velocity[name]) for name in ensemble.weights]
    return ksd(torch.cat(weights, 1), torch.cat(scores, 1))
