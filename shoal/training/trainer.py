"""The trainer: members, optimiser and progress, the state that a checkpoint holds."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shoal.core.checkpoints import Checkpoint
from shoal.core.errors import DataError
from shoal.core.random import key
from shoal.core.structure import Inputs, parted
from shoal.core.tree import rows
from shoal.data.augment import augmented, is_per_member
from shoal.data.batch import Targets
from shoal.data.sources import ArrayBatches, LoaderBatches
from shoal.engine.autotune import faster_runner, faster_threads
from shoal.engine.graph import CapturedSteps
from shoal.engine.member_runner import MemberRunner
from shoal.engine.memory import keep_freed, within_memory
from shoal.engine.plan import has_convolutions, parse_engine
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import Posterior, total_weight
from shoal.interaction.repulsion import Repulsion
from shoal.training.context import StepContext
from shoal.training.history import Tracker
from shoal.training.optim import (
    clip_members,
    flat_state,
    load_flat_state,
    make_optimizer,
    set_learning_rate,
)
from shoal.training.prepare import divided, hand_over
from shoal.training.settings import Settings
from shoal.training.stages import Stages, compiled_stages
from shoal.training.step import forces_in

__all__ = ["Trainer"]

WORTH_A_TRIAL = 300
"""In runs with fewer steps, autotune would take longer than it saves."""


class Trainer:
    """Moves an ensemble along its velocity, one batch after another.

    Attributes:
        ensemble: the members, changed in place.
        moving: the trained members, on the same memory.
        frozen: the frozen members; None without any.
        settings: the settings of the run.
        batches: the training data.
        repulsion: the method's repulsion, with axes and units from the training data.
        context: the settings of every step. Its posterior omits a prior that the optimiser applies;
            its likelihood learns together with the members.
        steps: number of steps of the run.
        step: number of finished steps.
        rows: one history row per finished epoch.
        tracker: sums over the steps of the current epoch.
        initial: mean loss of the members before the first step; None until that step is done.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        settings: Settings,
        batches: ArrayBatches | LoaderBatches,
        repulsion: Repulsion | None = None,
        sites: torch.Size = torch.Size(),  # noqa: B008
    ) -> None:
        self.ensemble, self.settings, self.batches = ensemble, settings, batches
        self.sites, self._counted = sites, (0, 0.0)
        options = settings.options
        self.repulsion = repulsion or settings.method.repulsion
        self.moving, self.frozen = divided(ensemble, options.frozen)
        self.optimizer = make_optimizer(settings.optimizer, self.moving.weights, options.lr)
        self._own_decay = [group.get("weight_decay") for group in self.optimizer.param_groups]
        likelihood = settings.likelihood
        if isinstance(batches, ArrayBatches):
            likelihood = likelihood.begun(parted(batches.y.to(ensemble.device))[0], len(sites))
        posterior = self._posterior(likelihood)
        self.spans = self.moving.spans if len(self.moving.groups) > 1 else None
        self.steps = settings.total_steps(batches.steps_per_epoch)
        waits = settings.waits_for_host(ensemble.members, ensemble.device, ensemble.dtype)
        self.plan = parse_engine(options.engine).settled_for(
            ensemble.groups, ensemble.device, self.steps, waits
        )
        self.mapping = self.plan.mapping or MemberRunner()
        self.context = StepContext(
            posterior=posterior,
            repulsion=self.repulsion,
            adversarial=settings.adversarial,
            seed=options.seed,
            stages=compiled_stages() if self.plan.compiled else Stages(),
            own_inputs=is_per_member(settings.augment),
            frozen=self.frozen,
        )
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.tracker = Tracker(self.moving.members, ensemble.device)
        self.initial: Tensor | None = None
        self.captured = self._capture()
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

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.step // self.batches.steps_per_epoch

    @property
    def done(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.steps

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last step ended an epoch, or the run."""
        return self.done or self.step % self.batches.steps_per_epoch == 0

    def run(self) -> Iterator[None]:
        """Take the remaining steps; yields after each."""
        while not self.done:
            before, size = self.step, self.batches.steps_per_epoch
            start = before % size
            left = min(size - start, self.steps - before)
            for _ in self._steps(start, left):
                self.step += 1
                if self.step == 1:
                    self.initial = self.tracker.loss()
                yield
            if self.step - before < left:
                raise DataError(
                    f"the loader's length is {size} batches per epoch but it gave "
                    f"{start + self.step - before}; correct its __len__"
                )

    def _steps(self, start: int, count: int) -> Iterator[None]:
        if self.captured is not None:
            yield from self.captured.epoch(self.epoch, start, count, self.step)
            return
        for x, y in islice(self.batches.batches(self.epoch, start), count):
            if self.step == 0 and not isinstance(self.batches, ArrayBatches):
                # A loader's targets are unknown before its end: the first batch sets their unit.
                begun = self.settings.likelihood.begun(parted(y)[0], len(self.sites))
                self.posterior = replace(self.posterior, likelihood=begun)
            if self.batches.n != self._counted[0]:  # by the first pass over a stream
                self.posterior = self._posterior(self.posterior.likelihood)
            set_learning_rate(self.optimizer, self._rate(self.step))
            self.move(x, y, self._factor(self.step), self.step)
            yield

    def move(self, x: Inputs, y: Targets, annealing: float | Tensor, step: int | Tensor) -> None:
        """Take one step with every member, without waiting for the device."""
        settings, moving = self.settings, self.moving
        if settings.augment is not None:
            own = key(settings.options.seed, "augment", step, x.device)
            x = augmented(settings.augment, x, own, moving.members)
        (velocity, info), self.mapping = within_memory(
            lambda mapping: forces_in(self.context.at(step, annealing, mapping), moving, (x, y)),
            moving.buffers,
            moving.members,
            moving.device,
            self.mapping,
        )
        velocity = clip_members(velocity, settings.options.clip, self.spans)
        for name, weight in moving.weights.items():
            weight.grad = _laid_out_like(weight, velocity[name])
        self.optimizer.step()
        self.optimizer.zero_grad()  # the next backward pass reuses this memory, still in the cache
        if info.statistics is not None:
            points = len(y) * self.posterior.n / self.batches.n
            self.posterior.likelihood.learn(info.statistics, points, self.posterior.n)
        moving.alive.copy_(info.alive)
        self.tracker.add(info)

    def _posterior(self, likelihood: Likelihood) -> Posterior:
        """The posterior for the known number of data points, without a prior in the optimiser."""
        settings = self.settings
        for group, decay in zip(self.optimizer.param_groups, self._own_decay, strict=True):
            if decay is not None:
                group["weight_decay"] = decay
        temperature = settings.options.temperature
        whole = Posterior(likelihood, settings.prior, self._targets(likelihood), temperature)
        return hand_over(whole, self.repulsion, settings, self.optimizer)

    def _targets(self, likelihood: Likelihood) -> float:
        """Number of training targets, or their total weight; a loader's from its first batch."""
        points = self.batches.n
        if self._counted[0] != points:
            arrays = isinstance(self.batches, ArrayBatches)
            y = self.batches.y if arrays else self.batches.first()[1]
            total = total_weight(likelihood, y, self.sites)
            self._counted = points, total if len(y) == points else total * points / len(y)
        return self._counted[1]

    def try_out(self) -> int:
        """Autotune member runner and threads on the CPU; returns the number of threads."""
        ensemble, plan = self.ensemble, parse_engine(self.settings.options.engine)
        if ensemble.device.type != "cpu" or self.steps - self.step < WORTH_A_TRIAL:
            return torch.get_num_threads()
        x, y = self.batches.first()
        kept = {name: tensor.clone() for name, tensor in ensemble.buffers.items()}

        context = replace(self.context, own_inputs=False)

        def step(mapping: MemberRunner) -> object:
            return forces_in(context.at(self.step, 1.0, mapping), self.moving, (x, y))

        if plan.mapping is None and has_convolutions(ensemble.groups) and self.step == 0:
            self.mapping = faster_runner(step, ensemble.groups, x.shape)
        threads = faster_threads(step, self.mapping)
        for name, tensor in ensemble.buffers.items():
            tensor.copy_(kept[name])
        return threads

    def _rate(self, step: int) -> float:
        return self.settings.options.lr * _at(self.settings.schedule, step, self.steps)

    def _factor(self, step: int) -> float:
        return _at(self.settings.annealing, step, self.steps)

    def _capture(self) -> CapturedSteps | None:
        rate = self.optimizer.param_groups[0]["lr"]
        if not isinstance(self.batches, ArrayBatches) or not isinstance(rate, Tensor):
            return None
        if not self.plan.graph:
            return None
        pace = [(self._rate(step), self._factor(step)) for step in range(self.steps)]
        annealed = self.settings.annealing is not None
        return CapturedSteps(self.move, self.batches, pace, rate, annealed)

    def close_epoch(self, started: float) -> dict[str, Any]:
        """Add the history row of the epoch that began at `started`."""
        if self.done:
            self._mark_diverged()
        rate = self.optimizer.param_groups[0]["lr"]
        row = {"epoch": len(self.rows) + 1, "step": self.step, **self.tracker.row(self.step)}
        row |= self._initial()
        # Stop the clock after the row: reading the row waits for the device.
        self.rows.append(row | {"lr": float(rate), "seconds": time.monotonic() - started})
        self.tracker.restart()
        return self.rows[-1]

    def _initial(self) -> dict[str, float]:
        """The loss before the first step, until the first history row holds it."""
        loss = math.nan if self.initial is None or self.rows else float(self.initial)
        return {"initial_loss": loss} if math.isfinite(loss) else {}

    def _mark_diverged(self) -> None:
        """Mark members that diverged in the last step; no later step would find them."""
        alive = self.moving.alive
        before = alive.clone()
        for weight, span in zip(self.moving.weights.values(), self.moving.spans, strict=True):
            alive[span] &= rows(weight.detach()).isfinite().all(1)
        self.tracker.mark_diverged(before & ~alive)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """All tensors of a checkpoint."""
        tensors, _ = flat_state(self.optimizer)
        random = {"cpu": torch.get_rng_state()}
        if self.ensemble.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.ensemble.device)
        ensemble = {name: tensor.detach() for name, tensor in self.ensemble.state.items()}
        parts = {"ensemble": ensemble, "optimizer": tensors, "random": random}
        parts["tracker"] = self.tracker.state
        learned = self.posterior.likelihood.state
        return parts | ({"likelihood": learned} if learned else {})

    def state(self) -> dict[str, Any]:
        """All plain values of a checkpoint."""
        found = self.batches.found if isinstance(self.batches, LoaderBatches) else {}
        return {
            "step": self.step,
            "history": self.rows,
            "optimizer": flat_state(self.optimizer)[1],
            "mapping": asdict(self.mapping),
            **({"data": found} if found else {}),
            **self._initial(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue where a checkpoint was taken."""
        parts, state = checkpoint.parts, checkpoint.state
        self.ensemble.load_state(parts["ensemble"])
        load_flat_state(self.optimizer, parts.get("optimizer", {}), state["optimizer"])
        self.tracker.load_state(parts["tracker"])
        self._restore_likelihood(parts.get("likelihood", {}))
        torch.set_rng_state(parts["random"]["cpu"])
        if self.ensemble.device.type == "cuda" and "cuda" in parts["random"]:
            torch.cuda.set_rng_state(parts["random"]["cuda"], self.ensemble.device)
        self.step, self.rows = state["step"], state["history"]
        self.mapping = MemberRunner(**state["mapping"])
        initial = state.get("initial_loss")
        self.initial = None if initial is None else torch.tensor(initial)
        if isinstance(self.batches, LoaderBatches):
            self.batches.found = state.get("data", {})
            self.posterior = self._posterior(self.posterior.likelihood)

    def _restore_likelihood(self, learned: dict[str, Tensor]) -> None:
        device = self.ensemble.device
        own = {name: tensor.to(device, copy=True) for name, tensor in learned.items()}
        likelihood = self.settings.likelihood.restored(own)
        self.posterior = replace(self.posterior, likelihood=likelihood)


def _laid_out_like(weight: Tensor, velocity: Tensor) -> Tensor:
    # A fused optimiser reads memory in order and ignores strides.
    same = velocity.stride() == weight.stride()
    return velocity if same else torch.empty_like(weight).copy_(velocity)


def _at(schedule: Any, step: int, steps: int) -> float:
    return 1.0 if schedule is None else float(schedule(step, steps))
