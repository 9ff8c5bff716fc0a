"""One call of `fit`: the training loop, its messages and its folder."""

import functools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from shoal.data.batches.sources import LoaderBatches
from shoal.data.dataset import Dataset, class_names
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.members.precision import calculating_in
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble
from shoal.training.folder.choice import Choice, write_choice
from shoal.training.folder.own_data import OWN_DATA
from shoal.training.folder.provenance import about_data, provenance
from shoal.training.folder.run import GivenData, Run, model_config
from shoal.training.folder.run_folder import RunFolder, continuing
from shoal.training.folder.trajectory import Trajectory
from shoal.training.loop.cached_features import cached
from shoal.training.loop.callbacks import Listeners
from shoal.training.loop.folds import FoldValidation
from shoal.training.loop.messages import Messages, constant_members, watching
from shoal.training.loop.saving import (
    Saver,
    check_length,
    check_same_data,
    check_same_settings,
    has_new_length,
)
from shoal.training.loop.several_processes import Processes
from shoal.training.loop.trainer import Trainer
from shoal.training.loop.validation import BestMembers, Data, Validation, keeps_best
from shoal.training.members.division import check_mesh
from shoal.training.mover.placement import place
from shoal.training.mover.prepare import Fitted, keep, prepared
from shoal.training.options.options import Options
from shoal.training.options.settings import Settings

__all__ = ["STALL_AFTER", "RunData", "Session", "check_snapshots"]

STALL_AFTER = 120.0
"""Seconds without a batch after which a run reports that its data loader stalls."""


@dataclass(frozen=True, eq=False)
class RunData:
    """The data of a run, as `fit` made them of its arguments.

    Attributes:
        batches: the training data.
        held: validation data; None without any.
        sites: shape of one data point's targets; empty for one target per data point.
        source: the data in the run's config: how to load them, or their name.
        pixel_range: smallest and largest value of a pixel; None for other data.
        classes: names of the classes in the order of the labels; None where they are not known.
        given: the data as the user gave them; None if they can be read only once, or members have
            different ones.
        fitted: what runs on these training data have fitted to them.
    """

    batches: Data
    held: Data | None
    sites: torch.Size
    source: Mapping[str, Any]
    pixel_range: Sequence[float] | None
    classes: Sequence[str] | None
    given: GivenData | None = None
    fitted: Fitted = field(default_factory=Fitted)

    @classmethod
    def of(cls, given: GivenData, batches: Data, held: Data | None, sites: torch.Size) -> "RunData":
        """The batches with what is known of the data as the user gave them."""
        data = given.data
        classes = class_names(data)
        if isinstance(data, Dataset):
            source = data.spec or {"custom": data.name}
            return cls(batches, held, sites, source, data.pixel_range, classes, given)
        several = isinstance(batches, LoaderBatches) and batches.loaders is not None
        again = None if several or isinstance(data, Iterator) else given
        return cls(batches, held, sites, {"custom": OWN_DATA}, None, classes, again)


