"""What several processes hold of one ensemble: from the whole to a part, and back.

The whole is what a folder stores and `fit` returns. A part is what one process trains: all frozen
members, then its own members. Private tensors [M, ...] are divided by rows, shared tensors are
equal in all parts. A rank need not have every architecture.
"""

import json
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.storage.files import Layout
from shoal.core.types import Tree
from shoal.engine.members.sharded_trunk import TrunkShards
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble
from shoal.inference.priors import FunctionalPrior, FunctionSpace
from shoal.training.members.shards import divide_trunk, restore_trunk
from shoal.training.options.settings import Settings
from shoal.training.step.results import StepInfo
from shoal.training.step.velocity import check_space

__all__ = ["Parted", "agreed", "check_mesh", "prior_of_all"]


class Parted:
    """One ensemble, divided over the processes of a mesh.

    Attributes:
        whole: the ensemble of all members; other processes' rows are filled by `collect`.
        mesh: the processes.
        frozen: number of frozen members, which every process has.
        sharded: replicas divide the tensors that members share.
        shards: how they do; None for whole tensors.
    """

    def __init__(self, whole: Ensemble, mesh: Mesh, frozen: int, sharded: bool = False) -> None:
        self.whole, self.mesh, self.frozen, self.sharded = whole, mesh, frozen, sharded
        self.shards: TrunkShards | None = None

    def part(self) -> Ensemble:
        """The frozen members and the own members; without frozen members on the same memory."""
        whole, trained = self.whole, self.shifted(self.mesh.own)
        part = whole.slice_members(trained.start, trained.stop)
        if self.frozen:
            before = {group.prefix: group for group in whole.slice_members(0, self.frozen).groups}
            mine = {group.prefix: group for group in part.groups}
            part.groups = [
                _joined([tree[g.prefix] for tree in (before, mine) if g.prefix in tree])
                for g in whole.groups
                if g.prefix in before or g.prefix in mine
            ]
            part.alive, part.first = torch.cat([whole.alive[: self.frozen], part.alive]), 0
            part.builds = [None] * len(part.groups)
        for group in part.groups:
            group.shared = dict(group.shared)
        if self.sharded:
            self.shards = divide_trunk(whole, part, self.mesh)
        return part

    def layout(self, dtype: torch.dtype) -> Layout:
        """Shapes and types of the tensors of the whole, in this type."""
        return {
            name: (tuple(t.shape), dtype if t.is_floating_point() else t.dtype)
            for name, t in self.whole.changing_state.items()
        }

    def collect(self, part: Ensemble) -> Ensemble:
        """The whole with the tensors of all processes, on every process, in host memory."""
        if self.shards is not None:
            restore_trunk(self.whole, part, self.shards)
        if part.dtype != self.whole.dtype or self.whole.device.type != "cpu":
            self.whole.to("cpu", part.dtype)
        mine = {name: t.detach().cpu() for name, t in part.changing_state.items()}
        for name, tensor in self.whole.changing_state.items():
            if name.startswith("shared/"):
                if self.shard_of("ensemble", name) is None:
                    tensor.data.copy_(mine[name])
                continue
            start = 0 if name == "alive" else self.span(name).start
            for row, rows in enumerate(self.rows_of(name)):
                rows = slice(rows.start - start, rows.stop - start)
                if rows.stop > rows.start:
                    self._fill(tensor.data[rows], mine.get(name), row)
        self.whole.made = None
        return self.whole

    def _fill(self, rows: Tensor, mine: Tensor | None, row: int) -> None:
        """Fill rows of the whole, which lie in one row of the grid; `mine` ends with own rows."""
        buffer = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if row == self.mesh.place[0] and mine is not None:
            buffer.copy_(mine[len(mine) - len(rows) :])
        kind = buffer.to(torch.uint8) if buffer.dtype == torch.bool else buffer
        self.mesh.broadcast(kind, row)
        rows.copy_(kind)

    def gathered(self, state: Tree) -> Tree:
        """`Ensemble.changing_state` of all members, on the first process; its own elsewhere."""
        state = self.unsharded("ensemble", state)
        host_state = {name: t.detach().cpu() for name, t in state.items()}
        rows = {
            name: t[len(t) - self.own_rows(name) :]
            for name, t in host_state.items()
            if not name.startswith("shared/")
        }
        about = [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in rows.items()
        ]
        headers = self.mesh.texts(json.dumps(about))
        row, column = self.mesh.place
        if not self.mesh.first:
            if column == 0 and row > 0:
                for tensor in rows.values():
                    self.mesh.send(_as_bytes(tensor))
            return host_state
        pieces = {name: [tensor] for name, tensor in host_state.items()}
        for other in range(1, self.mesh.grid[0]):
            for name, dtype, shape in json.loads(headers[other * self.mesh.grid[1]]):
                empty = torch.empty(shape, dtype=getattr(torch, dtype))
                self.mesh.receive(_as_bytes(empty), other)
                pieces.setdefault(name, []).append(empty)
        return {
            name: host_state[name] if name.startswith("shared/") else torch.cat(pieces[name])
            for name in self.whole.changing_state
        }

    def shard_of(self, kind: str, name: str) -> str | None:
        """The divided tensor that a tensor of the ensemble or the optimiser belongs to, if any."""
        if self.shards is None or kind not in ("ensemble", "optimizer"):
            return None
        kept = (name if kind == "ensemble" else self.optimized(name)).removeprefix("shared/")
        return kept if kept in self.shards.shapes else None

    def unsharded(self, kind: str, tree: Tree) -> Tree:
        """The tree with whole tensors instead of shards, in host memory of the first process.

        The other processes keep their shards; all of them call this.
        """
        if self.shards is None:
            return tree
        whole_tensors = dict(tree)
        for name, tensor in tree.items():
            divided = self.shard_of(kind, name)
            if divided is not None and tensor.ndim:
                whole = self.shards.whole(divided, tensor)
                whole_tensors[name] = whole.cpu() if self.mesh.first else tensor
        return whole_tensors

    def shifted(self, members: slice) -> slice:
        """Trained members by their numbers in the whole, where frozen members come first."""
        return slice(self.frozen + members.start, self.frozen + members.stop)

    def span(self, name: str) -> slice:
        """Members of the whole that a private tensor belongs to."""
        rest, first = name.partition("/")[2], 0
        for group in self.whole.groups:
            if rest.startswith(group.prefix):
                return slice(first, first + group.members)
            first += group.members
        raise KeyError(name)

    def rows_of(self, name: str) -> list[slice]:
        """Members of a private tensor that each row of the grid trains."""
        span = slice(0, self.whole.members) if name == "alive" else self.span(name)
        shards = [self.shifted(shard) for shard in self.mesh.shards]
        cuts = [(max(s.start, span.start), min(s.stop, span.stop)) for s in shards]
        return [slice(low, max(low, high)) for low, high in cuts]

    def own_rows(self, name: str) -> int:
        """Number of rows of own members in a private tensor."""
        rows = self.rows_of(name)[self.mesh.place[0]]
        return rows.stop - rows.start

    def _trained(self, shard: slice) -> list[str]:
        """Names of the optimiser's tensors of some trained members, in its order."""
        part = self.whole.slice_members(self.frozen + shard.start, self.frozen + shard.stop)
        shared = {} if self.frozen else part.trained_shared
        return [*(f"weights/{name}" for name in part.weights), *(f"shared/{n}" for n in shared)]

    def _everyone(self) -> list[str]:
        return self._trained(slice(0, self.mesh.total))

    def optimized(self, name: str) -> str:
        """The weight that a tensor of the optimiser of the whole belongs to."""
        return self._everyone()[int(name.partition(".")[0])]

    def is_private(self, name: str) -> bool:
        """Whether a tensor of the optimiser of the whole belongs to private weights."""
        index = int(name.partition(".")[0])
        return self._everyone()[index].startswith("weights/")

    def within(self, name: str) -> slice:
        """Own rows in a tensor of the optimiser of the whole."""
        weight = self._everyone()[int(name.partition(".")[0])]
        first = max(self.span(weight).start, self.frozen)
        rows = self.rows_of(weight)[self.mesh.place[0]]
        return slice(rows.start - first, rows.stop - first)

    def global_name(self, kind: str, name: str) -> str:
        """The name in a checkpoint of the whole; the optimiser counts its tensors."""
        if kind != "optimizer":
            return name
        index, _, entry = name.partition(".")
        weight = self._trained(self.mesh.own)[int(index)]
        return f"{self._everyone().index(weight)}.{entry}"

    def local_name(self, name: str) -> str | None:
        """The name in the own part; None for an architecture that this process does not have."""
        index, _, entry = name.partition(".")
        weight, mine = self._everyone()[int(index)], self._trained(self.mesh.own)
        return f"{mine.index(weight)}.{entry}" if weight in mine else None


