"""Steps of members that live on the host or on disk and visit the device in blocks.

Methods that compare outputs or input gradients visit all blocks twice. The first visit gives the
outputs of all members, without activations. The second has both passes and the optimiser's update
of each block. Other methods visit them once. The first block of the second visit stays from its
forward pass on, so it visits once in any case.

Methods that compare weights keep the drives of all members on the host. Strips of columns visit the
device for the Gram matrix and the push (`weight_columns`), and then blocks of members for the
update. The numbers are those of a step with all members on the device, up to rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.tree import finite, member_norms
from shoal.core.types import Tree
from shoal.inference.ensemble import (
    Ensemble,
    host_blocks,
    part_of,
    parts_on_device,
    store_buffers,
    tensors_of,
)
from shoal.inference.priors import Flat
from shoal.training.members.block_optimizer import BlockOptimizer
from shoal.training.members.chunks import InParts, Parts, summed
from shoal.training.members.frozen import FrozenState
from shoal.training.members.weight_columns import WeightColumns, all_finite
from shoal.training.options.noise import add_noise, add_shared_noise
from shoal.training.options.optim import clip_members
from shoal.training.options.settings import Settings
from shoal.training.step.drive import Batch, StepContext
from shoal.training.step.placebo import with_placebo
from shoal.training.step.results import OutputResult, StepInfo
from shoal.training.step.shared_velocity import shared_velocity
from shoal.training.step.stages import measured, weight_stage
from shoal.training.step.velocity import both_passes, head_lengths

__all__ = ["OffloadedSteps", "laid_out_like"]


class OffloadedSteps:
    """Steps of an ensemble in blocks.

    Args:
        moving: the trained members.
        frozen: the frozen members; None without any.
        settings: the settings of the run.
        optimizer: the run's optimiser.
    """

    def __init__(
        self,
        moving: Ensemble,
        frozen: Ensemble | None,
        settings: Settings,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        assert moving.offload is not None
        self.moving, self.frozen, self.settings = moving, frozen, settings
        self.offload, self.optimizer = moving.offload, optimizer
        self.blocks = BlockOptimizer(
            optimizer, settings.optimizer, settings.options.lr, moving.offload
        )
        self._drives: dict[str, Tree] = {}
        self._finite_frozen: Tensor | None = None

    def step(self, context: StepContext, batch: Batch) -> StepInfo:
        """Move every member by one batch, and the tensors that all members train together."""
        if context.needs_all_at_once:
            raise ConfigError(
                "these adversarial neighbours need all members at once; leave resident out, or "
                "choose adversarial neighbours of each member"
            )
        self.blocks.begin()
        act = self._of_weights if context.base == "weights" else self._of_outputs
        info, gradients, shares = act(context, batch)
        if gradients:
            common = shared_velocity(context, self.moving, gradients, info.alive, shares)
            self._move_shared(context, common, info.alive)
        return info

    def _of_outputs(
        self, context: StepContext, batch: Batch
    ) -> tuple[StepInfo, Tree, Tensor | None]:
        updates = _Updates(self, context)
        result, gradients = both_passes(_in_parts(context, updates), self.moving, batch)
        measures = result.measures
        if result.head is not None:
            drive, push = (torch.cat(each) for each in zip(*updates.lengths, strict=True))
            measures = measured(drive, push, result.alive, result.measures)
        assert measures is not None, "the base of a space is outputs or weights"
        info = StepInfo(result.loss, result.alive, measures, result.statistics)
        return info, gradients, None if result.mix is None else result.mix.sum(0)

    def _of_weights(
        self, context: StepContext, batch: Batch
    ) -> tuple[StepInfo, Tree, Tensor | None]:
        shares = None
        if context.shares_drives and self.moving.trained_shared:
            mix = self._columns(context).interaction(self._everyone(self.moving.alive)).mix
            shares = None if mix is None else mix.sum(0)
        drives = _Drives(context, self.moving, self._host_drives("moving", self.moving), True)
        result, gradients = both_passes(_in_parts(context, drives), self.moving, batch, shares)
        alive, norms = result.alive & drives.finite, drives.norms
        repulsion = context.repulsion
        by_columns = repulsion is not None and repulsion.space.isometric and not repulsion.placebo
        push = self._pushed_by_columns if by_columns else self._pushed_on_host
        alive, measures = push(context, batch, drives.host, alive, norms)
        self._update(context, drives.host, alive)
        return StepInfo(result.loss, alive, measures, result.statistics), gradients, shares

    def _pushed_by_columns(
        self, context: StepContext, batch: Batch, drive: Tree, alive: Tensor, norms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the push to the drives on the host; which members are finite, and the measures."""
        assert context.repulsion is not None
        columns, everyone = self._columns(context), self._everyone(alive)
        interaction = columns.interaction(everyone)
        drives, norms_of = [drive], [norms]
        if self.frozen is not None and interaction.mix is not None:
            tree, lengths = self._frozen_drives(context, batch)
            drives, norms_of = [tree, drive], [lengths, norms]
        living = everyone[-len(torch.cat(norms_of)) :] & finite(torch.cat(norms_of))
        scale = -context.posterior.heat * context.repulsion.strength
        lengths = columns.add_push(interaction, drives, living, scale)
        return alive, measured(*lengths, alive, interaction.summary)

    def _pushed_on_host(
        self, context: StepContext, batch: Batch, drive: Tree, alive: Tensor, norms: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same for other spaces than the weights and for placebos, by the host's arithmetic."""
        frozen = None
        if self.frozen is not None:
            old = self._frozen_drives(context, batch)[0] if context.shares_drives else None
            weights = {name: t.detach() for name, t in self.frozen.weights.items()}
            frozen = FrozenState(weights, self.frozen.alive.cpu(), old)
        self.offload.flush()
        weights = {name: t.detach() for name, t in self.moving.weights.items()}
        posterior = replace(context.posterior, prior=Flat())
        moved = weight_stage(
            posterior, context.repulsion, dict(drive), weights, alive.cpu(), 1.0, None, None, frozen
        )
        velocity = moved.velocity
        if moved.pushed is not None:
            how = context.seed, context.step
            velocity = with_placebo(self.moving, velocity, moved.pushed, *how)
        for name, tensor in velocity.items():
            if tensor is not drive[name]:
                drive[name].copy_(tensor)
        assert moved.measures is not None, "the repulsion acts on weights"
        return moved.alive.to(alive.device), moved.measures.to(alive.device)

    def _columns(self, context: StepContext) -> WeightColumns:
        assert context.repulsion is not None
        weights = [e.weights for e in (self.frozen, self.moving) if e is not None]
        return WeightColumns(self.offload, context.repulsion, weights)

    def _everyone(self, alive: Tensor) -> Tensor:
        """Which of all members are finite, frozen members first."""
        if self.frozen is None:
            return alive
        if self._finite_frozen is None:
            sound = [all_finite(part.weights) for part in parts_on_device(self.frozen)]
            self._finite_frozen = self.frozen.alive & torch.cat(sound)
        return torch.cat([self._finite_frozen, alive])

    def _frozen_drives(self, context: StepContext, batch: Batch) -> tuple[Tree, Tensor]:
        assert self.frozen is not None
        alone = StepContext(
            posterior=context.posterior, repulsion=None, annealing=context.annealing
        )
        drives = _Drives(alone, self.frozen, self._host_drives("frozen", self.frozen), False)
        both_passes(_in_parts(alone, drives), self.frozen, batch)
        return drives.host, drives.norms

    def _host_drives(self, whose: str, ensemble: Ensemble) -> Tree:
        if whose not in self._drives:
            weights = ensemble.weights.items()
            self._drives[whose] = {n: self.offload.empty(w.shape, w.dtype) for n, w in weights}
        return self._drives[whose]

    def _update(self, context: StepContext, drives: Tree, alive: Tensor) -> None:
        """Move all members along velocities of the host."""
        updates = _Updates(self, context)
        for part, velocity in updates.with_velocity(drives):
            first = part.first - self.moving.first
            updates.move(part, velocity, alive[first : first + part.members])

    def _move_shared(self, context: StepContext, velocity: Tree, alive: Tensor) -> None:
        options, shared = self.settings.options, self.moving.trained_shared
        as_member = {name: tensor.unsqueeze(0) for name, tensor in velocity.items()}
        for name, tensor in clip_members(as_member, options.clip).items():
            shared[name].grad = laid_out_like(shared[name], tensor[0])
        if options.noise is not None:
            heat, count = options.noise * context.posterior.heat, alive.sum().clamp(min=1)
            together = list(shared.values())
            add_shared_noise(together, count, self.optimizer, heat, options.seed, context.step)
        self.optimizer.step()  # tensors without a gradient stay, as the private ones on the host
        self.optimizer.zero_grad()


class _Updates:
    """Parts of an ensemble whose members move as soon as their velocity is known."""

    def __init__(self, steps: OffloadedSteps, context: StepContext) -> None:
        self.steps, self.context, self.moving = steps, context, steps.moving
        self.spans = dict(zip(self.moving.weights, self.moving.spans, strict=True))
        self.lengths: list[tuple[Tensor, Tensor]] = []
        self.shared: dict[str, list[Tensor]] = {name: [] for name in self.moving.trained_shared}
        self._states: Sequence[Tensor] = ()

    def others(self) -> Iterator[Ensemble]:
        """See `Parts`."""
        return parts_on_device(self.moving, skip=1)

    def changed(self) -> Iterator[Ensemble]:
        """See `Parts`."""
        return (part for part, _ in self._visited(lambda block: tensors_of(block)))

    def with_velocity(self, velocity: Tree) -> Iterator[tuple[Ensemble, Tree]]:
        """Parts without buffers, and their velocities from the host."""

        def tensors(block: Ensemble) -> list[Tensor]:
            span = self._span(block)
            moved = [velocity[name][span] for name in block.weights]
            return [*block.weights.values(), *moved]

        for part, rest in self._visited(tensors, buffers=False):
            yield part, dict(zip(part.weights, rest, strict=True))

    def _visited(
        self, tensors: Any, buffers: bool = True
    ) -> Iterator[tuple[Ensemble, list[Tensor]]]:
        blocks, optimizer = host_blocks(self.moving), self.steps.blocks
        if not buffers:
            for block in blocks:
                block.groups = [replace(block.groups[0], buffers={})]
        states = [optimizer.tensors(self._hosts(b), self._span(b)) for b in blocks]
        wanted = [[*tensors(b), *s] for b, s in zip(blocks, states, strict=True)]
        visits = self.steps.offload.visit(wanted)
        for block, state, copies in zip(blocks, states, visits, strict=True):
            end = len(copies) - len(state)
            self._states, count = copies[end:], len(tensors_of(block))
            yield part_of(block, copies[:count]), copies[count:end]

    def _span(self, block: Ensemble) -> slice:
        """The block's rows in the tensors of its architecture."""
        start = block.first - self.moving.first - self.spans[next(iter(block.weights))].start
        return slice(start, start + block.members)

    def _hosts(self, block: Ensemble) -> list[Tensor]:
        weights = self.moving.weights
        return [weights[name] for name in block.weights]

    def add(self, part: Ensemble, velocity: Tree, result: OutputResult) -> None:
        """See `Parts`; adds the weight prior and moves the members."""
        for name, each in self.shared.items():
            each.append(velocity.pop(name))
        if result.head is not None:
            self.lengths.append(head_lengths(part, result.head, velocity))
        context = self.context
        if context.posterior.has_weight_prior:
            first = part.first - self.moving.first
            mix = None if result.mix is None else result.mix[first : first + part.members]
            weights = {name: tensor.detach() for name, tensor in part.weights.items()}
            here = context.repulsion, velocity, weights, result.alive, context.annealing
            velocity = context.stages.weight_stage(context.posterior, *here, mix, None).velocity
        store_buffers(self.moving, part)
        self.move(part, velocity, result.alive)

    def move(self, part: Ensemble, velocity: Tree, alive: Tensor) -> None:
        """Clip the velocity, add noise, and let the optimiser move the part."""
        steps, options = self.steps, self.steps.settings.options
        velocity = clip_members(velocity, options.clip)
        for name, weight in part.weights.items():
            weight.grad = laid_out_like(weight, velocity[name])
        if options.noise is not None:
            heat = options.noise * self.context.posterior.heat
            add_noise(part, steps.optimizer, heat, options.seed, self.context.step, alive)
        steps.blocks.step(self._hosts(part), self._span(part), part.weights, self._states)

    def tree(self) -> Tree:
        """The velocities of tensors that all members train together."""
        return summed(self.shared)


class _Drives:
    """Parts of an ensemble whose drives are kept on the host, with the weight prior."""

    def __init__(self, context: StepContext, ensemble: Ensemble, host: Tree, trains: bool) -> None:
        self.context, self.ensemble, self.host, self.trains = context, ensemble, host, trains
        self.shared: dict[str, list[Tensor]] = {name: [] for name in ensemble.trained_shared}
        self._finite: list[Tensor] = []
        self._norms: list[Tensor] = []

    @property
    def finite(self) -> Tensor:
        """Which members have finite weights [M]."""
        return torch.cat(self._finite)

    @property
    def norms(self) -> Tensor:
        """Norms of the drives [M]."""
        return torch.cat(self._norms)

    def others(self) -> Iterator[Ensemble]:
        """See `Parts`."""
        return parts_on_device(self.ensemble, skip=1)

    def changed(self) -> Iterator[Ensemble]:
        """See `Parts`."""
        return parts_on_device(self.ensemble)

    def add(self, part: Ensemble, velocity: Tree, result: OutputResult) -> None:
        """See `Parts`."""
        offload, context = self.ensemble.offload, self.context
        assert offload is not None
        for name, each in self.shared.items():
            each.append(velocity.pop(name))
        weights = {name: tensor.detach() for name, tensor in part.weights.items()}
        velocity = context.posterior.add_prior(velocity, weights, context.annealing)
        self._finite.append(all_finite(weights))
        self._norms.append(member_norms(velocity))
        first = part.first - self.ensemble.first
        for name, tensor in velocity.items():
            offload.store(self.host[name][first : first + part.members], tensor)
        if self.trains:
            store_buffers(self.ensemble, part)

    def tree(self) -> Tree:
        """The velocities of tensors that all members train together."""
        return summed(self.shared)


def _in_parts(context: StepContext, parts: Parts) -> StepContext:
    """The context of a step whose members visit the device part by part."""
    return replace(context, members=InParts(context.members, parts))


def laid_out_like(weight: Tensor, velocity: Tensor) -> Tensor:
    """The velocity in the memory order of its weight, for fused optimisers ignore strides."""
    same = velocity.stride() == weight.stride()
    return velocity if same else torch.empty_like(weight).copy_(velocity)
