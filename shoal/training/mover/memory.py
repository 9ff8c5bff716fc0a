"""The memory of a run: how many members run at a time, so that a step stays within its limit.

All members at once are fastest. Chunks cost little where members do not meet before their backward
pass. Where they do (repulsion of outputs or of input gradients), all chunks but the first repeat
their forward pass, so the largest chunk that fits costs the least.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.display.text import size
from shoal.core.errors import ConfigError
from shoal.core.types import Tree
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.resources.footprint import BlockFootprint, Footprint, bytes_of, transient_bytes
from shoal.engine.resources.memory import MemoryLimit, free_memory
from shoal.engine.resources.offload import Offload
from shoal.inference.ensemble import Ensemble, copied_to_device
from shoal.training.options.optim import make_optimizer
from shoal.training.step.drive import StepContext

__all__ = [
    "SHARE_OF_FREE",
    "Measured",
    "MemoryChoice",
    "block_footprint",
    "choose_resident",
    "choose_runner",
    "state_bytes",
    "tried_out",
    "with_activations",
]

SHARE_OF_FREE = 0.8
"""Share of a GPU's free memory for the tensors of a run; its allocator holds more than tensors."""

FRUGAL = 1.8
"""Most that `memory="auto"` takes, of what one member at a time would take."""

_ENDLESS = 2**62
"""Bytes of a step that did not fit."""

Probe = Callable[[Ensemble], object]
"""One step of some members, which leaves the members as they are."""

Held = Callable[[MemberRunner], int | None]
"""Bytes that the allocator held at most in a trial step; None if memory ran out."""

Measured = Callable[[int, MemberRunner], Footprint | None]
"""The footprint by a member runner, from steps of one member or of up to two; None if they fail."""


@dataclass(frozen=True)
class MemoryChoice:
    """How members run, and what a step is predicted to take.

    Attributes:
        mapping: the member runner.
        limit: bytes that the run may take; None without a limit.
        footprint: predicted bytes of a step; None if they are unknown.
        reduced: fewer members run at a time than would without the limit.
        tried: bytes that the allocator of a GPU holds, after a trial step; None without a trial.
        resident: members on the device at a time; None for all.
        frugal: nothing but the wish to save memory limits the step.
    """

    mapping: MemberRunner
    limit: int | None = None
    footprint: Footprint | None = None
    reduced: bool = False
    tried: int | None = None
    resident: int | None = None
    frugal: bool = False

    @property
    def sentence(self) -> str | None:
        """How members run for want of memory; None if they run as they would with more."""
        chunk = self.mapping.chunk
        if self.reduced and self.resident is not None:
            return f"Only {self.resident} members are on the device at a time{self._within}."
        if not self.reduced or (chunk is None and not self.mapping.light):
            return None
        how = ["one at a time" if chunk == 1 else f"in chunks of {chunk}"] if chunk else []
        if self.mapping.recompute:
            how.append("and compute their activations twice")
        elif self.mapping.light:
            how.append(f"{'and compute' * bool(how) or 'with'} normalised layers twice")
        return f"Members run {' '.join(how)}{self._within}."

    @property
    def _within(self) -> str:
        if self.frugal:
            return " to save memory"
        within = "the free memory of the device" if self.limit is None else size(self.limit)
        return f" to stay within {within}"

    def table(self) -> dict[str, Any]:
        """The choice, for the provenance of a run."""
        mapping = self.mapping
        entries: dict[str, Any] = {"limit": self.limit, "chunk": mapping.chunk}
        entries |= {"recompute": mapping.recompute, "light": mapping.light}
        if self.resident is not None:
            return entries | {"resident": self.resident}
        if self.footprint is not None:
            members = self.footprint.members
            entries["predicted"] = self.footprint.peak(min(mapping.chunk or members, members))
        if self.tried is not None:
            entries["held"] = self.tried
        return entries


