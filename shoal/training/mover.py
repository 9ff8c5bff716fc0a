"""The mover: members and optimiser, moved along their velocity by one batch at a time.

`fit` moves the members in its own loop (`training.trainer`), `Stepper` in a loop of the user's.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.opaque import tensors_in
from shoal.core.random import key
from shoal.core.structure import Inputs
from shoal.core.types import Tree
from shoal.data.augment import augmented, is_per_member
from shoal.data.batch import Targets
from shoal.engine.footprint import Footprint, bytes_of
from shoal.engine.member_runner import MemberRunner
from shoal.engine.memory import KEPT_FREE, MemoryLimit, keep_freed, smaller, within_memory
from shoal.engine.mesh import Mesh
from shoal.engine.plan import parse_engine
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import Posterior
from shoal.interaction.repulsion import Repulsion
from shoal.training.compiled_stages import compiled_stages
from shoal.training.context import StepContext
from shoal.training.memory import MemoryChoice, choose_runner, state_bytes, with_activations
from shoal.training.mesh_state import agreed, prior_of_all
from shoal.training.noise import add_noise, add_shared_noise
from shoal.training.optim import clip_members, flat_state, load_flat_state, make_optimizer
from shoal.training.prepare import divided, hand_over
from shoal.training.settings import Settings
from shoal.training.stage_kernels import kernels_first
from shoal.training.stages import Stages
from shoal.training.step import StepInfo, forces_in

__all__ = ["Mover"]


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
        mapping: the member runner.
        limit: the most that the run takes on its device; None without a limit.
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
        self.context = StepContext(
            posterior=self._posterior(likelihood, n),
            repulsion=self.repulsion,
            adversarial=settings.adversarial,
            seed=options.seed,
            stages=self._stages(),
            own_inputs=is_per_member(settings.augment),
            frozen=self.frozen,
            mesh=mesh,
        )
        own = bytes_of(ensemble.state.values())
        wanted: Any = options.memory
        self.limit = None if wanted is None else MemoryLimit(wanted, ensemble.device, own)
        self._captures = True
        if ensemble.device.type == "cpu":
            keep_freed()

    @property
    def trained(self) -> Tree:
        """The tensors that the optimiser moves: private ones [M, ...], then shared ones [...]."""
        return self.moving.weights | self.moving.trained_shared

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
        (velocity, info), self.mapping = within_memory(
            lambda mapping: forces_in(context.at(step, annealing, mapping), moving, (x, y)),
            moving.buffers,
            moving.members,
            moving.device,
            self.mapping,
            alone=self.mesh is None,
        )
        info = agreed(self.mesh, info, self.repulsion is not None)
        shared = moving.trained_shared
        velocity = clip_members(velocity, settings.options.clip, self.spans, shared)
        for name, weight in self.trained.items():
            weight.grad = _laid_out_like(weight, velocity[name])
        if settings.options.noise is not None:
            heat = settings.options.noise * context.posterior.heat
            add_noise(moving, self.optimizer, heat, settings.options.seed, step, info.alive)
            count = info.alive.sum() if info.count is None else info.count
            count = count.clamp(min=1)
            together = list(shared.values())
            add_shared_noise(together, count, self.optimizer, heat, settings.options.seed, step)
        self.optimizer.step()
        self.optimizer.zero_grad()  # the next backward pass reuses this memory, still in the cache
        if info.statistics is not None:
            posterior = context.posterior
            share = posterior.n / self.points
            posterior.likelihood.learn(info.statistics, len(y) * share, posterior.n)
        moving.alive.copy_(info.alive)
        return info

    def _stages(self) -> Stages:
        plain = Stages()
        return kernels_first(compiled_stages(), plain) if self.plan.compiled else plain

    def fit_memory(
        self, x: Inputs, y: Targets, data: int = 0, other_size: float = 0.0
    ) -> MemoryChoice:
        """Choose how many members run at a time, from the first batch.

        Args:
            x: inputs of a batch that all members share.
            y: its targets.
            data: bytes of the data on the device.
            other_size: size of another batch whose steps are captured besides, as a share of this.
        """
        if not self.watches_memory:
            return MemoryChoice(self.mapping)
        plain = replace(self.context, own_inputs=False, stages=Stages(), mesh=None)
        fixed = self._fixed_bytes(x, data)

        def measured(most: int, mapping: MemberRunner) -> Footprint | None:
            runner = replace(mapping, chunk=None, compiled=False)
            return with_activations(
                fixed,
                self.moving,
                lambda part: forces_in(plain.at(0, 1.0, runner), part, (x, y)),
                [*tensors_in(x), *tensors_in(y)],
                most,
                1 + other_size,
            )

        if self.limit is not None:
            self.limit.include(data)
        training = self.moving.training
        self.moving.train()
        try:
            with self.limited():
                choice = choose_runner(
                    self.mapping, self.context, fixed, self.limit, measured, self.ensemble.device
                )
        finally:
            self.moving.train(training)
        self.mapping = choice.mapping
        return choice

    @property
    def watches_memory(self) -> bool:
        """Whether memory decides how members run: with a limit, and with several on a GPU."""
        on_gpu = self.ensemble.device.type == "cuda"
        return self.limit is not None or (on_gpu and self.moving.members > 1)

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

    def _fixed_bytes(self, x: Inputs, data: int) -> Footprint:
        """Bytes of a step without activations."""
        options, base, moving = self.settings.options, self.context.base, self.moving
        trained, inputs = bytes_of(self.trained.values()), bytes_of(tensors_in(x))
        states = state_bytes(self.settings.optimizer, options.lr, self.trained)
        per_member = inputs * ((base == "gradients") + self.context.own_inputs)
        fused = bool(self.optimizer.defaults.get("fused"))
        copies = (not fused) + (base == "weights" or options.clip is not None)
        cast = 0
        if self.plan.graph and moving.compute is not None and self.mapping.streams > 1:
            item = moving.compute.itemsize
            cast = sum(w[0].numel() * item for w in moving.weights.values())
        return Footprint(
            members=moving.members,
            resident=bytes_of(self.ensemble.state.values()) + states + data,
            gradients=trained + moving.members * per_member,
            update=copies * trained,
            delayed=cast,
            unused=KEPT_FREE if self.ensemble.device.type == "cpu" else 0,
        )

    def _posterior(self, likelihood: Likelihood, n: float) -> Posterior:
        """The posterior for n targets, without a prior that the optimiser applies."""
        settings = self.settings
        for group, decay in zip(self.optimizer.param_groups, self._own_decay, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
        prior = prior_of_all(settings.prior, self.mesh)
        whole = Posterior(likelihood, prior, n, settings.options.temperature)
        return hand_over(whole, self.repulsion, settings, self.optimizer)

    def for_targets(self, n: float) -> Posterior:
        """The posterior for another number of targets."""
        return self._posterior(self.posterior.likelihood, n)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors that a later step depends on."""
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
        device = self.ensemble.device
        learned = parts.get("likelihood", {})
        own = {name: tensor.to(device, copy=True) for name, tensor in learned.items()}
        likelihood = self.settings.likelihood.restored(own)
        self.posterior = replace(self.posterior, likelihood=likelihood)
        torch.set_rng_state(parts["random"]["cpu"])
        if device.type == "cuda" and "cuda" in parts["random"]:
            torch.cuda.set_rng_state(parts["random"]["cuda"], device)


def _laid_out_like(weight: Tensor, velocity: Tensor) -> Tensor:
    # A fused optimiser reads memory in order and ignores strides.
    same = velocity.stride() == weight.stride()
    return velocity if same else torch.empty_like(weight).copy_(velocity)