class Session:
    """One call of `fit`.

    Args:
        ensemble: the members, changed in place.
        settings: the settings of the run.
        data: what the run trains on and is measured on.
        out: the folder of the run; None for a run in memory.
        listeners: the callbacks and loggers.
        mesh: the processes that train together; None for one process.
        choice: what a search chose for this run; None if there was none.
        warned: warnings that the look before training has given.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        settings: Settings,
        data: RunData,
        out: str | Path | None,
        listeners: Listeners,
        mesh: Mesh | None = None,
        choice: Choice | None = None,
        warned: Sequence[str] = (),
    ) -> None:
        check_mesh(mesh, ensemble, settings)
        self.ensemble, self.settings = ensemble, settings
        self.data, self.batches = data, data.batches
        sharded = settings.options.trunk == "sharded"
        self.processes = Processes(mesh, ensemble, settings.options.frozen, sharded)
        self.folder = None if out is None else RunFolder(Path(out))
        self.listeners, listeners.held = listeners, data.held
        self.config = {"data": data.source, **model_config(ensemble), **settings.config()}
        self.notes: list[str] = []
        self.messages = Messages(self.notes, self.processes, settings, warned)
        self.choice: Choice | None = None
        if choice is not None:
            self._record_choice(choice)
        self.interruption = Interruption()
        check_snapshots(settings.options, out)

    def _record_choice(self, choice: Choice) -> None:
        """Store what a search chose for this run."""
        self.choice = choice
        self.config["asked"] = choice.asked

    def run(self, device: torch.device, dtype: torch.dtype, resume: bool, show: bool) -> Run:
        """Train, from the first step or the last checkpoint to the last step."""
        folder, processes, options = self.folder, self.processes, self.settings.options
        self.provenance = self._provenance(device)
        processes.check_same(self.config, self.provenance)
        self.folder_written = False
        with ExitStack() as stack:
            if folder is not None:
                stack.enter_context(self.interruption)
                processes.on_first(lambda: self._open(folder, resume, stack))
                self.folder_written = processes.any(self.folder_written)
                self.saver = Saver(folder, options.save_every, processes.shards())
                stack.callback(self.saver.close)
            self.trainer = trainer = self._make_trainer(stack, device, dtype)
            stack.enter_context(_seeded(trainer))
            if folder is not None and self.folder_written:
                self._restore(folder, self.part)
            processes.check_step(trainer.step)
            if options.keep_every is not None and trainer.step == 0:
                self.beginning = processes.copied(self.part)
            show = show and processes.first
            progress = make_progress(show, self.settings.method.name, trainer.steps, trainer.step)
            stack.callback(progress.close)
            if trainer.captured is not None:
                trainer.captured.note = progress.note
                stack.callback(trainer.captured.close)
            memory = trainer.fit_batches(constant_members)
            if trainer.mover.memory.decides:
                self.provenance["memory"] = memory.table()
            stack.enter_context(trainer.mover.memory.limited())
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(trainer.autotune_threads())
            why = None if self.choice is None else self.choice.why
            for sentence in (self._guess, why, memory.sentence):
                self.messages.say(progress, sentence)
            stack.enter_context(watching(trainer, STALL_AFTER, self.notes, progress.say))
            stack.callback(self.part.train, False)
            with self._listening():
                self._train(progress)
                trainer.return_to_best()
                processes.collect(self.part, device)
                self.provenance |= processes.received
        return self._result()

    def _provenance(self, device: torch.device) -> dict[str, Any]:
        """Environment and data of the run."""
        table = provenance(self.batches, device)
        if self.data.pixel_range is not None:
            table["pixel_range"] = list(self.data.pixel_range)
        if self.data.classes is not None:
            table["classes"] = list(self.data.classes)
        if self.data.held is not None:
            table["validation"] = about_data(self.data.held)["data"]
        return table

    @property
    def _record(self) -> dict[str, Any]:
        """The provenance with the warnings so far; a thread may write it."""
        return {**self.provenance, "warnings": list(self.messages.warned)}

    def _make_trainer(self, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> Trainer:
        """The trainer of this process's members, on the device and in the precision of the run."""
        settings, mesh = self.settings, self.processes.mesh
        path = None if self.folder is None else self.folder.path
        members = self.processes.part()
        self.part = place(members, device, dtype, settings, path, alone=mesh is None)
        repulsion, self.axes = prepared(
            settings.method, self.batches, path, dtype, self.data.fitted
        )
        stack.enter_context(calculating_in(settings.options.precision, self.part))
        trained, batches = self.part, self.batches
        if settings.options.cache:
            trained, batches = cached(self.part, self.batches, settings)
        trainer = Trainer(trained, settings, batches, repulsion, self.data.sites, mesh)
        trainer.best = BestMembers() if keeps_best(settings.options) else None
        return trainer

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
        self.folder_written = folder.holds_run
        if not self.folder_written:
            return
        if not resume:
            raise folder.is_taken()
        self._check_resumable(folder)

    def _check_resumable(self, folder: RunFolder) -> None:
        """Continue the run of a folder, if it has these settings and data."""
        check_same_settings(folder, self.config)
        check_same_data(folder, self.provenance, self._guess is None)
        if self.choice is None and (known := folder.choice()) is not None:
            self._record_choice(known)  # the settings that were chosen have been typed
        before = folder.provenance()
        self.provenance["run_id"] = before.get("run_id")  # None for older runs
        self.provenance["seconds"] = before.get("seconds", 0.0)
        self.messages.restore(before.get("notes", []), before.get("warnings", []))

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
    def _guess(self) -> str | None:
        """A sentence with the assumed number of data points of a stream; None if it is known."""
        return self.batches.guess if isinstance(self.batches, LoaderBatches) else None

    def _train(self, progress: Progress) -> None:
        trainer = self.trainer
        trainer.ensemble.train()
        processes, started = self.processes, time.monotonic()
        for _ in processes.steps(trainer.run(), self.interruption, self._due):
            if not self.folder_written:
                frozen = processes.frozen_state(trainer.ensemble) if self.folder else {}
                processes.on_first(functools.partial(self._begin, frozen))
                self.folder_written = True
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
            self.folder.begin(self.config, self._record)

    def _close_epoch(self, progress: Progress, started: float) -> None:
        trainer = self.trainer
        folds = self.settings.options.folds is not None
        measured = self._validate_folds if folds else self._validate
        measures = folds or self.data.held is not None
        row = trainer.close_epoch(started, measured if measures else None)
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

    def _validate(self) -> dict[str, Any]:
        """Measures of the ensemble on the validation data, for the history."""
        assert self.data.held is not None
        mover = self.trainer.mover
        captures = mover.plan.graph and mover.memory.limit is None and self.part.offload is None
        frozen = self.settings.options.frozen
        validation = Validation(self.data.held, self.processes.mesh, frozen, captures)
        likelihood = self.trainer.mover.posterior.likelihood
        return {"validation": validation.measure(self.part, likelihood, self._chunked)}

    def _validate_folds(self) -> dict[str, Any]:
        """Measures of every member and of the ensemble on the folds, for the history."""
        trainer, options = self.trainer, self.settings.options
        how = options.batch_size, trainer.mesh, options.frozen, options.keep == "crps"
        folds = FoldValidation(trainer.batches, *how)
        return folds.measure(trainer.ensemble, trainer.mover.posterior.likelihood, self._chunked)

    @property
    def _chunked(self) -> MemberRunner | None:
        """How members run, if not all fit at a time; None for the default."""
        runner = self.trainer.mover.memory.mapping
        return runner if runner.chunk else None

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
            save(self.trainer, self._record, self.notes)

    def _result(self) -> Run:
        trainer = self.trainer
        return Run(
            self.ensemble,
            trainer.mover.likelihood,
            self.config,
            list(trainer.rows),
            list(self.notes),
            self._record,
            None if self.folder is None else self.folder.path,
            choice=self.choice,
            given=self.data.given,
        )


def check_snapshots(options: Options, out: str | Path | None) -> None:
    """Refuse snapshots of a run without a folder."""
    if options.keep_every is not None and out is None:
        raise ConfigError("keep_every stores snapshots in the run's folder; type out='FOLDER'")


@contextmanager
def _seeded(trainer: Trainer) -> Iterator[None]:
    """Seed torch's generators for the networks, and restore their state afterwards."""
    device, seed = trainer.ensemble.device, derive(trainer.settings.options.seed, "run")
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