def choose_runner(
    mapping: MemberRunner,
    context: StepContext,
    fixed: Footprint,
    limit: MemoryLimit | None,
    measured: Measured,
    device: torch.device,
    light: bool = False,
    frugal: bool = False,
) -> MemoryChoice:
    """The fastest runner that fits; raises `ConfigError` if a limit cannot be met.

    The candidates, in the order of their time: all members, chunks, and one member at a time whose
    blocks keep no activations. Where cheap layers can be computed twice (`MemberRunner.light`),
    they are, if members then run in fewer chunks.

    Args:
        mapping: the member runner, whose chunks become no larger.
        context: the settings of the step.
        fixed: bytes of a step without activations.
        limit: the limit; None for a share of the free memory of a GPU.
        measured: the footprint of a step.
        device: device of the members.
        light: cheap layers can be computed twice.
        frugal: take at most `FRUGAL` times the floor, if they can.
    """
    free = free_memory(device)
    if limit is None and free is None:
        return MemoryChoice(mapping)
    room = limit.bytes if limit is not None else fixed.resident + SHARE_OF_FREE * (free or 0)
    wanted = None if limit is None else limit.bytes
    most = min(mapping.chunk or fixed.members, fixed.members)
    footprint = measured(1, mapping)
    if frugal and light and footprint is not None:
        room = min(room, FRUGAL * footprint.floor)
    if footprint is not None and footprint.peak(most) > room:
        footprint = measured(2, mapping)
    chunk = None if footprint is None else footprint.largest_chunk(room, most)
    if chunk == most or (footprint is None and fixed.peak(1) <= room):
        # A step that fails reports its reason later.
        return MemoryChoice(mapping, wanted, footprint)
    together = context.needs_all_at_once
    if light and footprint is not None:
        lighter = replace(mapping, light=True)
        less = measured(2, lighter)
        more = None if less is None else less.largest_chunk(room, most)
        if more is not None and (more == most or not together):
            if _passes(more, most) < _passes(None if together else chunk, most):
                mapping, footprint, chunk = lighter, less, more
    if footprint is not None and chunk is not None and not together:
        if not context.compares_passes:  # chunks of equal size take the same time and less memory
            chunk = math.ceil(footprint.members / math.ceil(footprint.members / chunk))
        chunk = mapping.chunk if chunk == most else chunk
        return MemoryChoice(replace(mapping, chunk=chunk), wanted, footprint, reduced=True)
    if together and chunk == most:
        return MemoryChoice(mapping, wanted, footprint, reduced=True)
    least = MemberRunner("loop", chunk=1, recompute=True)
    again = None if together or context.base == "gradients" else measured(1, least)
    if again is not None and again.peak(1) <= room:
        return MemoryChoice(least, wanted, again, reduced=True)
    if limit is not None:
        measures = [f for f in (again, footprint, fixed) if f is not None and f.member < _ENDLESS]
        raise ConfigError(_too_small(limit, measures[0], most if together else 1))
    chunk = mapping.chunk if together else 1
    return MemoryChoice(replace(mapping, chunk=chunk), wanted, footprint, reduced=not together)


def _passes(chunk: int | None, members: int) -> float:
    """Passes of so many members at a time."""
    return math.inf if chunk is None else math.ceil(members / chunk)


def tried_out(
    choice: MemoryChoice, held: Held, members: int, captures: bool
) -> tuple[MemoryChoice, bool]:
    """The choice that trial steps confirm, and whether its steps may be captured.

    A footprint counts tensors. A GPU's allocator holds more: memory that one stream has freed is
    lost to the others, and libraries keep workspaces for each stream. So chunks become smaller
    until a trial step stays within the limit. Replays of a smaller chunk are faster than eager
    steps of a larger one, so a chunk that fits captured is preferred.
    """
    limit, footprint = choice.limit, choice.footprint
    if limit is None or footprint is None or choice.mapping.recompute:
        return choice, captures
    chunk: int | None = min(choice.mapping.chunk or members, members)
    eager = None
    while chunk is not None:
        runner = choice.mapping if chunk == members else replace(choice.mapping, chunk=chunk)
        taken = held(runner)
        if taken is not None and taken <= limit:
            fewer = choice.reduced or chunk < members
            confirmed = replace(choice, mapping=runner, reduced=fewer, tried=taken)
            most = footprint.captured(taken, chunk) if captures else taken
            if most <= limit:
                return replace(confirmed, tried=most), captures
            eager = eager or confirmed
        chunk = _next_chunk(chunk, members)
    return eager or choice, False


def _next_chunk(chunk: int, members: int) -> int | None:
    """The next smaller chunk that divides the members evenly; None after chunks of one member."""
    sizes = (math.ceil(members / passes) for passes in range(2, members + 1))
    return next((size for size in sizes if size < chunk), None)


