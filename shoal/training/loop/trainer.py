"""The trainer: members, optimiser and progress, the state that a checkpoint holds."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.core.opaque import tensors_in
from shoal.core.storage.checkpoints import Checkpoint
from shoal.core.structure import Inputs
from shoal.core.tree import rows
from shoal.data.batches.batch import Targets
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.processes.mesh import Mesh
from shoal.engine.resources.autotune import faster_runner, faster_threads
from shoal.engine.resources.footprint import bytes_of
from shoal.engine.resources.graph import CapturedSteps
from shoal.engine.resources.plan import has_convolutions, parse_engine
from shoal.inference.ensemble import Ensemble, parts_on_device
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import initialised_from, total_weight
from shoal.interaction.repulsion import Repulsion
from shoal.training.folder.history import Tracker, best_epoch, best_epochs, held_out_loss
from shoal.training.loop.validation import BestMembers
from shoal.training.mover.memory import MemoryChoice
from shoal.training.mover.mover import Mover
from shoal.training.options.optim import flat_state, set_learning_rate
from shoal.training.options.schedules import factor_of
from shoal.training.options.settings import Settings
from shoal.training.options.torch_schedules import Plateau
from shoal.training.step.drive import StepContext
from shoal.training.step.results import StepInfo
from shoal.training.step.velocity import velocity_of

__all__ = ["Trainer"]

WORTH_A_TRIAL = 300
"""In runs with fewer steps, autotune would take longer than it saves."""


class Trainer:
    """Moves an ensemble over the batches of a run.

    Attributes:
        mover: moves the members by one batch.
        ensemble: the members, changed in place.
        settings: the settings of the run.
        mesh: the processes that train the other members; None for one process.
        batches: the training data.
        sites: shape of one data point's targets; empty for one target per data point.
        steps: number of steps of the run.
        step: number of finished steps.
        rows: one history row per finished epoch.
        tracker: sums over the steps of the current epoch.
        initial: mean loss of the members before the first step; None until that step is done.
        diverged: members that had diverged by the end of the last epoch, each with its step.
        ended: why the run ended before its last step; None if it did not.
        best: the members of the best epoch so far; None unless they are kept.
        waiting: passes the batches on; a watchdog sees here how long a batch takes.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        settings: Settings,
        batches: ArrayBatches | LoaderBatches,
        repulsion: Repulsion | None = None,
        sites: torch.Size = torch.Size(),  # noqa: B008
        mesh: Mesh | None = None,
    ) -> None:
        if settings.options.folds is not None:
            batches = batches.in_folds(settings.options.folds)
        self.batches, self.sites, self._counted = batches, sites, (0, 0.0)
        self.steps = settings.total_steps(batches.steps_per_epoch)
        # A loader's targets are unknown before its end: the first batch sets their unit.
        y = batches.y if isinstance(batches, ArrayBatches) else batches.first()[1]
        likelihood = initialised_from(settings.likelihood, y.to(ensemble.device), sites)
        targets = self._targets(likelihood)
        settings = _fitted(settings, batches)
        self.mover = Mover(
            ensemble, settings, repulsion, likelihood, targets, batches.n, self.steps, mesh
        )
        if settings.options.batches == "own":
            moving = self.mover.moving
            own = range(moving.first, moving.first + moving.members)
            self.batches = batches.for_members(own, settings.common_points)
        self.ensemble, self.settings, self.mesh = ensemble, settings, mesh
        self.step = 0
        self.rows: list[dict[str, Any]] = []
        self.tracker = Tracker(self.mover.moving.members, ensemble.device)
        self.initial: Tensor | None = None
        self.diverged: dict[int, int] = {}
        self.ended: str | None = None
        self.best: BestMembers | None = None
        self._followed = 1.0
        self.captured = self._capture()
        self.waiting: Callable[[Iterable[Any]], Iterator[Any]] = iter

    @property
    def history(self) -> Tracker:
        """The tracker of all members; with several processes a copy, which all must ask for."""
        return self.tracker if self.mesh is None else self.tracker.of_all(self.mesh)

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self.step // self.batches.steps_per_epoch

    @property
    def done(self) -> bool:
        """Whether all steps are done, or the run was ended before."""
        return self.step >= self.steps or self.ended is not None

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
                    self.initial = self.history.loss()
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
        for x, y in islice(self.waiting(self.batches.batches(self.epoch, start)), count):
            if self.batches.n != self._counted[0]:  # by the first pass over a stream
                self._recount()
            set_learning_rate(self.mover.optimizer, self._rate(self.step))
            self._move(x, y, self._factor(self.step), self.step)
            yield

    def _move(
        self, x: Inputs, y: Targets, annealing: float | Tensor, step: int | Tensor
    ) -> StepInfo:
        """Take one step with every member, and add its measures to the history."""
        info = self.mover.move(x, y, annealing, step)
        self.tracker.add(info)
        return info

    def _targets(self, likelihood: Likelihood) -> float:
        """Number of training targets, or their total weight; a loader's from its first batch."""
        points = self.batches.n
        if self._counted[0] != points:
            batches = self.batches
            y = batches.y if isinstance(batches, ArrayBatches) else batches.first()[1]
            total = total_weight(likelihood, y, self.sites)
            self._counted = points, total if len(y) == points else total * points / len(y)
        return self._counted[1]

    def fit_batches(
        self, evaluate: Callable[[Ensemble, Inputs], object] = lambda members, x: None
    ) -> MemoryChoice:
        """Choose how many members run at a time, so that the steps of this run fit.

        Args:
            evaluate: what the ends of epochs do with the members and inputs.
        """
        memory = self.mover.memory
        memory.fit_cache(lambda: self.batches.first()[0])
        if not memory.decides:
            return MemoryChoice(memory.mapping)
        if self.captured is not None:
            self.captured.note("building kernels, measuring the memory of a step")
        batches, data, other = self.batches, 0, 0.0
        if isinstance(batches, ArrayBatches):
            if self.ensemble.device.type == "cuda":
                data = bytes_of([*tensors_in(batches.x), *tensors_in(batches.y)])
            if self.captured is not None and not batches.drop_last:
                other = batches.n % batches.batch_size / batches.batch_size
        known = self.captured is not None and self.captured.known
        x, y = batches.first()

        def launch(context: StepContext) -> None:
            info = self.mover.launch(context, (x, y))
            if self.captured is not None:
                self.captured.launch_next()
            Tracker(self.mover.moving.members, self.ensemble.device).add(info)
            evaluate(self.mover.moving, x)

        context = self.mover.trial_context
        return memory.fit(context, x, y, data, other, None if known else launch)

    def autotune_threads(self) -> int:
        """Autotune member runner and threads on the CPU; returns the number of threads."""
        ensemble, memory = self.ensemble, self.mover.memory
        worth = self.steps - self.step >= WORTH_A_TRIAL and ensemble.offload is None
        # Trials of two processes would differ in number, and each gathers a trunk in shards.
        worth = worth and ensemble.groups[0].shards is None
        if ensemble.device.type != "cpu" or not worth:
            return torch.get_num_threads()
        x, y = self.batches.first()
        kept = {name: tensor.clone() for name, tensor in ensemble.buffers.items()}
        context, chunk = self.mover.trial_context, memory.mapping.chunk

        def step(mapping: MemberRunner) -> object:
            mapping = replace(mapping, chunk=chunk)
            return velocity_of(context.at(self.step, 1.0, mapping), self.mover.moving, (x, y))

        chosen = parse_engine(self.settings.options.engine).mapping
        if chosen is None and has_convolutions(ensemble.groups) and self.step == 0:
            memory.mapping = replace(faster_runner(step, ensemble.groups, x.shape), chunk=chunk)
        threads = faster_threads(step, memory.mapping)
        for name, tensor in ensemble.buffers.items():
            tensor.copy_(kept[name])
        return threads

    def _rate(self, step: int) -> float:
        factor = factor_of(self.settings.schedule, step, self.steps)
        return self.settings.options.lr * factor * self._followed

    def _factor(self, step: int) -> float:
        annealing = self.settings.annealing
        return 1.0 if annealing is None else float(annealing(step, self.steps))

    def _capture(self) -> CapturedSteps | None:
        rate = self.mover.optimizer.param_groups[0]["lr"]
        if not isinstance(self.batches, ArrayBatches) or not isinstance(rate, Tensor):
            return None
        if not self.mover.plan.graph or self.ensemble.offload is not None:
            return None
        pace = [(self._rate(step), self._factor(step)) for step in range(self.steps)]
        annealed = self.settings.annealing is not None
        memory = self.mover.memory
        kind = memory.kind(self.batches.x)
        delays = self.mover.context.base == "weights"  # from the second step on
        return CapturedSteps(self._move, self.batches, pace, rate, annealed, memory, kind, delays)

    def close_epoch(
        self, started: float, validate: Callable[[], dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Add the history row of the epoch that began at `started`.

        Args:
            started: when the epoch began.
            validate: measures on validation data or folds, for the row; None without any.
        """
        if self.done:
            self._mark_diverged()
        if self.ensemble.offload is not None:  # snapshots and callbacks read the members
            self.ensemble.offload.flush()
        rate = self.mover.optimizer.param_groups[0]["lr"]
        history = self.history
        self.diverged = history.diverged(self.step)
        row = {"epoch": len(self.rows) + 1, "step": self.step, **history.row(self.step)}
        row |= self._initial() | ({} if validate is None else validate())
        # Stop the clock after the row: reading the row waits for the device.
        self.rows.append(row | {"lr": float(rate), "seconds": time.monotonic() - started})
        self.tracker.restart()
        self._follow()
        if self.best is not None:
            self._keep_best(row["epoch"])
        return self.rows[-1]

    def _keep_best(self, epoch: int) -> None:
        """Copy the members if this epoch is the best so far; with folds, each for which it is."""
        assert self.best is not None
        state = epoch, self.ensemble, self.mover.posterior.likelihood
        each = best_epochs(self.rows)
        if each is None:
            if best_epoch(self.rows) == epoch:
                self.best.keep(*state)
            return
        # A member without a finite score has no best epoch: it stays as it is.
        better = torch.tensor([best in (None, epoch) for best in each])
        if any(best == epoch for best in each):
            own = better if self.mesh is None else better[self.mesh.own]
            frozen = own.new_zeros(self.settings.options.frozen)
            self.best.keep_some(*state, better, torch.cat([frozen, own]))

    def _follow(self) -> None:
        """Let a schedule that follows the validation loss set the learning rate from now on."""
        schedule = self.settings.schedule
        if isinstance(schedule, Plateau):
            self._followed = schedule.follow([held_out_loss(row) for row in self.rows])
            if self.captured is not None and not self.done:
                self.captured.pace[self.step :, 0] = self._rate(self.step)

    def return_to_best(self) -> None:
        """Give members and likelihood the state of the best epoch, if there is one."""
        if self.best is not None and self.best.epoch is not None:
            self.ensemble.load_state(self.best.ensemble)
            learned = {n: t.to(self.ensemble.device) for n, t in self.best.likelihood.items()}
            self.mover.learn_with(self.settings.likelihood.restored(learned))

    def measures(self) -> dict[str, Any]:
        """Measures of the last step, as in a history row; waits for the device."""
        rate = float(self.mover.optimizer.param_groups[0]["lr"])
        return self.tracker.last_row(self.step) | {"lr": rate}

    def _initial(self) -> dict[str, float]:
        """The loss before the first step, until the first history row holds it."""
        loss = math.nan if self.initial is None or self.rows else float(self.initial)
        return {"initial_loss": loss} if math.isfinite(loss) else {}

    def _mark_diverged(self) -> None:
        """Mark members that diverged in the last step; no later step would find them."""
        moving = self.mover.moving
        alive, before = moving.alive, moving.alive.clone()
        for part in parts_on_device(moving):
            mine = alive[part.first - moving.first :]
            for weight, span in zip(part.weights.values(), part.spans, strict=True):
                mine[span] &= rows(weight.detach()).isfinite().all(1)
        self.tracker.mark_diverged(before & ~alive)

    def _recount(self) -> None:
        """Set the number of targets anew, when a stream has been counted."""
        targets = self._targets(self.mover.posterior.likelihood)
        self.mover.posterior, self.mover.points = self.mover.for_targets(targets), self.batches.n

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """All tensors of a checkpoint."""
        best = {} if self.best is None else self.best.parts
        return {**self.mover.tensors(), **best, "tracker": self.tracker.state}

    def state(self) -> dict[str, Any]:
        """All plain values of a checkpoint."""
        data = self.batches.found if isinstance(self.batches, LoaderBatches) else {}
        return {
            "step": self.step,
            "history": self.rows,
            "optimizer": flat_state(self.mover.optimizer)[1],
            "mapping": asdict(self.mover.memory.mapping),
            **({"data": data} if data else {}),
            **({} if self.ended is None else {"ended": self.ended}),
            **({} if self.best is None else self.best.state),
            **self._initial(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue where a checkpoint was taken."""
        parts, state = checkpoint.parts, checkpoint.state
        self.mover.load_tensors(parts, state["optimizer"])
        self.tracker.load_state(parts["tracker"])
        self.step, self.rows = state["step"], state["history"]
        self.mover.memory.mapping = MemberRunner(**state["mapping"])
        self._follow()
        self.ended = state.get("ended")
        if self.best is not None:
            self.best.restore(checkpoint)
        initial = state.get("initial_loss")
        self.initial = None if initial is None else torch.tensor(initial)
        if isinstance(self.batches, LoaderBatches):
            self.batches.found = state.get("data", {})
            self._recount()


def _fitted(settings: Settings, batches: ArrayBatches | LoaderBatches) -> Settings:
    """Settings whose adversarial neighbours know the range of the training inputs."""
    adversarial = settings.adversarial
    if adversarial is None or not adversarial.relative or adversarial.ranges is not None:
        return settings
    if isinstance(batches, LoaderBatches):
        raise ConfigError(
            "a relative adversarial epsilon needs the range of the inputs, which a loader does not "
            "tell; give arrays, or adversarial=0.01 in units of the inputs"
        )
    return replace(settings, adversarial=adversarial.fitted(batches.x))
