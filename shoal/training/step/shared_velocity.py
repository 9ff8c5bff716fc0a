"""The velocity of tensors that all members train together."""

import torch
from torch import Tensor

from shoal.core.tree import finite
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.training.step.drive import StepContext
from shoal.training.step.others import Others, repelled

__all__ = ["shared_velocity", "shares_of_drives"]


def shares_of_drives(
    context: StepContext, ensemble: Ensemble, others: Others | None
) -> Tensor | None:
    r"""Weight $c_j$ of each member's drive in the summed velocity [M], if weight gradients mix.

    $\sum_i \sum_j mix_{ij} g_j = \sum_j c_j g_j$. None if nothing is trained together, or if drives
    are mixed at the outputs, before the backward pass.
    """
    if context.base != "weights" or not context.shares_drives or not ensemble.trained_shared:
        return None
    assert context.repulsion is not None
    weights = {name: tensor.detach() for name, tensor in ensemble.weights.items()}
    push, mine = repelled(context.repulsion, weights, ensemble.alive, None, others)
    mix = push.interaction.mix
    assert mix is not None, "a Stein flow mixes drives"
    return mix.sum(0)[mine]


def shared_velocity(
    context: StepContext,
    ensemble: Ensemble,
    gradients: Tree,
    alive: Tensor,
    shares: Tensor | None,
) -> Tree:
    r"""Velocity of tensors that all members train together: the mean of the members' velocities.

    Copies $φ_i$ of a tensor, one per member, would move with velocities $v_i$. Equal copies stay
    equal if the velocity is projected on them. The orthogonal projection of $(v_1, ..., v_M)$ on
    $(v, ..., v)$ is the mean, $v = \frac1M \sum_i v_i$. Weights that all members share do not repel
    each other: their coordinates are equal, and the rows of B sum to zero.

    Args:
        context: gives the prior, and its factor.
        ensemble: the members, which share the tensors.
        gradients: sums over members of the drives, and of the pushes on outputs and gradients.
        alive: which members are finite [M]; the mean is over these.
        shares: weight of each member's drive in the sums [M], if a flow mixes drives.
    """
    count, total = alive.sum(), None if shares is None else shares.sum()
    gradients, count, total = _of_all(context, gradients, count, total)
    count = count.clamp(min=1)
    balance = context.annealing if total is None else context.annealing * total / count
    # As a member, so that the prior sees a tensor [1, ...] of the shape that it knows.
    drives = {name: (tensor / count).unsqueeze(0) for name, tensor in gradients.items()}
    one = {name: t.detach().unsqueeze(0) for name, t in ensemble.trained_shared.items()}
    moved = context.posterior.add_prior(drives, one, balance)
    velocity = {name: tensor[0] for name, tensor in moved.items()}
    # A member that diverges in this very step reaches all gradients; it is left out from now on.
    sound = torch.stack([finite(tensor).all() for tensor in velocity.values()]).all()
    sound = context.members.all_finite(ensemble, sound)
    return {name: torch.where(sound, tensor, 0.0) for name, tensor in velocity.items()}


def _of_all(
    context: StepContext, gradients: Tree, count: Tensor, total: Tensor | None
) -> tuple[Tree, Tensor, Tensor | None]:
    """Sums over all trained members."""
    like = next(iter(gradients.values()))
    shares = like.new_zeros(1) if total is None else total.to(like).reshape(1)
    *sums, everyone, weighed = context.members.total(
        [*gradients.values(), count.to(like).reshape(1), shares], "shared"
    )
    tree = dict(zip(gradients, sums, strict=True))
    return tree, everyone[0], None if total is None else weighed[0]
