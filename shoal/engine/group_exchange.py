"""Messages between the processes of a run beside its training, for checkpoints."""

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.engine.processes import peers_watched

__all__ = ["GroupExchange"]

_known: dict[tuple[int, float], Any] = {}


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
        if key not in _known:
            limit = timedelta(seconds=timeout)
            _known[key] = dist.new_group(backend="gloo", timeout=limit)
        self._group = _known[key]

    def gather(self, value: Any, /) -> list[Any]:
        """The values of all processes; they travel as JSON."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with peers_watched():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
            longest = max(int(size) for size in sizes)
            found = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
            padded = torch.nn.functional.pad(data, (0, longest - len(data)))
            dist.all_gather(found, padded, group=self._group)
        sized = zip(found, sizes, strict=True)
        return [json.loads(bytes(each[: int(size)].tolist())) for each, size in sized]
