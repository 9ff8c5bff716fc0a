"""The mover: members and optimiser, moved along their velocity by one batch at a time.

`fit` moves the members in its loop (`training.loop.trainer`), `Stepper` in a loop of the user's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.random import key
from shoal.core.structure import Inputs
from shoal.data.batches.augment import augmented, is_per_member
from shoal.data.batches.batch import Targets
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.processes.mesh import Mesh
from shoal.engine.resources.footprint import bytes_of
from shoal.engine.resources.memory import MemoryLimit, keep_freed, within_memory
from shoal.engine.resources.plan import parse_engine
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import Posterior
from shoal.interaction.repulsion import Repulsion
from shoal.training.members.division import agreed, prior_of_all
from shoal.training.members.offloaded import OffloadedSteps, laid_out_like
from shoal.training.members.processes import members_of
from shoal.training.members.shards import norms_of_whole, shares_of_noise
from shoal.training.mover.prepare import divided, prior_as_weight_decay
from shoal.training.mover.step_memory import StepMemory
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


class Mover(StepMemory):
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
        mapping: the member runner.
        limit: the most that the run takes on its device; None without a limit.
        offloaded: takes the steps of members that live on the host; None for members on the device.
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
        self.optimizer = make_optimizer(settings.optimizer, self.trained, options.lr)
        self._own_decay = [group.get("weight_decay") for group in self.optimizer.param_groups]
        self.spans = self.moving.spans if len(self.moving.groups) > 1 else None
        waits = settings.waits_for_host(ensemble.members, ensemble.device, ensemble.dtype)
        self.plan = parse_engine(options.engine).settled_for(
            ensemble.groups, ensemble.device, steps, waits
        )
        if mesh is not None:  # neither captures nor compilers see messages between processes
            self.plan = replace(self.plan, graph=False, compiled=False)
        self.mapping = self.plan.mapping or MemberRunner()
        if ensemble.groups[0].shards is not None:  # one stream sends and receives
            self.mapping = replace(self.mapping, streams=1, compiled=False)
        self.context = StepContext(
            posterior=self._posterior(likelihood, n),
            repulsion=self.repulsion,
            adversarial=settings.adversarial,
            seed=options.seed,
            stages=self._stages(),
            own_inputs=is_per_member(settings.augment),
            members=members_of(self.frozen, mesh),
        )
        kept = ensemble.state if ensemble.offload is None else ensemble.shared
        own = bytes_of(kept.values())
        wanted: Any = options.memory
        self.limit = None if wanted is None else MemoryLimit(wanted, ensemble.device, own)
        self._captures = True
        self.offloaded = None
        if ensemble.offload is not None:
            self.offloaded = OffloadedSteps(self.moving, self.frozen, settings, self.optimizer)
        if ensemble.device.type == "cpu":
            keep_freed()

    @property
    def posterior(self) -> Posterior:
        """What drives the members, less what the optimiser has taken over."""
        return self.context.posterior

    @posterior.setter
    def posterior(self, posterior: Posterior) -> None:
        self.context = replace(self.context, posterior=posterior)

    @property
    def likelihood(self) -> Likelihood:
        """A copy of the likelihood, with its learned numbers so far."""
        state = {
            name: t.detach().cpu().clone() for name, t in self.posterior.likelihood.state.items()
        }
        return self.posterior.likelihood.restored(state)

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
            own = key(settings.options.seed, "augment", step, x.device)
            first = 0 if self.mesh is None else self.mesh.own.start
            x = augmented(settings.augment, x, own, moving.members, first)
        if self.offloaded is not None:
            info = self.offloaded.step(context.at(step, annealing, self.mapping), (x, y))
        else:
            info = self._move_all(context, (x, y), annealing, step)
        if info.statistics is not None:
            posterior = context.posterior
            share = posterior.n / self.points
            posterior.likelihood.learn(info.statistics, len(y) * share, posterior.n)
        moving.alive.copy_(info.alive)
        return info

    def _move_all(
        self, context: StepContext, batch: Batch, annealing: float | Tensor, step: int | Tensor
    ) -> StepInfo:
        """Move all members at once, with all their tensors on the device."""
        settings, moving = self.settings, self.moving
        (velocity, info), self.mapping = within_memory(
            lambda mapping: velocity_of(context.at(step, annealing, mapping), moving, batch),
            moving.buffers,
            moving.members,
            moving.device,
            self.mapping,
            alone=self.mesh is None,
        )
        info = agreed(self.mesh, info, self.repulsion is not None)
        shared = moving.trained_shared
        norms = norms_of_whole(moving)
        velocity = clip_members(velocity, settings.options.clip, self.spans, shared, norms)
        for name, weight in self.trained.items():
            weight.grad = laid_out_like(weight, velocity[name])
        if settings.options.noise is not None:
            heat = settings.options.noise * context.posterior.heat
            add_noise(moving, self.optimizer, heat, settings.options.seed, step, info.alive)
            count = info.alive.sum() if info.count is None else info.count
            count = count.clamp(min=1)
            together = list(shared.values())
            how = self.optimizer, heat, settings.options.seed, step, shares_of_noise(moving)
            add_shared_noise(together, count, *how)
        self.optimizer.step()
        self.optimizer.zero_grad()  # the next backward pass reuses this memory, still in the cache
        return info

    def _stages(self) -> Stages:
        plain = Stages()
        return kernels_first(compiled_stages(), plain) if self.plan.compiled else plain

    def _posterior(self, likelihood: Likelihood, n: float) -> Posterior:
        """The posterior for n targets, without a prior that the optimiser applies."""
        settings = self.settings
        for group, decay in zip(self.optimizer.param_groups, self._own_decay, strict=True):
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
        if self.offloaded is not None:
            self.offloaded.blocks.take_over()
        device = self.ensemble.device
        learned = parts.get("likelihood", {})
        own = {name: tensor.to(device, copy=True) for name, tensor in learned.items()}
        likelihood = self.settings.likelihood.restored(own)
        self.posterior = replace(self.posterior, likelihood=likelihood)
        torch.set_rng_state(parts["random"]["cpu"])
        if device.type == "cuda" and "cuda" in parts["random"]:
            torch.cuda.set_rng_state(parts["random"]["cuda"], device)
