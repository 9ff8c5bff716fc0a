"""Members in successive parts: only the activations of one part exist at a time.

If the repulsion acts on outputs or input gradients, the backward pass of a part needs those of all
members. They are then computed first. The first part keeps its activations, and the other parts
repeat their forward pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.structure import Inputs
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import PassResult
from shoal.training.step.drive import Around, Drive, StepContext
from shoal.training.step.results import OutputResult

__all__ = ["InChunks", "InParts", "Parts", "chunk_size", "places_of", "summed"]


class Parts(Protocol):
    """The members in successive parts, and what becomes of their velocities."""

    def others(self) -> Iterable[Ensemble]:
        """All parts but the first, to be run without gradients."""
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


@dataclass(frozen=True)
class InParts(Around):
    """Members that run part by part.

    Attributes:
        of: where the members live otherwise, and who else there is.
        parts: the parts, and what becomes of their velocities.
    """

    parts: Parts

    def run(self, passes: Drive, ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """See `Members`."""
        context, parts = passes.context, self.parts
        whole = passes.within(mapping=replace(context.mapping, chunk=None))
        later, others = [], None
        if context.compares_passes:
            later = _later_passes(whole, ensemble, parts, x)
            others = context.members.others(passes, x)
        result, passed, heads = None, [], []
        for part in parts.changed():
            places = places_of(part, ensemble)
            drive = whole.of_members(places)
            live = drive.forward(part, _inputs_of(x, places, context))
            passed.append(live.detached())
            if context.compares_passes and result is None:
                together = PassResult.joined([passed[0], *later])
                result = whole.cotangents(ensemble, x, together, others)
            if result is None:
                part_result = drive.cotangents(part, x, passed[-1])
            else:
                part_result = _of_members(result, places)
            velocity, head = drive.pull_back(part, live, part_result)
            parts.add(part, velocity, part_result._replace(head=head))
            heads.append(head)
            del live, velocity  # before the next part takes as much
        if result is None:
            result = whole.cotangents(ensemble, x, PassResult.joined(passed))
        head = None if heads[0] is None else _concatenated(heads, ensemble.heads)
        return result._replace(head=head), parts.tree()

    def run_at_once(self, context: StepContext) -> bool:
        """See `Members`."""
        return False


@dataclass(frozen=True)
class InChunks(Around):
    """Members on the device, of which the member runner takes some at a time."""

    def run(self, passes: Drive, ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
        """See `Members`."""
        size = chunk_size(passes.context)
        if size is None or size >= ensemble.members:
            return self.of.run(passes, ensemble, x)
        return InParts(self.of, _Chunks(ensemble, size)).run(passes, ensemble, x)

    def run_at_once(self, context: StepContext) -> bool:
        """See `Members`."""
        return context.mapping.chunk is None and self.of.run_at_once(context)


def chunk_size(context: StepContext) -> int | None:
    """Number of members per forward and backward pass; None for all members."""
    return None if context.needs_all_at_once else context.mapping.chunk


class _Chunks:
    """Parts of an ensemble on the device.

    Each velocity is copied into its place, so that no more than one part exists twice.
    """

    def __init__(self, ensemble: Ensemble, size: int) -> None:
        stops = range(size, ensemble.members + size, size)
        self.parts = [ensemble.slice_members(s - size, min(s, ensemble.members)) for s in stops]
        self.velocity = {
            name: torch.empty(w.shape, dtype=w.dtype, device=w.device)
            for name, w in ensemble.weights.items()
        }
        self.filled = dict.fromkeys(self.velocity, 0)
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
            self.velocity[name][start : self.filled[name]].copy_(tensor)

    def tree(self) -> Tree:
        """See `Parts`."""
        return self.velocity | summed(self.shared)


def places_of(part: Ensemble, ensemble: Ensemble) -> slice:
    """Where the members of a part stand among all members."""
    first = part.first - ensemble.first
    return slice(first, first + part.members)


def summed(shared: dict[str, list[Tensor]]) -> Tree:
    """The sums over all members, from those over the members of each part."""
    return {name: torch.stack(each).sum(0) for name, each in shared.items()}


def _later_passes(whole: Drive, ensemble: Ensemble, parts: Parts, x: Inputs) -> list[PassResult]:
    """The outputs of all parts but the first, which keep no activations and change nothing."""
    plain, passed = whole.within(adversarial=None), []
    with torch.set_grad_enabled(whole.context.base == "gradients"):
        for part in parts.others():
            places = places_of(part, ensemble)
            drive, shown = plain.of_members(places), _inputs_of(x, places, whole.context)
            passed.append(drive.forward(part.without_side_effects(), shown, live=False).detached())
    return passed


def _inputs_of(x: Inputs, places: slice, context: StepContext) -> Inputs:
    """The inputs of some members."""
    return x[places] if context.own_inputs else x


def _concatenated(heads: list, names: Iterable[str]) -> Tree:
    return {name: torch.cat([head[name] for head in heads if name in head]) for name in names}


def _of_members(result: OutputResult, places: slice) -> OutputResult:
    loss, alive, gradient, cotangent = (tensor[places] for tensor in result[:4])
    push = None if result.push is None else result.push[places]
    return OutputResult(loss, alive, gradient, cotangent, result.mix, result.measures, push)
