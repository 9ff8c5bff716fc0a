"""One call of `fit`: the training loop, its messages and its folder."""

import functools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from shoal.core.checkpoints import steps
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.files import sweep
from shoal.core.interruption import Interruption
from shoal.core.lock import FolderLock
from shoal.core.progress import Progress, make_progress
from shoal.core.random import derive
from shoal.core.types import Tree
from shoal.data.dataset import Dataset
from shoal.data.sources import ArrayBatches, LoaderBatches
from shoal.engine.mesh import Mesh
from shoal.engine.precision import calculating_in
from shoal.inference.ensemble import Ensemble
from shoal.training.cached_features import cached
from shoal.training.folder_checks import continuing
from shoal.training.health import findings, is_new, watching
from shoal.training.history import LESS, balance_sentence, divergence_sentence
from shoal.training.options import DEFAULTS
from shoal.training.own_data import OWN_DATA, has_own_data
from shoal.training.placement import place
from shoal.training.prepare import keep, prepared
from shoal.training.provenance import provenance
from shoal.training.run import Run, RunFolder, model_config
from shoal.training.saving import Saver
from shoal.training.settings import Settings
from shoal.training.several_processes import Processes
from shoal.training.trainer import Trainer
from shoal.training.trajectory import Trajectory

__all__ = ["Callback", "Session"]

Callback = Callable[[Run], None]
"""Called after every epoch with the run so far."""