def choose_resident(
    mapping: MemberRunner,
    offload: Offload,
    members: int,
    footprint: BlockFootprint,
    limit: MemoryLimit | None,
) -> MemoryChoice:
    """The most members on the device at a time that fit; raises `ConfigError` if one does not.

    Args:
        mapping: the member runner.
        offload: where the members live; its number of residents is set.
        members: number of trained members.
        footprint: bytes of a step in blocks.
        limit: the limit; None for a share of the free memory of a GPU.
    """
    room = SHARE_OF_FREE * (free_memory(offload.device) or 0) if limit is None else limit.bytes
    slots = offload.slots
    sizes = range(max(members // slots, 1), 0, -1)
    block = next((size for size in sizes if footprint.peak(size, slots) <= room), None)
    if block is None:
        raise ConfigError(
            f"memory of {size(room)} is too small for a block of one member, which needs "
            f"{size(footprint.peak(1, slots))}; raise memory, or lower batch_size"
        )
    offload.resident = block * slots
    wanted = None if limit is None else limit.bytes
    return MemoryChoice(mapping, wanted, reduced=True, resident=offload.resident)


def block_footprint(
    moving: Ensemble, spec: Mapping[str, Any], lr: float, whole: Footprint, always: int
) -> BlockFootprint:
    """Bytes of a step in blocks, from what a step of all members would take.

    Args:
        moving: the trained members.
        spec: the optimiser.
        lr: its learning rate.
        whole: bytes of a step with all members on the device.
        always: bytes on the device that do not depend on the blocks.
    """
    weights, buffers = bytes_of(moving.weights.values()), bytes_of(moving.buffers.values())
    states = state_bytes(spec, lr, moving.weights)
    return BlockFootprint(
        always=always,
        state=(weights + buffers + states) // moving.members,
        weights=weights // moving.members,
        common=whole.common,
        member=whole.member,
        unused=whole.unused,
    )


def with_activations(
    fixed: Footprint,
    moving: Ensemble,
    probe: Probe,
    known: Iterable[Tensor],
    most: int,
    share: float = 1.0,
) -> Footprint | None:
    """The footprint with what the passes of members keep; None if a step of one member fails.

    Args:
        fixed: bytes of a step without activations.
        moving: the trained members.
        probe: one step of some members.
        known: tensors that exist before the step, such as the batch.
        most: 1 to measure a single member of each architecture, 2 to also find what members share.
        share: factor for batches of other sizes whose steps exist besides.
    """
    starts, first = [], 0
    for group in moving.groups:
        starts.append(first)
        first += group.members
    known = [*moving.state.values(), *known]
    on_gpu = moving.device.type == "cuda"

    def measured(start: int, count: int) -> int:
        part = moving.slice_members(start, start + count)
        part = (part if part.offload is None else copied_to_device(part)).without_side_effects()
        known_here = [*known, *part.state.values()]
        with torch.random.fork_rng(devices=[moving.device] if on_gpu else []):
            return transient_bytes(lambda: probe(part), moving.device, known_here)

    try:
        one = max(measured(start, 1) for start in starts)
        pair = most > 1 and len(starts) == 1 and moving.members > 1
        two = measured(0, 2) if pair else 2 * one
    except torch.OutOfMemoryError:
        return replace(fixed, member=_ENDLESS)
    except Exception:  # the first step reports the reason
        return None
    member = min(max(two - one, 0), one)
    return replace(fixed, common=int(share * (one - member)), member=int(share * member))


def state_bytes(spec: Mapping[str, Any], lr: float, trained: Tree) -> int:
    """Bytes of the optimiser's states for these weights, as an optimiser of two numbers shows."""
    tiny = torch.zeros(2, requires_grad=True)
    optimizer = make_optimizer(spec, {"": tiny}, lr)
    tiny.grad = torch.zeros(2)
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values()]
    like = [t for t in states if isinstance(t, Tensor) and t.shape == tiny.shape]
    return len(like) * bytes_of(trained.values())


def _too_small(limit: MemoryLimit, needed: Footprint, chunk: int) -> str:
    most, fixed = needed.peak(chunk), size(needed.resident + needed.gradients)
    # One member did not fit, and what it takes is unknown, if all that is known would fit.
    least = f"at least {size(1.01 * most)}" if most > limit.bytes else "more"
    return (
        f"memory of {size(limit.bytes)} is too small: the run needs {least}, of which "
        f"weights, gradients, optimiser states and data take {fixed}; raise memory, or lower "
        f"members or batch_size"
    )
