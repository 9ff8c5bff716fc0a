"""The share of one process in a checkpoint of several: what it writes, and what it reads.

Every process writes the rows of its own members. The lowest row of the grid that has a common
tensor writes it, and replicas write nothing. A checkpoint holds what one process would have saved,
so a run may go on with any number of processes.
"""

from dataclasses import replace

from torch import Tensor

from shoal.core.storage.checkpoints import Checkpoint
from shoal.core.storage.shards import Shard, Spans
from shoal.engine.processes.groups import GroupExchange
from shoal.training.folder.run_folder import BEST
from shoal.training.members.division import Parted

__all__ = ["Shards"]

Parts = dict[str, dict[str, Tensor]]
MEMBERS = ("ensemble", BEST)
SPLIT = (*MEMBERS, "optimizer", "tracker")
_MEASURES = 5
"""Entries of the tracker's sums that belong to no member."""


class Shards:
    """What this process has of the checkpoints of one run; all processes make it together.

    Attributes:
        parted: the ensemble, divided over the processes.
        shard: the place of this process among the files.
    """

    def __init__(self, parted: Parted) -> None:
        self.parted = parted
        mesh = parted.mesh
        self.exchange = GroupExchange(mesh.timeout)
        self.shard = Shard(self.exchange, SPLIT, mesh.place[0], mesh.grid[0])

    def share(self, parts: Parts) -> Parts:
        """The tensors that this process writes, by their names in the whole."""
        parts = {kind: self.parted.unsharded(kind, tree) for kind, tree in parts.items()}
        if self.parted.mesh.place[1] > 0:
            return {}
        pieces_by_kind: Parts = {}
        for kind, tree in parts.items():
            if kind in SPLIT or self.shard.first:
                named = {self.parted.global_name(kind, name): t for name, t in tree.items()}
                pieces = {name: self._piece(kind, name, t) for name, t in named.items()}
                pieces_by_kind[kind] = {name: t for name, t in pieces.items() if t is not None}
        return {part: {} for part in SPLIT if part in parts} | pieces_by_kind

    def _piece(self, kind: str, name: str, tensor: Tensor) -> Tensor | None:
        """What this process writes of one of its tensors; None for nothing."""
        count = self._own_rows(kind, name) if tensor.ndim else None
        if count is None:
            return tensor if self._writes_common(kind, name) else None
        # Before the own rows are those of frozen members, and measures of all members.
        rows = tensor if self.shard.first else tensor[len(tensor) - count :]
        return rows if len(rows) else None

    def _own_rows(self, kind: str, name: str) -> int | None:
        """Number of rows of own members in a tensor; None for a tensor of all members."""
        parted = self.parted
        if kind == "tracker":
            return parted.mesh.own.stop - parted.mesh.own.start
        if kind in MEMBERS and not name.startswith("shared/"):
            return parted.own_rows(name)
        if kind == "optimizer" and parted.is_private(name):
            return parted.own_rows(parted.optimized(name))
        return None

    def _writes_common(self, kind: str, name: str) -> bool:
        if kind != "optimizer" or not self.parted.is_private(name):
            return self.shard.first
        rows = self.parted.rows_of(self.parted.optimized(name))
        have = [row for row, span in enumerate(rows) if span.stop > span.start]
        return have[:1] == [self.shard.index]

    def rows(self, kind: str, name: str, total: int) -> Spans:
        """Rows that this process reads of a tensor of the whole."""
        parted, members = self.parted, self.parted.mesh.own
        if kind == "tracker":
            first = total - parted.mesh.total
            return [slice(0, first), slice(first + members.start, first + members.stop)]
        divided = parted.shard_of(kind, name)
        if parted.shards is not None and divided is not None:
            return [parted.shards.rows(divided)]
        if kind == "optimizer" and parted.is_private(name):
            within = parted.within(name)
            return [within] if within.start < within.stop else []
        if kind not in MEMBERS or name.startswith("shared/"):
            return None
        start = 0 if name == "alive" else parted.span(name).start
        frozen, mine = parted.frozen, parted.shifted(members)
        cuts = [(0, frozen), (mine.start, mine.stop)]
        inside = [(max(low, start) - start, min(high, start + total) - start) for low, high in cuts]
        return [slice(low, high) for low, high in inside if low < high]

    def own(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint of own rows, by the names of this process's optimiser."""
        parts, local = dict(checkpoint.parts), self.parted.local_name
        tensors = parts.get("optimizer", {})
        parts["optimizer"] = {name: t for n, t in tensors.items() if (name := local(n)) is not None}
        for part in MEMBERS:
            tree = parts.get(part, {}).items()
            parts |= {part: {n: t for n, t in tree if n.startswith("shared/") or len(t)}}
        plain = checkpoint.state.get("optimizer", {})
        numbers = {name: v for n, v in plain.items() if (name := local(n)) is not None}
        state = {**checkpoint.state, "optimizer": numbers}
        return replace(checkpoint, parts=parts, state=state)
