"""The mover: members and optimiser, moved along their velocity by one batch at a time.

`fit` moves the members in its loop (`training.loop.trainer`), `Stepper` in a loop of the user's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.random import key
from shoal.core.structure import Inputs, points_in
from shoal.core.types import Tree
from shoal.data.batches.augment import augmented, is_per_member
from shoal.data.batches.batch import Targets
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.processes.mesh import Mesh
from shoal.engine.resources.memory import keep_freed, within_memory
from shoal.engine.resources.plan import parse_engine
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import Posterior
from shoal.interaction.repulsion import Repulsion
from shoal.training.members.division import agreed, prior_of_all
from shoal.training.members.offloaded import OffloadedSteps, laid_out_like
from shoal.training.members.processes import members_of
from shoal.training.members.shards import norms_of_whole, shares_of_noise
from shoal.training.mover.fused_update import FusedUpdate
from shoal.training.mover.prepare import divided, prior_as_weight_decay
from shoal.training.mover.step_memory import StepMemory
from shoal.training.options.annealing import multiplies_push
from shoal.training.options.noise import add_noise, add_shared_noise
from shoal.training.options.optim import clip_members, flat_state, load_flat_state, make_optimizer
from shoal.training.options.settings import Settings
from shoal.training.step.compiled_stages import compiled_stages
from shoal.training.step.drive import Batch, StepContext
from shoal.training.step.results import StepInfo
from shoal.training.step.stage_kernels import kernels_first
from shoal.training.step.stages import Stages
from shoal.training.step.velocity import velocity_of

__all__ = ["Mover"]


class Steps(Protocol):
    """Takes a step with all trained members, wherever they live."""

    def step(self, context: StepContext, batch: Batch) -> StepInfo:
        """Move every member by one batch, without waiting for the device."""
        ...


class Mover:
    """Moves an ensemble along its velocity, one batch after another.

    Attributes:
        ensemble: the members, changed in place.
        moving: the trained members, on the same memory.
        frozen: the frozen members; None without any.
        settings: the settings of the run.
        repulsion: the method's repulsion, with axes and units from the training data.
        context: the settings of every step. Its posterior omits a prior that the optimiser applies;
            its likelihood learns together with the members.
        points: number of data points, of which a batch is a share.
        plan: how members run.
        memory: what the steps take on their device, and the member runner that fits.
        steps: takes the steps.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        settings: Settings,
        repulsion: Repulsion | None,
        likelihood: Likelihood,
        n: float,
        points: int,
        steps: int,
        mesh: Mesh | None = None,
    ) -> None:
        """Prepare the members for training.

        Args:
            ensemble: the members.
            settings: the settings of the run.
            repulsion: with axes and units; None takes that of the settings.
            likelihood: at its start, in the units of the targets.
            n: number of targets, see `Posterior`.
            points: number of data points.
            steps: expected number of steps, which decides what is worth compiling.
            mesh: the processes that train the other members; None for one process.
        """
        options = settings.options
        self.ensemble, self.settings, self.points, self.mesh = ensemble, settings, points, mesh
        self.repulsion = repulsion or settings.method.repulsion
        self.moving, self.frozen = divided(ensemble, options.frozen)
        if mesh is not None:
            self.moving.first = options.frozen + mesh.own.start
        trained = self.moving.weights | self.moving.trained_shared
        self.optimizer = make_optimizer(settings.optimizer, trained, options.lr)
        self._decay = [group.get("weight_decay") for group in self.optimizer.param_groups]
        waits = settings.waits_for_host(ensemble.members, ensemble.device, ensemble.dtype)
        self.plan = parse_engine(options.engine).settled_for(
            ensemble.groups, ensemble.device, steps, waits
        )
        if mesh is not None:  # neither captures nor compilers see messages between processes
            self.plan = replace(self.plan, graph=False, compiled=False)
        self.memory = StepMemory(ensemble, self.moving, settings, self.optimizer, self.plan)
        self.context = StepContext(
            posterior=self._posterior(likelihood, n),
            repulsion=self.repulsion,
            ramped=multiplies_push(settings.annealing),
            adversarial=settings.adversarial,
            seed=options.seed,
            stages=self._stages(),
            own_inputs=is_per_member(settings.augment) or options.batches == "own",
            own_targets=options.batches == "own",
            common=settings.common_points,
            members=members_of(self.frozen, mesh),
        )
        self.steps = self._make_steps()
        if ensemble.device.type == "cpu":
            keep_freed()

    def _make_steps(self) -> Steps:
        if self.ensemble.offload is not None:
            return OffloadedSteps(self.moving, self.frozen, self.settings, self.optimizer)
        repels = self.repulsion is not None
        return DeviceSteps(
            self.moving, self.settings, self.optimizer, self.memory, self.mesh, repels
        )

    @property
    def trial_context(self) -> StepContext:
        """The context of steps that are tried out: by this process alone, on a common batch."""
        members = members_of(self.frozen)
        return replace(self.context, own_inputs=False, own_targets=False, common=0, members=members)

    @property
    def posterior(self) -> Posterior:
        """What drives the members, less what the optimiser has taken over."""
        return self.context.posterior

    @posterior.setter
    def posterior(self, posterior: Posterior) -> None:
        self.context = replace(self.context, posterior=posterior)

    def learn_with(self, likelihood: Likelihood) -> None:
        """Go on with another state of the likelihood."""
        self.posterior = replace(self.posterior, likelihood=likelihood)

    @property
    def likelihood(self) -> Likelihood:
        """A copy of the likelihood, with its learned numbers so far."""
        state = {
            name: t.detach().cpu().clone() for name, t in self.posterior.likelihood.state.items()
        }
        return self.posterior.likelihood.restored(state)

    def launch(self, context: StepContext, batch: Batch) -> StepInfo:
        """Launch the kernels of all steps, where none is launched (`only_building`)."""
        fused = self.steps.fused if isinstance(self.steps, DeviceSteps) else None
        if fused is not None and fused.known and context.base == "weights":
            context = context.delaying()
        velocity, info = velocity_of(context, self.moving.without_side_effects(), batch)
        return info if fused is None or info.delayed is None else fused.launch(velocity, info)

    def move(
        self,
        x: Inputs,
        y: Targets,
        annealing: float | Tensor,
        step: int | Tensor,
        context: StepContext | None = None,
    ) -> StepInfo:
        """Take one step with every member, without waiting for the device."""
        settings, moving = self.settings, self.moving
        context = self.context if context is None else context
        if settings.augment is not None:
            random = key(settings.options.seed, "augment", step, x.device)
            first = 0 if self.mesh is None else self.mesh.own.start
            members = range(first, first + moving.members)
            x = augmented(settings.augment, x, random, members, context.own_targets)
        info = self.steps.step(context.at(step, annealing, self.memory.mapping), (x, y))
        if info.statistics is not None:
            posterior = context.posterior
            share = posterior.n / self.points
            count = points_in(y, context.own_targets) * share
            posterior.likelihood.learn(info.statistics, count, posterior.n)
        moving.alive.copy_(info.alive)
        return info

    def _stages(self) -> Stages:
        plain = Stages()
        return kernels_first(compiled_stages(), plain) if self.plan.compiled else plain

    def _posterior(self, likelihood: Likelihood, n: float) -> Posterior:
        """The posterior for n targets, without a prior that the optimiser applies."""
        settings = self.settings
        for group, decay in zip(self.optimizer.param_groups, self._decay, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
        prior = prior_of_all(settings.prior, self.mesh)
        whole = Posterior(likelihood, prior, n, settings.options.temperature)
        return prior_as_weight_decay(whole, self.repulsion, settings, self.optimizer)

    def for_targets(self, n: float) -> Posterior:
        """The posterior for another number of targets."""
        return self._posterior(self.posterior.likelihood, n)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors that a later step depends on."""
        if self.ensemble.offload is not None:
            self.ensemble.offload.flush()
        tensors, _ = flat_state(self.optimizer)
        random = {"cpu": torch.get_rng_state()}
        if self.ensemble.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.ensemble.device)
        ensemble = {name: t.detach() for name, t in self.ensemble.changing_state.items()}
        parts = {"ensemble": ensemble, "optimizer": tensors, "random": random}
        learned = self.posterior.likelihood.state
        return parts | ({"likelihood": learned} if learned else {})

    def load_tensors(self, parts: Mapping[str, Any], optimizer: Any) -> None:
        """Continue with the tensors and the optimiser's plain values of an earlier state."""
        self.ensemble.load_state(parts["ensemble"])
        load_flat_state(self.optimizer, parts.get("optimizer", {}), optimizer)
        if isinstance(self.steps, OffloadedSteps):
            self.steps.blocks.take_over()
        device = self.ensemble.device
        learned = parts.get("likelihood", {})
        copies = {name: tensor.to(device, copy=True) for name, tensor in learned.items()}
        self.learn_with(self.settings.likelihood.restored(copies))
        torch.set_rng_state(parts["random"]["cpu"])
        if device.type == "cuda" and "cuda" in parts["random"]:
            torch.cuda.set_rng_state(parts["random"]["cuda"], device)


class DeviceSteps:
    """Steps of members that are all on the device.

    Args:
        moving: the trained members.
        settings: the settings of the run.
        optimizer: the run's optimiser.
        memory: has the member runner, which becomes a smaller one where memory runs out.
        mesh: the processes that train the other members; None for one process.
        repels: whether members repel each other.
    """

    def __init__(
        self,
        moving: Ensemble,
        settings: Settings,
        optimizer: torch.optim.Optimizer,
        memory: StepMemory,
        mesh: Mesh | None,
        repels: bool,
    ) -> None:
        self.moving, self.settings, self.optimizer = moving, settings, optimizer
        self.memory, self.mesh, self.repels = memory, mesh, repels
        self.spans = moving.spans if len(moving.groups) > 1 else None
        options, alone = settings.options, mesh is None and not moving.trained_shared
        as_it_is = alone and options.clip is None and options.noise is None
        self.fused = FusedUpdate(optimizer, memory.trained) if as_it_is else None

    def step(self, context: StepContext, batch: Batch) -> StepInfo:
        """See `Steps`."""
        options, moving, memory = self.settings.options, self.moving, self.memory
        if context.base == "weights" and self.fused is not None and self.fused.ready:
            context = context.delaying()
        step, annealing = context.step, context.annealing

        def velocity_by(mapping: MemberRunner) -> tuple[Tree, StepInfo]:
            if mapping is not context.mapping:
                return velocity_of(context.at(step, annealing, mapping), moving, batch)
            return velocity_of(context, moving, batch)

        (velocity, info), memory.mapping = within_memory(
            velocity_by,
            moving.buffers,
            moving.members,
            moving.device,
            memory.mapping,
            alone=self.mesh is None,
        )
        if info.delayed is not None:
            assert self.fused is not None
            return self.fused.move(velocity, info)
        info = agreed(self.mesh, info, self.repels)
        shared = moving.trained_shared
        velocity = clip_members(velocity, options.clip, self.spans, shared, norms_of_whole(moving))
        for name, weight in memory.trained.items():
            weight.grad = laid_out_like(weight, velocity[name])
        if options.noise is not None:
            heat = options.noise * context.posterior.heat
            add_noise(moving, self.optimizer, heat, options.seed, step, info.alive)
            count = info.alive.sum() if info.count is None else info.count
            add_shared_noise(
                list(shared.values()), count.clamp(min=1), self.optimizer, heat, options.seed, step,
                shares_of_noise(moving),
            )  # fmt: skip
        self.optimizer.step()
        self.optimizer.zero_grad()  # the next backward pass reuses this memory, still in the cache
        return info
