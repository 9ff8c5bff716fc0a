"""Members in successive parts: only the activations of one part exist at a time."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.training.step.stages import OutputResult

__all__ = ["Chunks", "Parts", "places_of", "summed"]


class Parts(Protocol):
    """The members in successive parts, and what becomes of their velocities."""

    def others(self) -> Iterable[Ensemble]:
        """All parts but the first, to be looked at."""
        ...

    def changed(self) -> Iterable[Ensemble]:
        """All parts, each to be given to `add` before the next is asked for."""
        ...

    def add(self, part: Ensemble, velocity: Tree, result: OutputResult) -> None:
        """The velocities of a part; at shared tensors, their sum over its members."""
        ...

    def tree(self) -> Tree:
        """The velocity of all members, as far as it is kept."""
        ...


class Chunks:
    """Parts of an ensemble on the device.

    Each velocity is copied into its place, so that no more than one part exists twice.
    """

    def __init__(self, ensemble: Ensemble, size: int) -> None:
        stops = range(size, ensemble.members + size, size)
        self.parts = [ensemble.slice_members(s - size, min(s, ensemble.members)) for s in stops]
        self.own = {
            name: torch.empty(w.shape, dtype=w.dtype, device=w.device)
            for name, w in ensemble.weights.items()
        }
        self.filled = dict.fromkeys(self.own, 0)
        self.shared: dict[str, list[Tensor]] = {name: [] for name in ensemble.trained_shared}

    def others(self) -> Iterable[Ensemble]:
        """See `Parts`."""
        return self.parts[1:]

    def changed(self) -> Iterable[Ensemble]:
        """See `Parts`."""
        return self.parts

    def add(self, part: Ensemble, velocity: Tree, result: OutputResult) -> None:
        """See `Parts`."""
        for name, tensor in velocity.items():
            if name in self.shared:
                self.shared[name].append(tensor)
                continue
            start = self.filled[name]
            self.filled[name] = start + len(tensor)
            self.own[name][start : self.filled[name]].copy_(tensor)

    def tree(self) -> Tree:
        """See `Parts`."""
        return self.own | summed(self.shared)


def places_of(part: Ensemble, ensemble: Ensemble) -> slice:
    """Where the members of a part stand among all members."""
    first = part.first - ensemble.first
    return slice(first, first + part.members)


def summed(shared: dict[str, list[Tensor]]) -> Tree:
    """The sums over all members, from those over the members of each part."""
    return {name: torch.stack(each).sum(0) for name, each in shared.items()}
