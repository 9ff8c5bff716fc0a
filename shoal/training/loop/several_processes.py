"""A session in one process or in several: who writes, what is agreed on, what is gathered.

Without a mesh every method is what one process does anyway. With a mesh the first process writes
the folder and shows progress. All processes call the same methods in the same order.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shoal.core.errors import ConfigError
from shoal.core.interruption import Interruption
from shoal.core.storage.files import Layout, layout
from shoal.core.types import Tree
from shoal.engine.processes.mesh import Agreement, Mesh
from shoal.engine.resources.footprint import bytes_of
from shoal.engine.resources.memory import free_memory
from shoal.inference.ensemble import Ensemble
from shoal.training.folder.mesh_shards import Shards
from shoal.training.folder.trajectory import copy_state
from shoal.training.loop.trainer import Trainer
from shoal.training.members.division import Parted

__all__ = ["Processes"]


class Processes:
    """The processes of one session.

    Attributes:
        mesh: None for one process.
        ensemble: all members.
    """

    def __init__(
        self, mesh: Mesh | None, ensemble: Ensemble, frozen: int, sharded: bool = False
    ) -> None:
        self.mesh, self.ensemble = mesh, ensemble
        self._parted = None if mesh is None else Parted(ensemble, mesh, frozen, sharded)

    @property
    def first(self) -> bool:
        """Whether this process writes the folder and shows progress."""
        return self.mesh is None or self.mesh.first

    def on_first(self, act: Callable[[], None]) -> None:
        """Run on the first process; what it raises, all raise."""
        if self.mesh is None:
            act()
        else:
            self.mesh.on_first(act)

    def any(self, answer: bool) -> bool:
        """Whether any process says so."""
        if self.mesh is None:
            return answer
        return "yes" in self.mesh.texts("yes" if answer else "no")

    def gather_unique(self, sentences: list[str]) -> list[str]:
        """The sentences of all processes, each once."""
        if self.mesh is None:
            return sentences
        lists = [json.loads(text) for text in self.mesh.texts(json.dumps(sentences))]
        return list(dict.fromkeys(sentence for each in lists for sentence in each))

    def check_same(self, config: Mapping[str, Any], provenance: dict[str, Any]) -> None:
        """Refuse processes with other settings or data; all take the first one's run name."""
        if self.mesh is None:
            return
        about = json.dumps([config, provenance["data"]], sort_keys=True, default=str)
        descriptions = self.mesh.texts(about)
        for rank, other in enumerate(descriptions):
            if other != descriptions[0]:
                raise ConfigError(
                    f"process {rank} has other settings or data than process 0; "
                    f"give all processes the same ensemble, data and settings"
                )
        provenance["run_id"] = self.mesh.from_first(provenance["run_id"])
        members, data = self.mesh.grid
        provenance["mesh"] = f"{members}x{data}"

    def check_step(self, step: int) -> None:
        """Refuse to go on from different checkpoints, as on machines without a common disk."""
        if self.mesh is not None and len(set(self.mesh.texts(str(step)))) > 1:
            raise ConfigError(
                "the processes read different checkpoints; "
                "put the run's folder on a disk that all machines share"
            )

    def part(self) -> Ensemble:
        """The members that this process holds: frozen ones, and those that it trains."""
        return self.ensemble if self._parted is None else self._parted.part()

    def trained(self, trainer: Trainer) -> int:
        """Number of trained members of all processes."""
        return trainer.mover.moving.members if self.mesh is None else self.mesh.total

    def layouts(self, part: Ensemble, trainer: Trainer) -> dict[str, Layout]:
        """Shapes and types of the tensors that a checkpoint of the whole must have."""
        tracker = layout(trainer.tracker.state)
        if self._parted is None or self.mesh is None:
            return {"ensemble": layout(part.changing_state), "tracker": tracker}
        sizes = {"sums": 5 + self.mesh.total, "lived": self.mesh.total}
        tracker = {
            name: ((sizes[name],) if name in sizes else shape, dtype)
            for name, (shape, dtype) in tracker.items()
        }
        return {"ensemble": self._parted.layout(part.dtype), "tracker": tracker}

    def shards(self) -> Shards | None:
        """The share of this process in a checkpoint; None for one process."""
        return None if self._parted is None else Shards(self._parted)

    def state(self, part: Ensemble) -> Tree:
        """`Ensemble.changing_state` of all members, on the first process."""
        if self._parted is None:
            return part.changing_state
        return self._parted.gathered(part.changing_state)

    def frozen_state(self, part: Ensemble) -> Tree:
        """`Ensemble.frozen_state` of all members, on the first process."""
        if self._parted is None or self._parted.shards is None:
            return self.ensemble.frozen_state
        return self._parted.unsharded("ensemble", part.frozen_state)

    def copied(self, part: Ensemble) -> Tree:
        """A copy of `state`, in new memory."""
        return copy_state(part) if self._parted is None else self.state(part)

    def collect(self, part: Ensemble, device: torch.device | None = None) -> None:
        """Fill the whole ensemble, on every process, and move it to the device if it fits."""
        if self._parted is None:
            return
        whole = self._parted.collect(part)
        if device is not None and device.type != "cpu":
            free = free_memory(device)
            if free is None or bytes_of(whole.state.values()) < 0.9 * free:
                whole.to(device)

    @property
    def received(self) -> dict[str, Any]:
        """Bytes that this process received from others, by kind, for the run's provenance."""
        return {} if self.mesh is None else {"received": dict(self.mesh.received)}

    def steps(
        self, steps: Iterator[None], interruption: Interruption, due: Callable[[], float]
    ) -> Iterator[None]:
        """The steps; before each, this process says whether to stop or to save after it."""
        while True:
            if self.mesh is not None:
                stop = interruption.received or 0
                self.mesh.wishes = Agreement(stop, time.monotonic() >= due())
            try:
                next(steps)
            except StopIteration:
                return
            yield

    def saves(self, due: float) -> bool:
        """Whether to save now: every process gives the same answer."""
        return time.monotonic() >= due if self.mesh is None else self.mesh.agreed.save

    def stopped(self, interruption: Interruption) -> bool:
        """Whether a signal stops the run now: on every process, if any got one."""
        if self.mesh is None:
            return interruption.received is not None
        if self.mesh.agreed.stop:
            interruption.received = self.mesh.agreed.stop
        return bool(self.mesh.agreed.stop)
