"""The members of several processes as points in one space.

Outputs and input gradients are small: every process gathers those of all members, and computes the
rows of the push that belong to its own. Weights are large: each process gets a share of the
coordinates of all members (`Mesh.to_columns`). Centring is by coordinate and needs no message, Gram
matrices of the shares are summed, and B z of a share goes back to the members' processes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.tree import finite, member_norms, mixed, per_member, rows
from shoal.core.types import Leaves, Tree
from shoal.engine.processes.mesh import Mesh
from shoal.interaction.cloud import Cloud
from shoal.interaction.repulsion import Repulsion

__all__ = [
    "ColumnCloud",
    "begin_columns",
    "column_cloud",
    "gathered_cloud",
    "gathered_drives",
    "mixed_in_columns",
]

Make = Callable[..., Cloud]


def gathered_cloud(mesh: Mesh, frozen: Leaves | None, frozen_alive: Tensor | None) -> Make:
    """Makes the cloud of all members, frozen members first, from the leaves of the own members."""

    def make(leaves: Leaves, alive: Tensor, centred: bool = True) -> Cloud:
        widths = [leaf[0].numel() for leaf in leaves]
        flat = torch.cat([leaf.detach().flatten(1) for leaf in leaves], 1)
        whole, everyone = mesh.gather(flat, alive)
        parts = [
            part.reshape(-1, *leaf.shape[1:])
            for part, leaf in zip(whole.split(widths, 1), leaves, strict=True)
        ]
        if frozen is not None and frozen_alive is not None:
            pairs = zip(frozen, parts, strict=True)
            parts = [torch.cat([old.to(part), part]) for old, part in pairs]
            everyone = torch.cat([frozen_alive, everyone])
        return Cloud.of([part.contiguous() for part in parts], everyone, centred)

    return make


@dataclass(frozen=True)
class ColumnCloud(Cloud):
    """A share of the coordinates of all members; the Gram matrix is that of all coordinates.

    Attributes:
        mesh: brings the results back to the members' processes.
        widths: coordinates of each leaf of the own members.
        frozen: number of frozen members, which come first.
    """

    mesh: Mesh | None = None
    widths: tuple[int, ...] = ()
    frozen: int = 0
    whole_rows = True

    def times(self, B: Tensor) -> list[Tensor]:
        """B z at the own members, leaves [m, S, D], from all rows of B [S, M, M]."""
        assert self.mesh is not None
        (columns,) = super().times(B[:, self.frozen :])
        found = self.mesh.to_rows(columns.contiguous(), sum(self.widths), "push")
        return list(found.split(self.widths, 2))


def column_cloud(mesh: Mesh, frozen: Leaves | None, frozen_alive: Tensor | None) -> Make:
    """Makes the cloud of a share of the coordinates, from all coordinates of the own members."""

    def make(leaves: Leaves, alive: Tensor, centred: bool = True) -> Cloud:
        leaves = _wide(leaves)
        widths = tuple(leaf.shape[2] for leaf in leaves)
        alive = alive & torch.stack([leaf.sum((-2, -1)) for leaf in leaves]).isfinite().all(0)
        own = torch.cat([leaf.detach() for leaf in leaves], 2)
        columns, everyone = _columns(mesh, own, alive)
        if frozen is not None and frozen_alive is not None:
            old = torch.cat(list(frozen), 2)[:, :, mesh.columns(sum(widths))]
            columns = torch.cat([old.to(columns), columns])
            everyone = torch.cat([frozen_alive, everyone])
        local = Cloud.of([columns.contiguous()], everyone, centred)
        (gram,) = mesh.add([local.gram], "gram")
        count = 0 if frozen_alive is None else len(frozen_alive)
        return ColumnCloud(
            local.leaves, gram, local.alive, local.fused, mesh=mesh, widths=widths, frozen=count
        )

    return make


def begin_columns(mesh: Mesh | None, repulsion: Repulsion | None, weights: Tree) -> None:
    """Send weights to the processes that compare them, while both passes of a step are computed.

    Weights do not change before the end of the step. Which members are finite is sent later.
    """
    if mesh is None or repulsion is None or repulsion.space.base != "weights" or mesh.grid[0] == 1:
        return
    still = {name: tensor.detach() for name, tensor in weights.items()}
    own = torch.cat(_wide(repulsion.space(still)), 2)
    mesh.ahead = mesh.begin_columns(own, "weights")


def _columns(mesh: Mesh, own: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """A share of the coordinates of all members, perhaps on its way already, and flags."""
    ahead, mesh.ahead = mesh.ahead, None
    if ahead is None:
        return mesh.to_columns(own, alive, "weights")
    return ahead.wait().view(mesh.total, own.shape[1], -1), mesh.flags(alive, own)


def _wide(leaves: Leaves) -> list[Tensor]:
    return [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in leaves]


def gathered_drives(mesh: Mesh, drive: Tree) -> Tree:
    """Drives at the outputs of all members."""
    none = torch.zeros(mesh.own.stop - mesh.own.start, dtype=torch.bool)
    return {n: mesh.gather(own, none.to(own.device), "drives")[0] for n, own in drive.items()}


def mixed_in_columns(
    mesh: Mesh, mix: Tensor, drive: Tree, alive: Tensor, frozen: Tree | None
) -> Tree:
    """sum_j mix_ij drive_j at the weights of the own members.

    Args:
        mesh: the processes.
        mix: the whole matrix, frozen members first.
        drive: drives of the own members [m, ...].
        alive: which of all members are finite.
        frozen: drives of the frozen members.
    """
    widths = [tensor[0].numel() for tensor in drive.values()]
    own = torch.cat([rows(tensor) for tensor in drive.values()], 1).unsqueeze(1)
    columns, living = mesh.to_columns(own, finite(member_norms(drive)), "drives")
    count = len(mix) - mesh.total
    if frozen is not None:
        old = torch.cat([rows(frozen[name]) for name in drive], 1).unsqueeze(1)
        columns = torch.cat([old[:, :, mesh.columns(sum(widths))].to(columns), columns])
        living = torch.cat([finite(member_norms(frozen)), living])
    columns = torch.where(per_member(alive & living, columns), columns, 0.0)
    moved = mixed(mix[count:], {"": columns})[""]
    found = mesh.to_rows(moved.contiguous(), sum(widths), "mixed drives")
    parts = found[:, 0].split(widths, 1)
    return {n: p.reshape(t.shape) for p, (n, t) in zip(parts, drive.items(), strict=True)}
