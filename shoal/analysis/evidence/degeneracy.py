r"""How many members there really are: those that coincide are one point mass.

Two members coincide in weights when $|θ_i - θ_j| \le ε \max(|θ_i|, |θ_j|)$, and in function when
their Hellinger distance $\sqrt{1 - S_{ij}}$ over the given inputs is at most ε, with S the
Bhattacharyya affinity. Hidden units in another order are other weights and the same function.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.tree import rows
from shoal.core.types import Tree
from shoal.prediction.predictive import Predictive
from shoal.prediction.similarity import affinity

__all__ = ["Degeneracy", "degeneracy", "merged"]


@dataclass(frozen=True)
class Degeneracy:
    """Which members coincide.

    Attributes:
        in_weights: groups of members with the same weights, every member in one.
        in_function: groups of members with the same predictions, every member in one.
    """

    in_weights: list[list[int]]
    in_function: list[list[int]]

    @property
    def effective(self) -> int:
        """The number of different functions."""
        return len(self.in_function)


def degeneracy(
    pred: Predictive, weights: Tree | None = None, tolerance: float = 1e-3
) -> Degeneracy:
    """Members that are the same, in weights (equal architectures) or in what they predict.

    Args:
        pred: what the members say about some inputs.
        weights: their tensors [M, ...]; None when they are of different architectures.
        tolerance: relative distance of weights, and Hellinger distance of predictions.
    """
    apart = (1 - affinity(pred)).clamp_min(0).sqrt()
    alone = [[member] for member in range(pred.size)]
    near = alone if weights is None else _groups(_relative_distances(weights) <= tolerance)
    return Degeneracy(near, _groups(apart <= tolerance))


def merged(weights: Tensor, groups: list[list[int]]) -> Tensor:
    """Weights of the point masses that are left when each group is one, in the order of groups."""
    return torch.stack([weights[group].sum() for group in groups])


def _relative_distances(weights: Tree) -> Tensor:
    flat = torch.cat([rows(tensor.detach()).double().cpu() for tensor in weights.values()], 1)
    lengths = flat.norm(dim=1)
    longest = torch.maximum(lengths[:, None], lengths).clamp_min(1e-300)
    return torch.stack([(flat - row).norm(dim=1) for row in flat]) / longest


def _groups(same: Tensor) -> list[list[int]]:
    """Connected components of a symmetric relation, each in ascending order."""
    left, found = set(range(len(same))), []
    while left:
        reached, fresh = set(), {min(left)}
        while fresh:
            reached |= fresh
            fresh = {j for i in fresh for j in same[i].nonzero().flatten().tolist()} - reached
        found.append(sorted(reached))
        left -= reached
    return found
