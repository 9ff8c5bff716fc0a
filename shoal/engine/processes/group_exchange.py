"""Messages between the processes of a run beside its training, for checkpoints."""

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.engine.processes.launch import gathered_bytes

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
        found = gathered_bytes(json.dumps(value).encode(), self._group)
        return [json.loads(each) for each in found]
