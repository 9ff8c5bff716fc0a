"""One call of `fit`: the training loop, its messages and its folder."""

import functools
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from shoal.core.display.progress import Progress, make_progress
from shoal.core.errors import ConfigError
from shoal.core.interruption import Interruption
from shoal.core.random import derive
from shoal.core.storage.checkpoints import steps
from shoal.core.storage.files import sweep
from shoal.core.storage.lock import FolderLock
from shoal.core.types import Tree
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.data.dataset import Dataset
from shoal.engine.members.precision import calculating_in
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble
from shoal.training.folder.choice import Choice, write_choice
from shoal.training.folder.folder_checks import continuing
from shoal.training.folder.own_data import OWN_DATA
from shoal.training.folder.provenance import about_data, provenance
from shoal.training.folder.run import Run, RunFolder, model_config
from shoal.training.folder.trajectory import Trajectory
from shoal.training.loop.cached_features import cached
from shoal.training.loop.callbacks import Listeners
from shoal.training.loop.messages import Messages
from shoal.training.loop.resuming import (
    check_length,
    check_same_data,
    check_same_settings,
    has_new_length,
)
from shoal.training.loop.saving import Saver
from shoal.training.loop.several_processes import Processes
from shoal.training.loop.trainer import Trainer
from shoal.training.loop.validation import BestMembers, Validation
from shoal.training.members.division import check_mesh
from shoal.training.members.placement import place
from shoal.training.mover.health import watching
from shoal.training.mover.prepare import keep, prepared
from shoal.training.options.options import Options
from shoal.training.options.settings import Settings

__all__ = ["STALL_AFTER", "Session", "check_snapshots"]

STALL_AFTER = 120.0
"""Seconds without a batch after which a run reports that its data loader stalls."""


