"""Members of several processes: each trains some, and the interaction sees all.

Outputs and input gradients are small: every process gathers those of all members, and computes the
rows of the push that belong to its own. Weights are large: each process gets a share of the
coordinates of all members (`Mesh.to_columns`). Centring is by coordinate and needs no message, Gram
matrices of the shares are summed, and B z of a share goes back to the members' processes.

Replicas train the same members. Each runs a part of the batch if the networks treat rows alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.structure import Inputs
from shoal.core.tree import finite, member_norms, mixed, per_member, rows
from shoal.core.types import Leaves, Tree
from shoal.engine.derivatives.replicas import Division, divided_batch
from shoal.engine.processes.mesh import Arrival, Mesh
from shoal.engine.resources.divisible import treats_rows_alone
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import PassResult
from shoal.interaction.cloud import Cloud
from shoal.interaction.repulsion import Interaction, Push, Repulsion, repel, weighted_space
from shoal.training.members.chunks import InChunks, chunk_size
from shoal.training.members.frozen import FrozenState, WithFrozen
from shoal.training.members.shards import is_sound_everywhere
from shoal.training.step.drive import Around, Batch, Drive, Members, OnDevice, StepContext
from shoal.training.step.others import Others, mixed_finite
from shoal.training.step.results import OutputResult

__all__ = ["OtherProcesses", "OverProcesses", "members_of"]

Make = Callable[..., Cloud]


def members_of(frozen: Ensemble | None = None, mesh: Mesh | None = None) -> Members:
    """The members of a step on this device, beside frozen ones and those of other processes."""
    members: Members = InChunks(OnDevice())
    if frozen is not None:
        members = WithFrozen(members, frozen)
    return members if mesh is None else OverProcesses(members, mesh)


@dataclass(frozen=True)
class OverProcesses(Around):
    """Members of one of several processes.

    Attributes:
        of: where the members of this process live.
        mesh: the processes.
    """

    mesh: Mesh

    def run(self, passes: Drive, ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """See `Members`; replicas divide the batch where they can."""
        if self._divides(passes, ensemble, x):
            return self._run_rows(passes, ensemble, x)
        return self.of.run(passes, ensemble, x)

    def _divides(self, passes: Drive, ensemble: Ensemble, x: Inputs) -> bool:
        """Whether replicas divide the batch: networks that treat each row by itself.

        Batch normalisation and dropout know of the other replicas. Otherwise every replica runs the
        whole batch, which gives the same velocity.
        """
        context, mesh, size = passes.context, self.mesh, chunk_size(passes.context)
        if not mesh.replicated or len(x) < mesh.grid[1]:
            return False
        if size is not None and size < ensemble.members:
            return False
        if context.repulsion is not None and context.repulsion.placebo:
            return False  # the norm of a push is not the sum over rows
        plain = context.adversarial is None and passes.points is None and not context.own_inputs
        if not plain or passes.rows is not None or context.mapping.recompute:
            return False
        return isinstance(x, Tensor) and treats_rows_alone(ensemble.groups, x)

    def _run_rows(self, passes: Drive, ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """Both passes for the rows of this replica; outputs are gathered, velocities summed."""
        mesh = self.mesh
        points, mine = len(x), mesh.batch_rows(len(x))
        division = Division(mine, lambda sums: mesh.add([sums], "statistics", "data")[0])
        with divided_batch(division):
            passed = replace(passes, y=passes.y[mine]).forward(ensemble, x[mine])
        whole = PassResult(x, mesh.gather_rows(passed.outputs, points))
        if passed.gradients is not None:
            whole = whole._replace(gradients=mesh.gather_rows(passed.gradients, points))
        result = passes.cotangents(ensemble, x, whole, self.others(passes, x))
        here = result._replace(cotangent=result.cotangent[:, mine].contiguous())
        if result.push is not None and passed.gradients is not None:
            here = here._replace(push=result.push[:, mine].contiguous())
        velocity, head = passes.pull_back(ensemble, passed, here)
        shards = ensemble.groups[0].shards
        summed = {} if shards is None else {n: t for n, t in velocity.items() if n in shards.shapes}
        velocity = {name: t for name, t in velocity.items() if name not in summed}
        sums = mesh.add([*velocity.values(), *(head or {}).values()], "velocity", "data")
        if head is not None:
            head = dict(zip(head, sums[len(velocity) :], strict=True))
        velocity = dict(zip(velocity, sums[: len(velocity)], strict=True))
        return result._replace(head=head), velocity | summed

    def others(self, passes: Drive, x: Inputs) -> Others | None:
        """See `Members`."""
        frozen = self.of.others(passes, x)
        assert frozen is None or isinstance(frozen, FrozenState)
        return OtherProcesses(self.mesh, frozen)

    def others_by_weights(
        self, context: StepContext, ensemble: Ensemble, batch: Batch
    ) -> Others | None:
        """See `Members`; weights travel while both passes of the step are computed.

        Weights do not change before the end of the step. Which members are finite is sent later.
        """
        frozen = self.of.others_by_weights(context, ensemble, batch)
        assert frozen is None or isinstance(frozen, FrozenState)
        if context.base != "weights" or self.mesh.grid[0] == 1:
            return OtherProcesses(self.mesh, frozen)
        assert context.repulsion is not None
        weights = {name: tensor.detach() for name, tensor in ensemble.weights.items()}
        coordinates = torch.cat(_wide(context.repulsion.space(weights)), 2)
        ahead = self.mesh.begin_columns(coordinates, "weights")
        return OtherProcesses(self.mesh, frozen, ahead)

    def everyone(self, tree: Tree) -> Tree:
        """See `Members`."""
        return _gathered(self.mesh, tree)

    def total(self, tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
        """See `Members`."""
        return self.mesh.add(tensors, kind)

    def all_finite(self, ensemble: Ensemble, finite: Tensor) -> Tensor:
        """See `Members`."""
        return is_sound_everywhere(ensemble, finite)


@dataclass(frozen=True)
class OtherProcesses:
    """The members of other processes, and frozen ones, as the interaction sees them.

    Frozen members come first, then the members of all processes in order.

    Attributes:
        mesh: the processes.
        frozen: frozen members; None without any.
        ahead: columns of weights on their way since the beginning of the step, if any.
    """

    mesh: Mesh
    frozen: FrozenState | None = None
    ahead: Arrival | None = None

    def size(self) -> int:
        """See `Others`."""
        mine = self.mesh.own.stop - self.mesh.own.start
        return self._before + self.mesh.total - mine

    def is_complete(self) -> bool:
        """See `Others`."""
        return False

    @property
    def _before(self) -> int:
        return 0 if self.frozen is None else self.frozen.size()

    def repel(
        self, repulsion: Repulsion, base: Tree, alive: Tensor, weight: Tensor | None
    ) -> tuple[Push, slice]:
        """See `Others`."""
        leaves = None
        if self.frozen is not None:
            leaves = weighted_space(repulsion, weight)(self.frozen.base)
        mine = slice(self._before + self.mesh.own.start, self._before + self.mesh.own.stop)
        make = self._cloud_of_columns if repulsion.space.base == "weights" else self._gathered_cloud
        push = repel(repulsion, base, alive, own=mine, weight=weight, cloud_of=make(leaves))
        return push, mine

    def mixed(self, interaction: Interaction, drive: Tree, mine: slice) -> Tree:
        """See `Others`."""
        assert interaction.mix is not None
        if interaction.cloud.whole_rows:
            return self._mixed_in_columns(interaction.mix, drive, interaction.cloud.alive)
        drive = _gathered(self.mesh, drive)
        drive = drive if self.frozen is None else self.frozen.before(drive)
        return mixed_finite(interaction.mix[mine], drive, interaction.cloud.alive)

    def _gathered_cloud(self, frozen: Leaves | None) -> Make:
        """Makes the cloud of all members from the leaves of the members here."""

        def make(leaves: Leaves, alive: Tensor, centred: bool = True) -> Cloud:
            widths = [leaf[0].numel() for leaf in leaves]
            flat = torch.cat([leaf.detach().flatten(1) for leaf in leaves], 1)
            whole, everyone = self.mesh.gather(flat, alive)
            parts = [
                part.reshape(-1, *leaf.shape[1:])
                for part, leaf in zip(whole.split(widths, 1), leaves, strict=True)
            ]
            if frozen is not None and self.frozen is not None:
                pairs = zip(frozen, parts, strict=True)
                parts = [torch.cat([old.to(part), part]) for old, part in pairs]
                everyone = torch.cat([self.frozen.alive, everyone])
            return Cloud.of([part.contiguous() for part in parts], everyone, centred)

        return make

    def _cloud_of_columns(self, frozen: Leaves | None) -> Make:
        """Makes the cloud of a share of the coordinates, from all those of the members here."""

        def make(leaves: Leaves, alive: Tensor, centred: bool = True) -> Cloud:
            leaves, mesh = _wide(leaves), self.mesh
            widths = tuple(leaf.shape[2] for leaf in leaves)
            alive = alive & torch.stack([leaf.sum((-2, -1)) for leaf in leaves]).isfinite().all(0)
            coordinates = torch.cat([leaf.detach() for leaf in leaves], 2)
            columns, everyone = self._columns(coordinates, alive)
            if frozen is not None and self.frozen is not None:
                old = torch.cat(list(frozen), 2)[:, :, mesh.columns(sum(widths))]
                columns = torch.cat([old.to(columns), columns])
                everyone = torch.cat([self.frozen.alive, everyone])
            local = Cloud.of([columns.contiguous()], everyone, centred)
            (gram,) = mesh.add([local.gram], "gram")
            return ColumnCloud(
                local.leaves, gram, local.alive, local.fused, mesh=mesh, widths=widths,
                frozen=self._before,
            )  # fmt: skip

        return make

    def _columns(self, coordinates: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
        """A share of the coordinates of all members, perhaps on its way already, and flags."""
        if self.ahead is None:
            return self.mesh.to_columns(coordinates, alive, "weights")
        columns = self.ahead.wait().view(self.mesh.total, coordinates.shape[1], -1)
        return columns, self.mesh.flags(alive, coordinates)

    def _mixed_in_columns(self, mix: Tensor, drive: Tree, alive: Tensor) -> Tree:
        """sum_j mix_ij drive_j at the weights of the members here, from the whole matrix."""
        mesh, widths = self.mesh, [tensor[0].numel() for tensor in drive.values()]
        coordinates = torch.cat([rows(tensor) for tensor in drive.values()], 1).unsqueeze(1)
        columns, living = mesh.to_columns(coordinates, finite(member_norms(drive)), "drives")
        if self.frozen is not None and self.frozen.drive is not None:
            frozen = self.frozen.drive
            old = torch.cat([rows(frozen[name]) for name in drive], 1).unsqueeze(1)
            columns = torch.cat([old[:, :, mesh.columns(sum(widths))].to(columns), columns])
            living = torch.cat([finite(member_norms(frozen)), living])
        columns = torch.where(per_member(alive & living, columns), columns, 0.0)
        moved = mixed(mix[self._before :], {"": columns})[""]
        whole = mesh.to_rows(moved.contiguous(), sum(widths), "mixed drives")
        parts = whole[:, 0].split(widths, 1)
        return {n: p.reshape(t.shape) for p, (n, t) in zip(parts, drive.items(), strict=True)}


@dataclass(frozen=True)
class ColumnCloud(Cloud):
    """A share of the coordinates of all members; the Gram matrix is that of all coordinates.

    Attributes:
        mesh: brings the results back to the members' processes.
        widths: coordinates of each leaf of the members here.
        frozen: number of frozen members, which come first.
    """

    mesh: Mesh | None = None
    widths: tuple[int, ...] = ()
    frozen: int = 0
    whole_rows = True

    def times(self, B: Tensor) -> list[Tensor]:
        """B z at the members here, leaves [m, S, D], from all rows of B [S, M, M]."""
        assert self.mesh is not None
        (columns,) = super().times(B[:, self.frozen :])
        push = self.mesh.to_rows(columns.contiguous(), sum(self.widths), "push")
        return list(push.split(self.widths, 2))


def _wide(leaves: Leaves) -> list[Tensor]:
    return [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in leaves]


def _gathered(mesh: Mesh, tree: Tree) -> Tree:
    """Tensors of all members, from those of the members here."""
    none = torch.zeros(mesh.own.stop - mesh.own.start, dtype=torch.bool)
    return {n: mesh.gather(t, none.to(t.device), "drives")[0] for n, t in tree.items()}
