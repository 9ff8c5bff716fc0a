"""All members of a step: those that this process trains, frozen ones, and those of other processes.

Frozen members come first, then the members of all processes in order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.tree import finite, member_norms, mixed, per_member
from shoal.core.types import Tree
from shoal.engine.processes.mesh import Mesh
from shoal.interaction.repulsion import Interaction, Push, Repulsion, repel, weighted_space
from shoal.training.members.mesh_cloud import (
    column_cloud,
    gathered_cloud,
    gathered_drives,
    mixed_in_columns,
)

__all__ = ["FrozenState", "mixed_drives", "pushed_members"]


class FrozenState(NamedTuple):
    """Frozen members: they repel the others and do not move.

    Attributes:
        base: their tensors in the base of the space [F, ...].
        alive: which frozen members are finite [F].
        drive: their driving forces, for flows in which members share drives; None for others.
    """

    base: Tree
    alive: Tensor
    drive: Tree | None


def pushed_members(
    repulsion: Repulsion,
    base: Tree,
    alive: Tensor,
    frozen: FrozenState | None,
    weight: Tensor | None = None,
    mesh: Mesh | None = None,
) -> tuple[Push, slice]:
    """The push on the own trained members, and which of all members these are."""
    if mesh is not None:
        return _pushed_by_all(repulsion, base, alive, frozen, weight, mesh)
    if frozen is None:
        return repel(repulsion, base, alive, weight=weight), slice(None)
    own = slice(len(frozen.alive), len(frozen.alive) + len(alive))
    others = iter(weighted_space(repulsion, weight)(frozen.base))
    everyone = torch.cat([frozen.alive, alive])
    gather = lambda leaf: torch.cat([next(others).to(leaf), leaf])  # noqa: E731
    return repel(repulsion, base, everyone, gather, own, weight), own


def _pushed_by_all(
    repulsion: Repulsion,
    base: Tree,
    alive: Tensor,
    frozen: FrozenState | None,
    weight: Tensor | None,
    mesh: Mesh,
) -> tuple[Push, slice]:
    """`pushed` by the members of all processes."""
    frozen_leaves = frozen_alive = None
    if frozen is not None:
        frozen_alive = frozen.alive
        frozen_leaves = weighted_space(repulsion, weight)(frozen.base)
    count = 0 if frozen is None else len(frozen.alive)
    own = slice(count + mesh.own.start, count + mesh.own.stop)
    make = column_cloud if repulsion.space.base == "weights" else gathered_cloud
    cloud_of = make(mesh, frozen_leaves, frozen_alive)
    return repel(repulsion, base, alive, own=own, weight=weight, cloud_of=cloud_of), own


def mixed_drives(
    interaction: Interaction,
    drive: Tree,
    own: slice,
    frozen: FrozenState | None,
    mesh: Mesh | None = None,
) -> tuple[Tree, Tensor | None]:
    """The drives of the trained members, mixed if the flow mixes drives, and the mixing matrix."""
    if interaction.mix is None:
        return drive, None
    mix, everyone = interaction.mix[own], interaction.cloud.alive
    if mesh is not None and interaction.cloud.whole_rows:
        before = None if frozen is None else frozen.drive
        return mixed_in_columns(mesh, interaction.mix, drive, everyone, before), mix
    if mesh is not None:
        drive = gathered_drives(mesh, drive)
    drive = _joined(drive, frozen)
    living = everyone & finite(member_norms(drive))
    return mixed(mix, _of_finite(drive, living)), mix


def _joined(drive: Tree, frozen: FrozenState | None) -> Tree:
    """The drives of all members, frozen members first."""
    if frozen is None or frozen.drive is None:
        return drive
    return {name: torch.cat([frozen.drive[name].to(t), t]) for name, t in drive.items()}


def _of_finite(tree: Tree, alive: Tensor) -> Tree:
    # Zero times NaN is NaN: a diverged member must not reach the others through the mixing.
    return {name: torch.where(per_member(alive, t), t, 0.0) for name, t in tree.items()}