class Session:
    """One call of `fit`."""

    def __init__(
        self,
        ensemble: Ensemble,
        data: Any,
        settings: Settings,
        batches: ArrayBatches | LoaderBatches,
        out: str | Path | None,
        listeners: Listeners,
        sites: torch.Size = torch.Size(),  # noqa: B008
        mesh: Mesh | None = None,
    ) -> None:
        check_mesh(mesh, ensemble, settings)
        self.ensemble, self.settings, self.batches = ensemble, settings, batches
        sharded = settings.options.trunk == "sharded"
        self.processes = Processes(mesh, ensemble, settings.options.frozen, sharded)
        self.sites = sites
        self.folder = None if out is None else RunFolder(Path(out))
        self.listeners = listeners
        source = data.spec if isinstance(data, Dataset) else None
        source = source or {"custom": data.name if isinstance(data, Dataset) else OWN_DATA}
        self.config = {"data": source, **model_config(ensemble), **settings.config()}
        values = data.pixel_range if isinstance(data, Dataset) else None
        self.pixels = {} if values is None else {"pixel_range": list(values)}
        self.notes: list[str] = []
        self.messages = Messages(self.notes, self.processes, settings)
        self.watch(None, False)
        self.choice: Choice | None = None
        self.interruption = Interruption()
        check_snapshots(settings.options, out)

    def watch(self, held: ArrayBatches | LoaderBatches | None, best: bool) -> None:
        """Measure the ensemble on held-out data, and end with its best members if `best`."""
        self.held, self.keeps_best, self.listeners.held = held, best, held
        self.held_data = {} if held is None else {"validation": about_data(held)["data"]}

    def tell_choice(self, choice: Choice) -> None:
        """Store what a search chose for this run."""
        self.choice = choice
        self.config["asked"] = choice.asked

    def run(self, device: torch.device, dtype: torch.dtype, resume: bool, show: bool) -> Run:
        folder = self.folder
        processes = self.processes
        self.provenance: dict[str, Any] = provenance(self.batches, device) | self.pixels
        self.provenance |= self.held_data
        processes.check_same(self.config, self.provenance)
        self.initialised_from = False
        with ExitStack() as stack:
            if folder is not None:
                stack.enter_context(self.interruption)
                processes.on_first(lambda: self._open(folder, resume, stack))
                self.initialised_from = processes.any(self.initialised_from)
                self.saver = Saver(folder, self.settings.options.save_every, processes.shards())
                stack.callback(self.saver.close)
            path = None if folder is None else folder.path
            alone = processes.mesh is None
            ensemble = place(processes.part(), device, dtype, self.settings, path, alone)
            repulsion, self.axes = prepared(self.settings.method, self.batches, path, dtype)
            stack.enter_context(calculating_in(self.settings.options.precision, ensemble))
            trained, batches = ensemble, self.batches
            if self.settings.options.cache:
                trained, batches = cached(ensemble, self.batches, self.settings)
            given = trained, self.settings, batches, repulsion, self.sites, processes.mesh
            trainer, self.part = Trainer(*given), ensemble
            self.trainer, trainer.best = trainer, BestMembers() if self.keeps_best else None
            stack.enter_context(_own_random(trainer))
            if folder is not None and self.initialised_from:
                self._restore(folder, ensemble)
            processes.check_step(trainer.step)
            if self.settings.options.keep_every is not None and trainer.step == 0:
                self.beginning = processes.copied(ensemble)
            choice = trainer.fit_batches()
            if trainer.mover.memory.decides:
                self.provenance["memory"] = choice.table()
            stack.enter_context(trainer.mover.memory.limited())
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(trainer.autotune_threads())
            show = show and processes.first
            progress = make_progress(show, self.settings.method.name, trainer.steps, trainer.step)
            stack.callback(progress.close)
            for sentence in (self._guess, self._why, choice.sentence):
                self.messages.say(progress, sentence)
            stack.enter_context(watching(trainer, STALL_AFTER, self.notes, progress.say))
            stack.callback(ensemble.train, False)
            with self._listening():
                self._train(progress)
                trainer.return_to_best()
                processes.collect(ensemble, device)
                self.provenance |= processes.received
        return self._result()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Tell the callbacks that the run begins, and that it ended."""
        self.listened = self.processes.any(bool(self.listeners))
        if self.listened:
            self.processes.collect(self.trainer.ensemble)
            self.listeners.begin(self._result(), self.processes.first)
        self.watched = self.processes.any(self.listeners.watch_steps)
        if self.watched:
            self.trainer.tracker.keep_last()
        try:
            yield
        except BaseException:
            self.listeners.end(self._result(), False)
            raise
        self.trainer.ensemble.train(False)
        self.listeners.end(self._result(), True)

    def _open(self, folder: RunFolder, resume: bool, stack: ExitStack) -> None:
        stack.callback(folder.leave, made=not os.path.exists(folder.path))
        stack.enter_context(FolderLock(folder.path))
        sweep(folder.path)
        folder.refuse_links()
        self.initialised_from = folder.holds_run
        if not self.initialised_from:
            return
        if not resume:
            raise folder.is_taken()
        self._check_resumable(folder)

    def _check_resumable(self, folder: RunFolder) -> None:
        """Continue the run of a folder, if it has these settings and data."""
        check_same_settings(folder, self.config)
        check_same_data(folder, self.provenance, self._guess is None)
        if self.choice is None and (known := folder.choice()) is not None:
            self.tell_choice(known)  # the settings that were chosen have been typed
        before = folder.provenance()
        self.provenance["run_id"] = before.get("run_id")  # None for older runs
        self.provenance["seconds"] = before.get("seconds", 0.0)
        self.notes[:] = before.get("notes", [])

    def _restore(self, folder: RunFolder, part: Ensemble) -> None:
        """Continue from the last checkpoint, if any, maybe for longer than was planned."""
        trainer, processes = self.trainer, self.processes
        if steps(folder.checkpoints):
            expected = processes.layouts(part, trainer)
            with continuing(folder.checkpoints):
                trainer.restore(self.saver.checkpoint(expected))
        check_length(trainer, folder)
        if processes.any(processes.first and has_new_length(folder, self.config)):
            self.notes[:] = [note for note in self.notes if note != trainer.ended]
            trainer.ended = None
            processes.on_first(lambda: folder.change_length(self.config))

    @property
    def _why(self) -> str | None:
        """Why a search chose the settings of this run; None if there was none."""
        return None if self.choice is None else self.choice.why

    @property
    def _guess(self) -> str | None:
        """A sentence with the assumed number of data points of a stream; None if it is known."""
        return self.batches.guess if isinstance(self.batches, LoaderBatches) else None

    def _train(self, progress: Progress) -> None:
        trainer = self.trainer
        trainer.ensemble.train()
        processes, started = self.processes, time.monotonic()
        for _ in processes.steps(trainer.run(), self.interruption, self._due):
            if not self.initialised_from:
                frozen = processes.frozen_state(trainer.ensemble) if self.folder else {}
                processes.on_first(functools.partial(self._begin, frozen))
                self.initialised_from = True
            progress.step()
            if self.watched:
                number = (trainer.step - 1) // trainer.batches.steps_per_epoch + 1
                self.listeners.step(trainer.step, trainer.steps, number, trainer.measures)
                self._end_if_asked(progress)
            if trainer.at_epoch_end:
                self._close_epoch(progress, started)
                started = time.monotonic()
            if processes.stopped(self.interruption) or trainer.ended is not None:
                break
            if self.folder is not None and processes.saves(self._due()):
                self._save()
        if trainer.done:
            self.messages.conclude(progress, trainer)
        self._save(last=True)
        if processes.stopped(self.interruption):
            self.interruption.stop()

    def _due(self) -> float:
        """When the next checkpoint is due."""
        return math.inf if self.folder is None else self.saver.due

    def _begin(self, frozen: Tree) -> None:
        """Write the run's folder, after the first step has succeeded."""
        if self.folder is not None:
            keep(self.folder.path, self.axes, frozen)
            if self.choice is not None:
                write_choice(self.folder.path, self.choice)
            if self.settings.options.keep_every is not None:
                # Before the config: every folder with a run has its first snapshot.
                Trajectory(self.folder.path).keep(
                    0, self.settings.options.keep_every, self.beginning
                )
            self.folder.begin(self.config, self.provenance)

    def _close_epoch(self, progress: Progress, started: float) -> None:
        trainer = self.trainer
        row = trainer.close_epoch(started, None if self.held is None else self._validate)
        self.provenance["seconds"] += row["seconds"]
        progress.epoch(row)
        self._keep_snapshot()
        self._recount(progress)
        self.messages.warn_of_divergence(trainer)
        self.messages.warn_unhealthy(trainer)
        self.messages.end_if_waited(progress, trainer)
        if self.listened:
            self.processes.collect(self.trainer.ensemble)
            self.listeners.epoch(self._result(), row)
            self._end_if_asked(progress)

    def _validate(self) -> dict[str, float | None]:
        """Measures of the ensemble on the validation data."""
        trainer, mesh = self.trainer, self.processes.mesh
        assert self.held is not None
        runner = trainer.mover.memory.mapping
        runner = runner if runner.chunk else None
        found = Validation(self.held, mesh, self.settings.options.frozen)
        return found.measure(self.part, trainer.mover.posterior.likelihood, runner)

    def _end_if_asked(self, progress: Progress) -> None:
        """End the run if a callback of any process has asked for it."""
        request, trainer = self.listeners.request, self.trainer
        whys = self.processes.gather_unique([request.why] if request.asked else [])
        if whys and trainer.ended is None:
            reason = f": {whys[0].rstrip('.')}" if whys[0] else ""
            trainer.ended = f"A callback ended the run at step {trainer.step}{reason}."
            self.messages.say(progress, trainer.ended)

    def _recount(self, progress: Progress) -> None:
        """After the first pass over a stream, its number of data points is known."""
        data: dict[str, Any] = self.provenance["data"]
        points = self.batches.n
        if points != data["points"]:
            self.provenance["data"] = {**data, "points": points}
            counted = f"The first pass counted {points:,} data points; N is {points:,} from now on."
            self.messages.say(progress, counted)

    def _keep_snapshot(self) -> None:
        epoch, every = len(self.trainer.rows), self.settings.options.keep_every
        if self.folder is not None and every is not None and epoch % every == 0:
            state = self.processes.state(self.trainer.ensemble)
            path = self.folder.path
            self.processes.on_first(lambda: Trajectory(path).keep(epoch, every, state))

    def _save(self, last: bool = False) -> None:
        if self.folder is not None:
            save = self.saver.finish if last else self.saver.save
            save(self.trainer, self.provenance, self.notes)

    def _result(self) -> Run:
        trainer = self.trainer
        return Run(
            self.ensemble,
            trainer.mover.likelihood,
            self.config,
            list(trainer.rows),
            list(self.notes),
            dict(self.provenance),
            None if self.folder is None else self.folder.path,
            choice=self.choice,
        )


def check_snapshots(options: Options, out: str | Path | None) -> None:
    """Refuse snapshots of a run without a folder."""
    if options.keep_every is not None and out is None:
        raise ConfigError("keep_every stores snapshots in the run's folder; type out='FOLDER'")


@contextmanager
def _own_random(trainer: Trainer) -> Iterator[None]:
    """Seed torch's generators for the networks, and restore their state afterwards."""
    device, seed = trainer.ensemble.device, derive(trainer.settings.options.seed, "run")
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