def _joined(groups: list) -> Any:
    """Members of one architecture from one or two groups, copied."""
    first = groups[0]
    weights = {
        name: torch.cat([g.weights[name].detach() for g in groups]).requires_grad_()
        for name in first.weights
    }
    buffers = {name: torch.cat([g.buffers[name] for g in groups]) for name in first.buffers}
    return replace(first, weights=weights, buffers=buffers)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def agreed(mesh: Mesh | None, info: StepInfo, repelled: bool) -> StepInfo:
    """The measures of a step over the members of all processes."""
    if mesh is None:
        return info
    count = info.alive.sum().double()
    squares = info.measures[:2].double().square() * count
    sums = [squares, count.reshape(1)]
    if info.statistics is not None:
        sums.append((info.statistics.double() * count).nan_to_num(0.0))
    total = mesh.agree(torch.cat(sums))
    everyone = total[2].clamp(min=1)
    measures = info.measures.clone()
    measures[:2] = (total[:2] / everyone).sqrt()
    if not repelled:
        measures[3] = total[2]
    statistics = info.statistics
    if statistics is not None:
        statistics = (total[3:] / total[2]).to(statistics)
    return replace(info, measures=measures, statistics=statistics, count=total[2].long())


def prior_of_all(prior: Any, mesh: Mesh | None) -> Any:
    """The prior with as many draws as the whole ensemble has members."""
    if mesh is None or not isinstance(prior, FunctionSpace) or prior.draws is not None:
        return prior
    return replace(prior, draws=mesh.total)


def check_mesh(mesh: Mesh | None, ensemble: Ensemble, settings: Settings) -> None:
    """Refuse what several processes cannot do exactly."""
    if ensemble.made is not None and (mesh is None or mesh.own != ensemble.made):
        raise ConfigError(
            "this ensemble has only the members of another division; "
            "give `divided` of Ensemble.init the mesh of fit, or leave divided out"
        )
    if mesh is None:
        return
    check_space(ensemble, settings.method.repulsion)  # a process may have one architecture of many
    prior = settings.prior
    if isinstance(prior, FunctionalPrior) and len(ensemble.groups) > 1:
        raise ConfigError(
            "a prior on functions of several architectures needs one process; leave torchrun out"
        )
    if isinstance(prior, FunctionSpace) and prior.legacy:
        raise ConfigError(
            "the published prior on functions takes a median over all members; "
            "leave legacy out of the prior, or use one process"
        )
    if settings.compares_at_first:
        raise ConfigError(
            f"'{settings.method.name}' compares members at inputs of the first member, which only "
            f"one process has; use one process, or batches and augmentation that members share"
        )
