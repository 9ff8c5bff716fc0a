"""The mesh: which members and which rows of a batch this process has, and what it exchanges.

Processes form a grid, members x data (`DeviceMesh`). A row of the grid trains some of the members;
the processes of a row are replicas, and each runs its part of the batch. Process r has place
(r // data, r % data).

The mesh knows tensors, not methods. `gather` brings a small tensor of all members to every process.
`to_columns` turns a share of the members with all coordinates into a share of the coordinates of
all members, and `to_rows` turns it back: large tensors cross the network twice and are never held
whole. Nothing is differentiated through: a push is a constant cotangent at the own members.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.engine.processes.groups import (
    TIMEOUT,
    gathered_bytes,
    groups_of,
    layout_of,
    peers_watched,
    same_error,
    shares,
)

__all__ = ["Agreement", "Arrival", "Mesh"]


_dist: Any = dist
# Names of torch before 2.13 come second.
_gather_single = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
_sum_single = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


class Agreement(NamedTuple):
    """What all processes agree on after a step.

    Attributes:
        stop: number of the signal that stops the run; 0 to go on.
        save: whether to write a checkpoint now.
    """

    stop: int = 0
    save: bool = False


class Arrival:
    """A tensor on its way from the other replicas, which may be computed with meanwhile."""

    def __init__(self, mesh: "Mesh", work: Any, buffer: Tensor, rows: int) -> None:
        self._mesh, self._work, self._buffer, self._rows = mesh, work, buffer, rows

    def wait(self) -> Tensor:
        """The tensor, as soon as it is here."""
        if self._work is not None:
            with self._mesh._exchange():
                self._work.wait()
            self._work = None
        return self._buffer[: self._rows]


@dataclass(eq=False)
class Mesh:
    """The place of this process among those that train one ensemble.

    Attributes:
        total: number of trained members, of all processes.
        grid: processes along members and along data.
        rank: number of this process.
        groups: process groups along members, along data, and of all processes.
        device_mesh: the same grid as torch's `DeviceMesh`.
        timeout: seconds after which a silent process counts as lost.
        received: bytes that this process received from others, by kind of exchange.
        waited: seconds that this process has spent in exchanges of steps.
        wishes: what this process wants all to agree on at the next step.
        agreed: what all agreed on at the last step.
    """

    total: int
    grid: tuple[int, int]
    rank: int
    groups: tuple[Any, Any, Any]
    device_mesh: Any = None
    timeout: float = TIMEOUT
    received: Counter[str] = field(default_factory=Counter)
    waited: float = 0.0
    wishes: Agreement = Agreement()
    agreed: Agreement = Agreement()

    @classmethod
    def current(
        cls,
        members: int,
        layout: str | None = None,
        timeout: float = TIMEOUT,
        device: torch.device | str = "cpu",
    ) -> "Mesh | None":
        """The mesh of the initialised process group; None without one, or with one process."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            if layout not in (None, "1x1"):
                raise ConfigError(
                    f"mesh = {layout!r} needs several processes; "
                    f"type: torchrun --nproc-per-node=K -m shoal fit ..."
                )
            _check_alone()
            return None
        grid = layout_of(layout, members, dist.get_world_size())
        with peers_watched():
            groups, device_mesh = groups_of(grid, timeout, torch.device(device).type)
        return cls(members, grid, dist.get_rank(), groups, device_mesh, timeout)

    @property
    def place(self) -> tuple[int, int]:
        """Place of this process along members and along data."""
        return divmod(self.rank, self.grid[1])

    @property
    def shards(self) -> list[slice]:
        """Members of each row of the grid."""
        return shares(self.total, self.grid[0])

    @property
    def own(self) -> slice:
        """Members that this process trains."""
        return self.shards[self.place[0]]

    @property
    def first(self) -> bool:
        """Whether this process speaks for all: it writes the folder and shows progress."""
        return self.rank == 0

    @property
    def replicated(self) -> bool:
        """Whether a batch is divided between replicas."""
        return self.grid[1] > 1

    def batch_rows(self, points: int) -> slice:
        """Rows of a batch that this process runs."""
        return shares(points, self.grid[1])[self.place[1]]

    def gather(self, own: Tensor, flags: Tensor, kind: str = "gather") -> tuple[Tensor, Tensor]:
        """A tensor [M, ...] of all members from those of each process [m, ...], with a flag each.

        The flags travel as one more column, so that a step waits once.
        """
        sizes = [shard.stop - shard.start for shard in self.shards]
        packed = torch.cat([own.detach().flatten(1), flags.to(own).unsqueeze(1)], 1)
        parts = self._all_gather(packed, sizes, self.groups[0], self.place[0], kind)
        whole = torch.cat(parts)
        return whole[:, :-1].reshape(len(whole), *own.shape[1:]), whole[:, -1] > 0.5

    def gather_rows(self, own: Tensor, points: int) -> Tensor:
        """Outputs [m, B, ...] of a whole batch from those of each replica [m, b, ...]."""
        sizes = [part.stop - part.start for part in shares(points, self.grid[1])]
        packed = own.detach().transpose(0, 1).flatten(1)
        group, place = self.groups[1], self.place[1]
        whole = torch.cat(self._all_gather(packed, sizes, group, place, "batch"))
        return whole.reshape(points, len(own), *own.shape[2:]).transpose(0, 1)

    def shard_rows(self, total: int) -> slice:
        """Rows of a tensor in shards that this replica holds; the last shard may be shorter."""
        longest = -(-total // self.grid[1])
        first = self.place[1] * longest
        return slice(min(first, total), min(first + longest, total))

    def gather_shards(self, own: Tensor, total: int, kind: str = "trunk") -> Arrival:
        """Begin to gather a tensor [total, ...] from the rows of each replica (`shard_rows`)."""
        longest = -(-total // self.grid[1])
        padded = _padded(own.detach(), longest).contiguous()
        buffer = own.new_empty(self.grid[1] * longest, *own.shape[1:], requires_grad=False)
        with peers_watched():
            work = _gather_single(buffer, padded, group=self.groups[1], async_op=True)
        self.received[kind] += (self.grid[1] - 1) * padded.numel() * padded.element_size()
        return Arrival(self, work, buffer, total)

    def sum_shards(self, whole: Tensor, kind: str = "trunk gradients") -> Tensor:
        """Own rows (`shard_rows`) of the sum of a tensor [total, ...] over the replicas."""
        rows, longest = self.shard_rows(len(whole)), -(-len(whole) // self.grid[1])
        padded = _padded(whole.detach(), longest * self.grid[1]).contiguous()
        shard = whole.new_empty(longest, *whole.shape[1:])
        with self._exchange():
            _sum_single(shard, padded, group=self.groups[1])
        self.received[kind] += (self.grid[1] - 1) * shard.numel() * shard.element_size()
        return shard[: rows.stop - rows.start]

    def to_columns(self, own: Tensor, flags: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """This process's share of the coordinates of all members [M, S, d], with a flag each.

        From the own members' coordinates [m, S, D]; see `columns`.
        """
        m, sites, width = own.shape
        column = flags.to(own).unsqueeze(1)
        pieces = [
            torch.cat([own[:, :, each].reshape(m, -1), column], 1)
            for each in shares(width, self.grid[0])
        ]
        mine = self.columns(width)
        long = sites * (mine.stop - mine.start) + 1
        sizes = [(shard.stop - shard.start) * long for shard in self.shards]
        flat = torch.cat([piece.flatten() for piece in pieces])
        flat = self._all_to_all(flat, [piece.numel() for piece in pieces], sizes, kind).wait()
        whole = flat.view(self.total, long)
        return whole[:, :-1].reshape(self.total, sites, -1), whole[:, -1] > 0.5

    def begin_columns(self, own: Tensor, kind: str) -> Arrival:
        """Begin `to_columns` before the flags are known: the columns [M S d] of all members."""
        pieces = [own[:, :, each].flatten() for each in shares(own.shape[2], self.grid[0])]
        mine = self.columns(own.shape[2])
        long = own.shape[1] * (mine.stop - mine.start)
        sizes = [(shard.stop - shard.start) * long for shard in self.shards]
        return self._all_to_all(torch.cat(pieces), [len(piece) for piece in pieces], sizes, kind)

    def flags(self, own: Tensor, like: Tensor, kind: str = "flags") -> Tensor:
        """Flags [M] of all members from those of each process [m]; they travel as numbers."""
        return self.gather(like.new_empty(len(own), 0), own, kind)[1]

    def to_rows(self, columns: Tensor, width: int, kind: str) -> Tensor:
        """All coordinates of the own members [m, S, D], from columns [M, S, d]."""
        sites, m = columns.shape[1], self.own.stop - self.own.start
        spans = shares(width, self.grid[0])
        sent = [(s.stop - s.start) * columns[0].numel() for s in self.shards]
        taken = [m * sites * (s.stop - s.start) for s in spans]
        flat = self._all_to_all(columns.flatten(), sent, taken, kind).wait()
        return torch.cat([part.view(m, sites, -1) for part in flat.split(taken)], 2)

    def columns(self, width: int) -> slice:
        """The coordinates of which this process has those of all members."""
        return shares(width, self.grid[0])[self.place[0]]

    def add(self, tensors: Sequence[Tensor], kind: str, along: str = "members") -> list[Tensor]:
        """Sums of each tensor over the processes of an axis, in one message."""
        axis = ("members", "data", "all").index(along)
        size = (*self.grid, self.grid[0] * self.grid[1])[axis]
        if size == 1:
            return list(tensors)
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        with self._exchange():
            dist.all_reduce(flat, group=self.groups[axis])
        self.received[kind] += 2 * (size - 1) * flat.numel() * flat.element_size() // size
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]

    def agree(self, sums: Tensor) -> Tensor:
        """Sums over members' processes of a vector, and the agreement of all on stop and save."""
        wishes = sums.new_zeros(65)
        if self.wishes.stop:
            wishes[self.wishes.stop] = 1
        wishes[64] = self.wishes.save and self.first
        totals, wishes = self.add([sums / self.grid[1], wishes], "agreement", "all")
        said = wishes.tolist()
        stop = next((number for number in range(64) if said[number]), 0)
        self.agreed = Agreement(stop, said[64] > 0)
        return totals

    def barrier(self) -> None:
        """Wait for all processes."""
        with peers_watched():
            dist.all_reduce(torch.zeros(1), group=self.groups[2])

    def from_first(self, text: str) -> str:
        """The text of the first process, on every process."""
        return self.texts(text)[0]

    def texts(self, text: str) -> list[str]:
        """The texts of all processes."""
        messages = gathered_bytes(text.encode() or b" ", self.groups[2])
        return [each.decode().strip() for each in messages]

    def broadcast(self, tensor: Tensor, row: int) -> None:
        """Fill a tensor in host memory with that of the first process of a row of the grid."""
        with peers_watched():
            dist.broadcast(tensor, row * self.grid[1], group=self.groups[2])

    def send(self, tensor: Tensor) -> None:
        """Send a tensor in host memory to the first process."""
        with peers_watched():
            dist.send(tensor.contiguous(), 0, group=self.groups[2])

    def receive(self, tensor: Tensor, row: int) -> Tensor:
        """Fill a tensor with what the first process of a row of the grid sent."""
        with peers_watched():
            dist.recv(tensor, row * self.grid[1], group=self.groups[2])
        return tensor

    def on_first(self, act: Callable[[], None]) -> None:
        """Run on the first process alone; what it raises, all processes raise."""
        error: Exception | None = None
        if self.first:
            try:
                act()
            except Exception as failure:
                error = failure
        message = self.from_first("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if message:
            raise same_error(message)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """An exchange of a step; its time is spent waiting for the slowest process."""
        started = time.monotonic()
        with peers_watched():
            yield
        self.waited += time.monotonic() - started

    def _all_gather(
        self, own: Tensor, sizes: list[int], group: Any, place: int, kind: str
    ) -> list[Tensor]:
        """Matrices [size, D] of all processes of a group; shorter ones travel padded."""
        if len(sizes) == 1:
            return [own]
        padded = _padded(own, max(sizes))
        parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in sizes]
        with self._exchange():
            dist.all_gather(parts, padded.contiguous(), group=group)
        self.received[kind] += (len(sizes) - 1) * padded.numel() * padded.element_size()
        parts[place] = padded
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _all_to_all(self, flat: Tensor, sent: list[int], taken: list[int], kind: str) -> Arrival:
        if len(sent) == 1:
            return Arrival(self, None, flat, len(flat))
        buffer, own = flat.new_empty(sum(taken)), flat.contiguous()
        with peers_watched():
            work = dist.all_to_all_single(buffer, own, taken, sent, self.groups[0], async_op=True)
        others = sum(taken) - taken[self.place[0]]
        self.received[kind] += others * flat.element_size()
        return Arrival(self, work, buffer, len(buffer))


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with rows of zeros at its end, so that it has this number of rows."""
    if len(tensor) == rows:
        return tensor
    longer = tensor.new_zeros(rows, *tensor.shape[1:])
    longer[: len(tensor)] = tensor
    return longer


def _check_alone() -> None:
    """Refuse to train the whole ensemble in each process of torchrun, into one folder."""
    started = os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    if started != "1" and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"torchrun started {started} processes, but they have no process group; call "
            f"torch.distributed.init_process_group() first, or type: torchrun -m shoal fit ..."
        )
