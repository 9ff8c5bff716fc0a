r"""Calibrated repulsion: a push of the size that the posterior requires, in any dimension.

With the median bandwidth, the estimated score of M points drawn from $N(μ, s² 1)$ in d dimensions
is about $\ln(M + 1) / 2d$ of the true score. The repulsion of network weights then vanishes. Two
steps correct the size, both with M x M matrices alone. For centred coordinates z with Gram matrix
$G = z z^T$ and covariance $C = z^T z / M$:

1. The members are compared in whitened coordinates, $w = z (C + λ)^{-1/2}$. Their Gram
   matrix is $G_w = G (G / M + λ)^{-1}$, and a score $B w$ there is $B (G / M + λ)^{-1} z$ here.
   Every estimate becomes equivariant under affine maps; wide and narrow directions of the
   posterior have equal weight.
2. The push is scaled by $c = -tr(mix\, G_w) / tr(B\, G_w)$. Integration by parts gives
   $E[∇ \log ρ(w) · w] = -d$ for every density, and c makes the estimate satisfy it: a cloud with
   the covariance of a Gaussian posterior neither grows nor shrinks.

For M up to d + 1 the whitened members form a regular simplex, and every estimator becomes the score
of the Gaussian with the members' moments, $-(z C^+)$. For a Gaussian posterior the members converge
to its M - 1 widest directions, each with its exact variance. The ridge λ bounds directions in which
members hardly differ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Whitening", "stein_factor"]

RIDGE = 1e-3
"""λ as a share of the members' mean variance in the directions they span."""


@dataclass(frozen=True)
class Whitening:
    """The map to coordinates in which the members have unit covariance, and back.

    Attributes:
        gram: inner products of the whitened members [S, M, M].
        inverse: (G / M + λ)^-1 between the finite members; its rows sum to zero [S, M, M].
    """

    gram: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, gram: Tensor, alive: Tensor) -> "Whitening":
        """From the Gram matrix of the centred coordinates [S, M, M]."""
        count = alive.sum().to(gram.dtype)
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
        mean = trace / (count * (count - 1).clamp(min=1))
        ridge = RIDGE * torch.where(mean > 0, mean, 1.0)
        identity = torch.eye(len(alive), dtype=gram.dtype, device=gram.device)
        pair = (alive[:, None] & alive).to(gram.dtype)
        centring = pair * identity - pair / count.clamp(min=1)
        shifted = gram / count.clamp(min=1) + ridge * identity
        inverse = torch.linalg.solve_ex(shifted, centring.expand_as(gram)).result
        inverse = (inverse + inverse.mT) / 2
        whitened = gram @ inverse
        return cls((whitened + whitened.mT) / 2, inverse)


def stein_factor(mix: Tensor | None, B: Tensor, gram: Tensor) -> Tensor:
    """c = -tr(mix G) / tr(B G) of each site [S, 1, 1]; 1 if the estimate does not repel."""
    drive = gram if mix is None else mix @ gram
    driven = drive.diagonal(dim1=-2, dim2=-1).sum(-1)
    pushed = (B @ gram).diagonal(dim1=-2, dim2=-1).sum(-1)
    repels = (pushed < 0) & (driven > 0)
    return torch.where(repels, -driven / torch.where(repels, pushed, 1.0), 1.0)[:, None, None]
