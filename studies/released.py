"""Forms of released code that several studies compare."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.interaction.flows import Stein

__all__ = ["LinearDensity"]


@dataclass(frozen=True)
class LinearDensity(Stein):
    """The linear kernel as a density estimate, as in released code: ∇_i log sum_j z_i · z_j.

    The sum may be negative, so this is no density and may attract. With K = 1 + z z^T from
    `LinearKernel`, B z = sum_j z_j / sum_j (K_ij - 1).
    """

    def __call__(self, K: Tensor, L: Tensor, members: Tensor) -> tuple[None, Tensor]:
        """Identity, and a matrix of equal entries in each row."""
        total = (K - 1).sum(-1, keepdim=True)
        return None, (1 / torch.where(total != 0, total, 1.0)).expand_as(K)[None]
