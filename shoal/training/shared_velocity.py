"""The velocity of tensors that all members train together."""

import torch
from torch import Tensor

from shoal.core.tree import finite
from shoal.core.types import Tree
from shoal.inference.posterior import Posterior

__all__ = ["shared_velocity"]


def shared_velocity(
    posterior: Posterior, gradients: Tree, shared: Tree, alive: Tensor, prior: float | Tensor
) -> Tree:
    r"""Velocity of tensors that all members train together: the mean of the members' velocities.

    Copies $φ_i$ of a tensor, one per member, would move with velocities $v_i$. Equal copies stay
    equal if the velocity is projected on them. The orthogonal projection of $(v_1, ..., v_M)$ on
    $(v, ..., v)$ is the mean, $v = \frac1M \sum_i v_i$. Weights that all members share do not repel
    each other: their coordinates are equal, and the rows of B sum to zero.

    Args:
        posterior: gives the prior.
        gradients: sums over members of the drives, and of the pushes on outputs and gradients.
        shared: the tensors.
        alive: which members are finite [M]; the mean is over these.
        prior: factor of the prior's gradient.
    """
    found = {name: tensor / alive.sum().clamp(min=1) for name, tensor in gradients.items()}
    # As a member, so that the prior sees a tensor [1, ...] of the shape that it knows.
    drives = {name: tensor.unsqueeze(0) for name, tensor in found.items()}
    one = {name: tensor.unsqueeze(0) for name, tensor in shared.items()}
    found = {name: t[0] for name, t in posterior.add_prior(drives, one, prior).items()}
    # A member that diverges in this very step reaches all gradients; it is left out from now on.
    sound = torch.stack([finite(tensor).all() for tensor in found.values()]).all()
    return {name: torch.where(sound, tensor, 0.0) for name, tensor in found.items()}
