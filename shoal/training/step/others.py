"""The other members of a step: those that repel the trained ones and do not train here.

The interaction of a step sees all members. Most steps have no others: the trained members are all
there are. Frozen members and members of other processes are others (`training.members`).
"""

from typing import Protocol

import torch
from torch import Tensor

from shoal.core.tree import finite, member_norms, mixed, per_member
from shoal.core.types import Tree
from shoal.interaction.cloud import Cloud, GramAhead
from shoal.interaction.repulsion import Interaction, Push, Repulsion, repel

__all__ = ["Others", "mixed_drives", "mixed_finite", "repelled"]


class Others(Protocol):
    """What the interaction sees beside the trained members of this process."""

    def size(self) -> int:
        """Number of other members."""
        ...

    def is_complete(self) -> bool:
        """Whether every coordinate of every member is at hand here."""
        ...

    def repel(
        self, repulsion: Repulsion, base: Tree, alive: Tensor, weight: Tensor | None
    ) -> tuple[Push, slice]:
        """The push of all members on the trained ones, and the places of these among all."""
        ...

    def mixed(self, interaction: Interaction, drive: Tree, mine: slice) -> Tree:
        """sum_j mix_ij drive_j over all members j, for the trained members i."""
        ...


def repelled(
    repulsion: Repulsion,
    base: Tree,
    alive: Tensor,
    weight: Tensor | None = None,
    others: Others | None = None,
    ahead: GramAhead | None = None,
) -> tuple[Push, slice]:
    """The push on the trained members, and the places of these among all members."""
    if others is None:
        cloud_of = Cloud.of if ahead is None else ahead.cloud
        return repel(repulsion, base, alive, weight=weight, cloud_of=cloud_of), slice(None)
    return others.repel(repulsion, base, alive, weight)


def mixed_drives(
    interaction: Interaction, drive: Tree, mine: slice, others: Others | None = None
) -> tuple[Tree, Tensor | None]:
    """The drives of the trained members, mixed if the flow mixes drives, and the mixing matrix."""
    if interaction.mix is None:
        return drive, None
    mix = interaction.mix[mine]
    if others is None:
        return mixed_finite(mix, drive, interaction.cloud.alive), mix
    return others.mixed(interaction, drive, mine), mix


def mixed_finite(mix: Tensor, drive: Tree, alive: Tensor) -> Tree:
    """sum_j mix_ij drive_j over the finite members j.

    Zero times NaN is NaN: a diverged member must not reach the others through the mixing.
    """
    living = alive & finite(member_norms(drive))
    return mixed(mix, {n: torch.where(per_member(living, t), t, 0.0) for n, t in drive.items()})
