"""The memory of a run's steps: what is chosen from the first batch, and what is kept."""

import functools
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch

from shoal.core.opaque import tensors_in
from shoal.core.structure import Inputs
from shoal.core.types import Tree
from shoal.data.batches.augment import is_per_member
from shoal.data.batches.batch import Targets
from shoal.engine.kernels.builds import Builders, only_building
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.resources.footprint import Footprint, bytes_of
from shoal.engine.resources.memory import (
    KEPT_FREE,
    MemoryLimit,
    free_garbage_if_scarce,
    smaller,
)
from shoal.engine.resources.plan import EnginePlan, fitted_to_cache, parse_engine
from shoal.inference.ensemble import Ensemble
from shoal.training.mover.memory import (
    Measured,
    MemoryChoice,
    block_footprint,
    choose_resident,
    choose_runner,
    state_bytes,
    tried_out,
    with_activations,
)
from shoal.training.options.settings import Settings
from shoal.training.step.drive import Batch, StepContext
from shoal.training.step.stages import Stages
from shoal.training.step.velocity import velocity_of

__all__ = ["StepMemory"]

_LENGTHS = ("seed", "steps", "epochs")
"""Settings that no kernel of a step depends on."""


class StepMemory:
    """What the steps of a run may take on their device, and how members run therefore.

    Attributes:
        mapping: the member runner, which becomes one that fits.
        limit: the most that the run takes on its device; None without a limit.
    """

    _activations: ClassVar[dict[Hashable, Footprint]] = {}
    """Steps without a limit that this process has measured on a GPU."""

    def __init__(
        self,
        ensemble: Ensemble,
        moving: Ensemble,
        settings: Settings,
        optimizer: torch.optim.Optimizer,
        plan: EnginePlan,
    ) -> None:
        """Prepare the choice.

        Args:
            ensemble: all members, frozen ones included.
            moving: the trained members.
            settings: the settings of the run.
            optimizer: the run's optimiser.
            plan: how members run.
        """
        self.ensemble, self.moving, self.settings = ensemble, moving, settings
        self.optimizer, self.plan = optimizer, plan
        self.mapping = plan.mapping or MemberRunner()
        if ensemble.groups[0].shards is not None:  # one stream sends and receives
            self.mapping = replace(self.mapping, streams=1, compiled=False)
        kept = ensemble.state if ensemble.offload is None else ensemble.shared
        wanted: Any = settings.options.memory
        self.limit, self.frugal = None, wanted == "auto"
        if wanted is not None and not self.frugal:
            self.limit = MemoryLimit(wanted, ensemble.device, bytes_of(kept.values()))
        self._captures = True

    @property
    def trained(self) -> Tree:
        """The tensors that the optimiser moves: private ones [M, ...], then shared ones [...]."""
        return self.moving.weights | self.moving.trained_shared

    def fit_cache(self, first: Callable[[], Inputs]) -> None:
        """Let members with large convolutions take turns on a CPU; `first` gives a batch's inputs.

        Nothing changes with an engine that the user named.
        """
        ensemble, named = self.ensemble, parse_engine(self.settings.options.engine).mapping
        plain = ensemble.offload is None and ensemble.groups[0].shards is None
        if ensemble.device.type == "cpu" and named is None and plain:
            self.mapping = fitted_to_cache(self.mapping, ensemble.groups, first)

    def fit(
        self,
        context: StepContext,
        x: Inputs,
        y: Targets,
        data: int = 0,
        other_size: float = 0.0,
        launch: Callable[[StepContext], object] | None = None,
    ) -> MemoryChoice:
        """Choose how many members run at a time, from the first batch.

        Args:
            context: the settings of a step by this process alone.
            x: inputs of a batch that all members share.
            y: its targets.
            data: bytes of the data on the device.
            other_size: size of another batch whose steps are captured besides, as a share of this.
            launch: launches the kernels of a run, where none is launched; None if the process has
                them all.
        """
        if not self.decides:
            return MemoryChoice(self.mapping)
        plain = replace(context, stages=Stages())
        fixed = self._fixed_bytes(context, x, data)

        layers = [type(m) for group in self.moving.groups for m in group.skeleton.modules()]
        batch = [*tensors_in(x), *tensors_in(y)]
        same = self.kind(x), *layers, *(t.shape for t in batch), other_size

        def measured(most: int, mapping: MemberRunner) -> Footprint | None:
            runner = replace(mapping, chunk=None, compiled=False)
            known = self._activations.get((most, runner, *same))
            if known is not None:
                return replace(fixed, common=known.common, member=known.member)
            found = with_activations(
                fixed,
                self.moving,
                lambda part: velocity_of(plain.at(0, 1.0, runner), part, (x, y)),
                batch,
                most,
                1 + other_size,
            )
            if found is not None and on_gpu and self.limit is None:
                self._activations[most, runner, *same] = found
            return found

        on_gpu = self.ensemble.device.type == "cuda"
        if self.limit is not None:
            self.limit.include(data)
        elif on_gpu:
            free_garbage_if_scarce(self.ensemble.device)
        training = self.moving.training
        self.moving.train()
        try:
            with self.limited():
                with only_building(self.ensemble.device) as builders:
                    choice = self._chosen(context, x, data, fixed, measured)
                on_gpu = on_gpu and choice.resident is None
                if on_gpu and self.limit is not None:
                    held = functools.partial(self._held, self.limit, plain, (x, y))
                    members, captures = self.moving.members, self.plan.graph
                    choice, self._captures = tried_out(choice, held, members, captures)
                elif on_gpu and launch is not None and _has_more(builders, context):
                    self._build(functools.partial(launch, plain.at(0, 1.0, choice.mapping)))
        finally:
            self.moving.train(training)
        self.mapping = choice.mapping
        return choice

    def _held(
        self, limit: MemoryLimit, context: StepContext, batch: Batch, runner: MemberRunner
    ) -> int | None:
        """Bytes that a GPU's allocator held in a trial step; None if memory ran out."""
        states = state_bytes(self.settings.optimizer, self.settings.options.lr, self.trained)
        device = self.ensemble.device
        limit.restart()
        try:
            later = torch.empty(states, dtype=torch.uint8, device=device)
            tried = self._try(context, batch, runner)
            del later
            return limit.held if tried else None
        except torch.OutOfMemoryError:
            return None
        finally:
            limit.restart()

    def _try(self, context: StepContext, batch: Batch, runner: MemberRunner) -> bool:
        """Whether the memory is enough for a step of all members, which changes nothing."""
        try:
            with self._aside():
                velocity_of(context.at(0, 1.0, runner), self.moving.without_side_effects(), batch)
        except torch.OutOfMemoryError:
            return False
        return True

    def _build(self, launch: Callable[[], object]) -> None:
        """Build all kernels that are launched, and launch none."""
        with only_building(self.ensemble.device) as builders, self._aside():
            if builders is not None:  # no other thread builds
                with suppress(Exception):  # the first step reports the reason
                    launch()

    def _aside(self) -> AbstractContextManager:
        """A block that leaves the random numbers as they were."""
        return torch.random.fork_rng(devices=[self.ensemble.device])

    def _chosen(
        self, context: StepContext, x: Inputs, data: int, fixed: Footprint, measured: Measured
    ) -> MemoryChoice:
        mapping, offload, moving = self.mapping, self.ensemble.offload, self.moving
        if offload is None:
            device = self.ensemble.device
            light = context.base != "gradients" and moving.derivatives is None
            choice = choose_runner(
                mapping, context, fixed, self.limit, measured, device,
                light and mapping.can_be_light, self.frugal,
            )  # fmt: skip
            return replace(choice, frugal=self.frugal)
        if self.settings.options.resident is not None:
            return MemoryChoice(mapping, resident=offload.resident)
        optimizer, lr = self.settings.optimizer, self.settings.options.lr
        whole = measured(2, mapping) or fixed
        always = data + 4 * bytes_of(moving.shared.values()) + self._coordinates(context, x)
        footprint = block_footprint(moving, optimizer, lr, whole, always)
        return choose_resident(mapping, offload, moving.members, footprint, self.limit)

    def _coordinates(self, context: StepContext, x: Inputs) -> int:
        """Bytes of input gradients, and of inputs of their own, of all members."""
        own = self.settings.options.batches == "own" or is_per_member(self.settings.augment)
        per_member = (context.base == "gradients") + own
        return self.moving.members * per_member * bytes_of(tensors_in(x))

    @property
    def decides(self) -> bool:
        """Whether memory decides how members run: with a limit, and with several on a GPU."""
        if self.ensemble.groups[0].shards is not None:  # processes must run the same passes
            return False
        on_gpu = self.ensemble.device.type == "cuda"
        several = on_gpu and self.moving.members > 1
        return self.limit is not None or several or self.moving.offload is not None

    def kind(self, x: Inputs) -> str:
        """What the kernels of a step depend on: settings, and shapes of weights and batches."""
        config, moving = self.settings.config(), self.moving
        kept = {name: value for name, value in config.items() if name not in _LENGTHS}
        tensors = {**self.trained, **moving.buffers, **moving.shared}
        shapes = [(name, *t.shape, t.dtype) for name, t in tensors.items()]
        inputs = [(*t.shape[1:], t.dtype) for t in tensors_in(x)]
        return repr((moving.device, moving.compute, moving.members, kept, shapes, inputs))

    def limited(self) -> AbstractContextManager:
        """A block in which the run stays within its limit."""
        return nullcontext() if self.limit is None else self.limit.kept()

    @property
    def captures(self) -> bool:
        """Whether steps may be captured, which keeps the memory of a step.

        Recomputed blocks set random numbers back, which a captured step cannot.
        """
        return self._captures and not self.mapping.recompute

    def fits_captured(self) -> bool:
        """Whether the run stays within its limit after a capture; if not, later steps take less.

        Smaller chunks are captured again. Steps of one member at a time are not captured.
        """
        if self.limit is None or not self.limit.exceeded:
            return True
        self._captures = self.mapping.chunk != 1 and self.moving.members > 1
        if self._captures:
            self.mapping = smaller(self.mapping, self.moving.members)
        return False

    def _fixed_bytes(self, context: StepContext, x: Inputs, data: int) -> Footprint:
        """Bytes of a step without activations."""
        options, base, moving = self.settings.options, context.base, self.moving
        trained = bytes_of(self.trained.values())
        states = state_bytes(self.settings.optimizer, options.lr, self.trained)
        fused = bool(self.optimizer.defaults.get("fused"))
        copies = (not fused) + (base == "weights" or options.clip is not None)
        cast = 0
        if self.plan.graph and moving.compute is not None and self.mapping.streams > 1:
            item = moving.compute.itemsize
            cast = sum(w[0].numel() * item for w in moving.weights.values())
        return Footprint(
            members=moving.members,
            resident=bytes_of(self.ensemble.state.values()) + states + data,
            gradients=trained + self._coordinates(context, x),
            update=copies * trained,
            delayed=cast,
            unused=KEPT_FREE if self.ensemble.device.type == "cpu" else 0,
        )


def _has_more(builders: Builders | None, context: StepContext) -> bool:
    """Whether a run may need kernels that are not on the disk, after a trial of few members.

    The trial has built some, or it needed none and members meet in kernels that it did not launch.
    """
    if builders is None:
        return False
    return builders.built > 0 or (builders.asked == 0 and context.repulsion is not None)