class Session:
    """One call of `fit`."""

    def __init__(
        self,
        ensemble: Ensemble,
        data: Any,
        settings: Settings,
        batches: ArrayBatches | LoaderBatches,
        out: str | Path | None,
        callbacks: Sequence[Callback],
        sites: torch.Size = torch.Size(),  # noqa: B008
        mesh: Mesh | None = None,
    ) -> None:
        self.ensemble, self.settings, self.batches = ensemble, settings, batches
        sharded = settings.options.trunk == "sharded"
        self.processes = Processes(mesh, ensemble, settings.options.frozen, sharded)
        self.sites = sites
        self.folder = None if out is None else RunFolder(Path(out))
        self.callbacks = callbacks
        source = data.spec if isinstance(data, Dataset) else None
        source = source or {"custom": data.name if isinstance(data, Dataset) else OWN_DATA}
        self.config = {"data": source, **model_config(ensemble), **settings.config()}
        values = data.pixel_range if isinstance(data, Dataset) else None
        self.pixels = {} if values is None else {"pixel_range": list(values)}
        self.notes: list[str] = []
        self.interruption = Interruption()
        if settings.options.keep_every is not None and self.folder is None:
            raise ConfigError("keep_every stores snapshots in the run's folder; type out='FOLDER'")

    def run(self, device: torch.device, dtype: torch.dtype, resume: bool, show: bool) -> Run:
        folder = self.folder
        processes = self.processes
        self.provenance: dict[str, Any] = provenance(self.batches, device) | self.pixels
        processes.check_same(self.config, self.provenance)
        self.begun = False
        with ExitStack() as stack:
            if folder is not None:
                stack.enter_context(self.interruption)
                processes.on_first(lambda: self._open(folder, resume, stack))
                self.begun = processes.any(self.begun)
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
            trainer = self.trainer = Trainer(*given)
            stack.enter_context(_own_random(trainer))
            if folder is not None and steps(folder.checkpoints):
                expected = processes.layouts(ensemble, trainer)
                with continuing(folder.checkpoints):
                    trainer.restore(self.saver.checkpoint(expected))
            processes.check_step(trainer.step)
            if self.settings.options.keep_every is not None and trainer.step == 0:
                self.beginning = processes.copied(ensemble)
            choice = trainer.fit_batches()
            if trainer.watches_memory:
                self.provenance["memory"] = choice.table()
            stack.enter_context(trainer.limited())
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(trainer.try_out())
            show = show and processes.first
            progress = make_progress(show, self.settings.method.name, trainer.steps, trainer.step)
            stack.callback(progress.close)
            self._say(progress, self._guess)
            self._say(progress, choice.sentence)
            stall = self.settings.options.stall_after
            stack.enter_context(watching(trainer, stall, self.notes, progress.say))
            stack.callback(ensemble.train, False)
            self._train(progress)
            processes.collect(ensemble, device)
            self.provenance |= processes.received
        return self._result()

    def _open(self, folder: RunFolder, resume: bool, stack: ExitStack) -> None:
        stack.callback(folder.leave, made=not os.path.exists(folder.path))
        stack.enter_context(FolderLock(folder.path))
        sweep(folder.path)
        folder.refuse_links()
        self.begun = folder.holds_run
        if not self.begun:
            return
        if not resume:
            raise ConfigError(
                f"{folder.path} already holds a run; type resume=True to continue it, "
                f"or choose another folder"
            )
        self._check_same(folder)

    def _check_same(self, folder: RunFolder) -> None:
        known = {**DEFAULTS, **folder.config()}
        plain = {key: _plain(value) for key, value in self.config.items() if value is not None}
        # The initial members do not matter: the checkpoint replaces them.
        for key in {**plain, **known}:
            if key == "init_seed" or (key == "data" and _are_own(known, plain)):
                continue
            if known.get(key) != plain.get(key):
                raise ConfigError(
                    f"the run in {folder.path} has {key} = {known.get(key)!r}, this call has "
                    f"{plain.get(key)!r}; resume with the same settings or choose another folder"
                )
        before, data = folder.provenance(), self.provenance["data"]
        self.provenance["run_id"] = before.get("run_id")  # None for older runs
        self.provenance["seconds"] = before.get("seconds", 0.0)
        self.notes = before.get("notes", [])
        uncounted = data if self._guess is None else {**(before.get("data") or {}), "sha256": None}
        if before.get("data") != uncounted:
            raise ConfigError(
                f"the run in {folder.path} was trained on other data; resume with the same data"
            )

    @property
    def _guess(self) -> str | None:
        """A sentence with the assumed number of data points of a stream; None if it is known."""
        return self.batches.guess if isinstance(self.batches, LoaderBatches) else None

    def _train(self, progress: Progress) -> None:
        trainer = self.trainer
        trainer.ensemble.train()
        processes, started = self.processes, time.monotonic()
        for _ in processes.steps(trainer.run(), self.interruption, self._due):
            if not self.begun:
                frozen = processes.frozen_state(trainer.ensemble) if self.folder else {}
                processes.on_first(functools.partial(self._begin, frozen))
                self.begun = True
            progress.step()
            if trainer.at_epoch_end:
                self._close_epoch(progress, started)
                started = time.monotonic()
            if processes.stopped(self.interruption):
                break
            if self.folder is not None and processes.saves(self._due()):
                self._save()
        if trainer.done:
            self._conclude(progress)
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
            if self.settings.options.keep_every is not None:
                # Before the config: every folder with a run has its first snapshot.
                Trajectory(self.folder.path).keep(
                    0, self.settings.options.keep_every, self.beginning
                )
            self.folder.begin(self.config, self.provenance)

    def _close_epoch(self, progress: Progress, started: float) -> None:
        row = self.trainer.close_epoch(started)
        self.provenance["seconds"] += row["seconds"]
        progress.epoch(row)
        self._keep_snapshot()
        self._recount(progress)
        self._warn_of_divergence()
        self._warn_of_sickness()
        if self.processes.any(bool(self.callbacks)):
            self.processes.collect(self.trainer.ensemble)
        for callback in self.callbacks:
            callback(self._result())

    def _recount(self, progress: Progress) -> None:
        """After the first pass over a stream, its number of data points is known."""
        data: dict[str, Any] = self.provenance["data"]
        points = self.batches.n
        if points != data["points"]:
            self.provenance["data"] = {**data, "points": points}
            counted = f"The first pass counted {points:,} data points; N is {points:,} from now on."
            self._say(progress, counted)

    def _keep_snapshot(self) -> None:
        epoch, every = len(self.trainer.rows), self.settings.options.keep_every
        if self.folder is not None and every is not None and epoch % every == 0:
            state = self.processes.state(self.trainer.ensemble)
            path = self.folder.path
            self.processes.on_first(lambda: Trajectory(path).keep(epoch, every, state))

    def _warn_of_divergence(self) -> None:
        diverged = self.trainer.diverged
        for member, step in diverged.items():
            member += self.settings.options.frozen
            note = f"Member {member} diverged at step {step} and is left out; {LESS}."
            if is_new(f"Member {member} diverged (", self.notes):
                self.notes.append(note)
                if self.processes.first:
                    warnings.warn(note, ShoalWarning, stacklevel=6)
        if len(diverged) == self.processes.trained(self.trainer):
            raise DataError(f"all members diverged by step {max(diverged.values())}; {LESS}")

    def _warn_of_sickness(self) -> None:
        for sentence in self.processes.united(findings(self.trainer)):
            if is_new(sentence, self.notes):
                self.notes.append(sentence)
                if self.processes.first:
                    warnings.warn(sentence, ShoalWarning, stacklevel=6)

    def _conclude(self, progress: Progress) -> None:
        diverged = divergence_sentence(self.trainer.rows)
        if diverged is not None:
            self._say(progress, diverged)
            return
        repulsion = self.trainer.settings.method.repulsion
        cold = self.trainer.settings.options.temperature == 0
        if repulsion is None or cold or self.ensemble.members == 1:
            return
        self._say(progress, balance_sentence(self.trainer.rows))

    def _say(self, progress: Progress, sentence: str | None) -> None:
        """Store a sentence in the notes and show it, once per run."""
        if sentence is not None and sentence not in self.notes:
            self.notes.append(sentence)
            progress.say(sentence)

    def _save(self, last: bool = False) -> None:
        if self.folder is not None:
            save = self.saver.finish if last else self.saver.save
            save(self.trainer, self.provenance, self.notes)

    def _result(self) -> Run:
        trainer = self.trainer
        return Run(
            self.ensemble,
            trainer.likelihood,
            self.config,
            list(trainer.rows),
            list(self.notes),
            dict(self.provenance),
            None if self.folder is None else self.folder.path,
        )


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


def _are_own(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether both have the user's own data, which are compared by digest, not by name."""
    return has_own_data(known) and has_own_data(wanted)


def _plain(value: Any) -> Any:
    """The value after writing it as TOML and reading it back."""
    if isinstance(value, Mapping):
        return {key: _plain(v) for key, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
