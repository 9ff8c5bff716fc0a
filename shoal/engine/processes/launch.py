"""The processes that train one ensemble: their groups, and what to say when one is lost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.core import errors
from shoal.core.errors import PeerLost, first_line
from shoal.engine.processes.process_grid import layout_of, shares

__all__ = [
    "TIMEOUT",
    "fresh_groups",
    "gathered_bytes",
    "give_up",
    "groups_of",
    "join_processes",
    "own_members",
    "peers_watched",
    "restarted",
    "same_error",
]

TIMEOUT = 120.0
"""Seconds after which a silent process counts as lost."""

_known: dict[tuple, tuple] = {}
"""Groups of the current process group: making them is a collective, and they cannot be undone."""


def groups_of(grid: tuple[int, int], timeout: float, device: str) -> tuple[tuple, Any]:
    """Process groups along members, along data and of all, and the `DeviceMesh`."""
    key = (id(dist.group.WORLD), grid, timeout, device)
    if key not in _known:
        from torch.distributed.device_mesh import DeviceMesh

        groups, places = fresh_groups(grid, timeout), torch.arange(grid[0] * grid[1]).view(grid)
        named = DeviceMesh.from_group(
            list(groups[:2]), device, places, mesh_dim_names=("members", "data")
        )
        _known[key] = groups, named
    return _known[key]


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
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
        padded = torch.nn.functional.pad(data, (0, longest - len(data)))
        dist.all_gather(found, padded, group=group)
    return [bytes(each[: int(size)].tolist()) for each, size in zip(found, sizes, strict=True)]


def same_error(told: str, who: str = "the first process") -> Exception:
    """The error of another process, as this process raises it."""
    name, _, text = told.partition(": ")
    kind = getattr(errors, name, None)
    return kind(text) if kind is not None else PeerLost(f"{who} stopped: {told}")
