"""A trunk in shards (`engine.members.sharded_trunk`) in training: division, norms and noise.

The part of an ensemble that a process trains has own rows of the divided tensors. Optimiser, prior
and noise treat every number by itself, so they work on rows. Norms and checks need all rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.tree import member_norms
from shoal.core.types import Tree
from shoal.engine.members.sharded_trunk import TrunkShards
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble
from shoal.training.options.options import Options

__all__ = [
    "check_trunk",
    "divide_trunk",
    "is_sound_everywhere",
    "norms_of_whole",
    "refill_trunk",
    "restore_trunk",
    "shares_of_noise",
]


def check_trunk(mesh: Mesh | None, ensemble: Ensemble, options: Options) -> None:
    """Refuse a trunk in shards where it cannot be, or brings nothing."""
    if options.trunk != "sharded":
        return
    if mesh is None or not mesh.replicated:
        raise ConfigError(
            "trunk = 'sharded' divides a trunk over processes along data, and there is one; "
            'type mesh="1x2", or leave trunk out'
        )
    if len(ensemble.groups) > 1:
        raise ConfigError("trunk = 'sharded' needs members of one architecture; leave trunk out")
    if not TrunkShards.of(mesh, ensemble.groups[0].shared).shapes:
        raise ConfigError(
            f"members share no matrix with rows for {mesh.grid[1]} processes; leave trunk out"
        )
    for name in ("cache", "memory"):
        if getattr(options, name):
            raise ConfigError(f"trunk = 'sharded' does not go with {name}; leave one of them out")


def divide_trunk(whole: Ensemble, part: Ensemble, mesh: Mesh) -> TrunkShards:
    """Leave a part with own rows of the divided tensors, and the whole without their numbers.

    A process would otherwise hold the trunk twice; `restore_trunk` fills the whole again.
    """
    ours, theirs = part.groups[0], whole.groups[0]
    shards = ours.shards = TrunkShards.of(mesh, ours.shared)
    for name in shards.shapes:
        tensor = ours.shared[name]
        ours.shared[name] = shards.own(name, tensor)
        blank = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        theirs.shared[name] = blank
    return shards


def restore_trunk(whole: Ensemble, part: Ensemble, shards: TrunkShards) -> None:
    """Fill the whole with the tensors of all replicas, in host memory."""
    ours, theirs = part.groups[0], whole.groups[0]
    for name in shards.shapes:
        tensor = shards.whole(name, ours.shared[name]).cpu()
        theirs.shared[name] = tensor.requires_grad_(theirs.shared[name].requires_grad)


def refill_trunk(whole: Ensemble, shared: Tree) -> None:
    """Give the whole these tensors where a training that failed left it without numbers."""
    for group in whole.groups:
        for name, tensor in group.shared.items():
            if tensor.is_meta:
                group.shared[name] = shared[f"{group.prefix}{name}"]


def norms_of_whole(ensemble: Ensemble) -> Callable[[Tree], Tensor]:
    """Norms [1] of trees of shared tensors [1, ...]; of shards, over all replicas."""
    shards = ensemble.groups[0].shards
    if shards is None:
        return member_norms

    def norms(tree: Tree) -> Tensor:
        here = {name: tensor for name, tensor in tree.items() if name in shards.shapes}
        rest = {name: tensor for name, tensor in tree.items() if name not in shards.shapes}
        squares = shards.mesh.add([member_norms(here).square()], "trunk norms", "data")[0]
        return (squares + member_norms(rest).square() if rest else squares).sqrt()

    return norms


def is_sound_everywhere(ensemble: Ensemble, sound: Tensor) -> Tensor:
    """Whether the shared tensors of all replicas are finite; replicas may see different rows."""
    shards = ensemble.groups[0].shards
    if shards is None:
        return sound
    (bad,) = shards.mesh.add([(~sound).double().reshape(1)], "trunk norms", "data")
    return bad[0] == 0


def shares_of_noise(ensemble: Ensemble) -> list[tuple[int, int]] | None:
    """Numbers in each trained shared tensor, and the first one here; None for whole tensors."""
    shards = ensemble.groups[0].shards
    if shards is None:
        return None
    shares = []
    for name, tensor in ensemble.trained_shared.items():
        first, total = 0, tensor.numel()
        if name in shards.shapes:
            total = shards.shapes[name].numel()
            first = shards.rows(name).start * (total // shards.shapes[name][0])
        shares.append((total, first))
    return shares
