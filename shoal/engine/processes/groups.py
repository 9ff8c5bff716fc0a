"""The processes that train one ensemble: who has which members, their groups and messages.

Members and batches are divided over a grid of processes. Groups of processes exchange tensors along
members and along data. A lost process is one error, `PeerLost`, in all others.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.core import errors
from shoal.core.errors import ConfigError, PeerLost, first_line

__all__ = [
    "TIMEOUT",
    "GroupExchange",
    "fresh_groups",
    "gathered_bytes",
    "give_up",
    "groups_of",
    "join_processes",
    "layout_of",
    "own_members",
    "peers_watched",
    "restarted",
    "same_error",
    "shares",
    "traffic",
]


def shares(total: int, parts: int) -> list[slice]:
    """Consecutive shares of `total` things, the larger shares first.

    >>> shares(7, 2)
    [slice(0, 4, None), slice(4, 7, None)]
    """
    least, larger = divmod(total, parts)
    ends = [0]
    for part in range(parts):
        ends.append(ends[-1] + least + (part < larger))
    return [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]


def layout_of(text: str | None, members: int, processes: int) -> tuple[int, int]:
    """Processes along members and along data, as typed ("2x2") or the default.

    By default members are divided first. More processes than members become replicas.

    >>> layout_of(None, 7, 2), layout_of(None, 2, 4), layout_of("2x2", 7, 4)
    ((2, 1), (2, 2), (2, 2))
    """
    if text is None:
        rows = max(r for r in range(1, min(members, processes) + 1) if processes % r == 0)
        return rows, processes // rows
    words = text.lower().split("x")
    rows, columns = (int(w) if w.strip().isdecimal() else 0 for w in (*words, "", "")[:2])
    if len(words) != 2 or rows < 1 or columns < 1:
        raise ConfigError(f'mesh must be members x data, such as "{processes}x1", not {text!r}')
    if rows * columns != processes:
        raise ConfigError(
            f"mesh = {text!r} needs {rows * columns} processes, and there are {processes}; "
            f"type --nproc-per-node={rows * columns}"
        )
    if rows > members:
        raise ConfigError(
            f"mesh = {text!r} divides {members} members over {rows} processes; "
            f"use at most {members} along members"
        )
    return rows, columns


def traffic(
    base: str | None,
    members: int,
    processes: int,
    rank: int = 0,
    *,
    numbers: int = 0,
    outputs: int = 0,
    mixes: bool = False,
    size: int = 4,
) -> dict[str, int]:
    """Bytes that a process receives in a step, by kind, if members are divided and batches not.

    Args:
        base: "outputs", "gradients" or "weights"; None for a plain ensemble.
        members: M, trained by all processes.
        processes: R along members.
        rank: which of them.
        numbers: coordinates of a member: B C outputs, B D input gradients, or its weights.
        outputs: B C, for the drives that a Stein flow mixes at the outputs.
        mixes: the flow mixes drives.
        size: bytes of a number.
    """
    shard = shares(members, processes)[rank]
    own, longest = shard.stop - shard.start, -(-members // processes)
    received = {"agreement": 2 * (processes - 1) * 68 * 8 // processes}
    if base in ("outputs", "gradients"):
        received["gather"] = (processes - 1) * longest * (numbers + 1) * size
        if mixes:
            received["drives"] = (processes - 1) * longest * (outputs + 1) * size
    if base == "weights":
        part = shares(numbers, processes)[rank]
        columns = part.stop - part.start
        there, back = (members - own) * (columns + 1) * size, own * (numbers - columns) * size
        ahead = (members - own) * columns * size  # the flags follow by themselves
        received |= {"weights": ahead, "push": back, "flags": (processes - 1) * longest * size}
        received["gram"] = 2 * (processes - 1) * members**2 * size // processes
        received |= {"drives": there, "mixed drives": back} if mixes else {}
    return received


TIMEOUT = 120.0
"""Seconds after which a silent process counts as lost."""

_training_groups: dict[tuple, tuple] = {}
"""Groups of the current process group: making them is a collective, and they cannot be undone."""


def groups_of(grid: tuple[int, int], timeout: float, device: str) -> tuple[tuple, Any]:
    """Process groups along members, along data and of all, and the `DeviceMesh`."""
    key = (id(dist.group.WORLD), grid, timeout, device)
    if key not in _training_groups:
        from torch.distributed.device_mesh import DeviceMesh

        groups, places = fresh_groups(grid, timeout), torch.arange(grid[0] * grid[1]).view(grid)
        named = DeviceMesh.from_group(
            list(groups[:2]), device, places, mesh_dim_names=("members", "data")
        )
        _training_groups[key] = groups, named
    return _training_groups[key]


def fresh_groups(grid: tuple[int, int], timeout: float) -> tuple[Any, Any, Any]:
    """New process groups along members, along data and of all; all processes make them."""
    places, limit = torch.arange(grid[0] * grid[1]).view(grid), timedelta(seconds=timeout)
    along_members = _group_of(places.T.tolist(), limit)
    along_data = _group_of(places.tolist(), limit)
    return along_members, along_data, dist.new_group(timeout=limit)


def give_up(groups: tuple) -> None:
    """Close fresh groups: a process that waits for this one in a group then fails at once.

    Connections end with the last reference to a group, so the caller keeps none.
    """
    for group in groups:
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group(group)


def _group_of(lists: list[list[int]], limit: timedelta) -> Any:
    """The group that this process belongs to; all processes make all groups."""
    groups = [dist.new_group(ranks, timeout=limit) for ranks in lists]
    return next(g for g, ranks in zip(groups, lists, strict=True) if dist.get_rank() in ranks)


def own_members(members: int, layout: str | None = None) -> slice | None:
    """The members that this process would train; None for one process."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    rows, columns = layout_of(layout, members, dist.get_world_size())
    return shares(members, rows)[dist.get_rank() // columns]


def join_processes(timeout: float = TIMEOUT) -> None:
    """Join the processes that torchrun started, unless this process already has.

    After a restart the store still holds the addresses of the lost attempt, so that half of all
    restarts would fail. Each attempt therefore has names of its own. The counter of attempts is
    the same for all processes of one machine; on several machines set
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, which gives each attempt a new store.
    """
    if dist.is_initialized():
        return
    # Only here: a build of torch without its distributed part still trains in one process.
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=timeout)
    with peers_watched():
        store, rank, world = next(iter(rendezvous("env://", timeout=limit)))
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(f"shoal-attempt-{attempt}", store)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def restarted() -> bool:
    """Whether torchrun started this process again after another was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


@contextmanager
def peers_watched() -> Iterator[None]:
    """A block whose failure means that another process is gone or silent."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"another process was lost or went silent ({first_line(error)[:120]}); "
            f"start all processes again with resume=True"
        ) from error


def gathered_bytes(own: bytes, group: Any) -> list[bytes]:
    """The bytes of every process of a group in host memory, at least one byte each."""
    data = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    with peers_watched():
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        longest = max(int(size) for size in sizes)
        padded_bytes = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        padded = torch.nn.functional.pad(data, (0, longest - len(data)))
        dist.all_gather(padded_bytes, padded, group=group)
    return [
        bytes(each[: int(size)].tolist()) for each, size in zip(padded_bytes, sizes, strict=True)
    ]


def same_error(message: str, who: str = "the first process") -> Exception:
    """The error of another process, as this process raises it."""
    name, _, text = message.partition(": ")
    kind = getattr(errors, name, None)
    return kind(text) if kind is not None else PeerLost(f"{who} stopped: {message}")


_exchange_groups: dict[tuple[int, float], Any] = {}


class GroupExchange:
    """The exchange (`core.exchange`) of an initialised process group.

    A group of its own keeps its messages apart from those of training: the thread that writes
    checkpoints exchanges while the steps go on. All processes make it at the same time.

    Args:
        timeout: seconds that the fastest writer waits for the slowest one. A run that lost a
            process waits for its writer, so a longer timeout would hold up its end.
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        key = id(dist.group.WORLD), timeout
        if key not in _exchange_groups:
            limit = timedelta(seconds=timeout)
            _exchange_groups[key] = dist.new_group(backend="gloo", timeout=limit)
        self._group = _exchange_groups[key]

    def gather(self, value: Any, /) -> list[Any]:
        """The values of all processes; they travel as JSON."""
        messages = gathered_bytes(json.dumps(value).encode(), self._group)
        return [json.loads(each) for each in messages]
