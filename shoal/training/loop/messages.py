"""What a run says while it trains: notes for its folder, warnings, and lines of progress.

Checks of the run's health name in one sentence what goes wrong, and what to do. They use the
history rows and one forward pass over a few points. They run at the ends of epochs and change
nothing: no random number, no running statistics. A thread watches for batches that do not come.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from statistics import median
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from shoal.core.display.progress import Progress
from shoal.core.errors import DataError, ShoalWarning
from shoal.core.opaque import Opaque, tensors_in
from shoal.core.structure import Inputs
from shoal.data.batches.sources import LoaderBatches
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble
from shoal.training.folder.history import (
    LESS,
    balance_sentence,
    best_epochs,
    divergence_sentence,
    held_out_loss,
)
from shoal.training.loop.several_processes import Processes
from shoal.training.loop.trainer import Trainer
from shoal.training.loop.validation import has_waited
from shoal.training.options.settings import Settings

__all__ = [
    "Messages",
    "Watchdog",
    "bandwidth_sentence",
    "constant_members",
    "health_warnings",
    "is_new",
    "push_sentence",
    "straggler_sentence",
    "watching",
]

T = TypeVar("T")
Row = Mapping[str, Any]

DOMINANT = 10.0
"""Force ratio from which a rising loss is due to repulsion."""

COLLAPSED = 1e-6
"""Share of its earlier size below which a squared bandwidth has collapsed."""

SAME = 1.01
"""Effective number of members below which all members are one function."""

STRAGGLING = 2.0
"""Step time of a rank, in medians of the others, from which the others wait for it."""

LONG = 10.0
"""Seconds of an epoch from which step times are worth comparing."""

_POINTS, _RELATIVE = 32, 1e-6

_EXPLODES = "The repulsive force explodes"
_BEST = "The members are those of epoch"


class Messages:
    """The messages of one session.

    Attributes:
        notes: all sentences so far, which the run stores.
        warned: those of them that were warnings.
    """

    def __init__(
        self,
        notes: list[str],
        processes: Processes,
        settings: Settings,
        warned: Sequence[str] = (),
    ) -> None:
        self.notes, self.processes, self.settings = notes, processes, settings
        self.warned = list(warned)
        notes.extend(warned)

    def restore(self, notes: Iterable[str], warned: Iterable[str]) -> None:
        """Continue with the sentences of a stored run, and those that are new."""
        for mine, stored in ((self.notes, notes), (self.warned, warned)):
            mine[:] = dict.fromkeys([*stored, *mine])

    def say(self, progress: Progress, sentence: str | None) -> None:
        """Store a sentence in the notes and show it, once per run."""
        if sentence is not None and sentence not in self.notes:
            self.notes.append(sentence)
            progress.say(sentence)

    def warn_of_divergence(self, trainer: Trainer) -> None:
        """Warn of members that diverged in this epoch; raises `DataError` if all have."""
        diverged = trainer.diverged
        for member, step in diverged.items():
            member += self.settings.options.frozen
            if is_new(f"Member {member} diverged (", self.notes):
                self._warn(f"Member {member} diverged at step {step} and is left out; {LESS}.")
        if len(diverged) == self.processes.trained(trainer):
            raise DataError(f"all members diverged by step {max(diverged.values())}; {LESS}")

    def warn_unhealthy(self, trainer: Trainer) -> None:
        """Warn of what the health checks found in this epoch."""
        for sentence in self.processes.gather_unique(health_warnings(trainer)):
            if is_new(sentence, self.notes):
                self._warn(sentence)

    def _warn(self, sentence: str, stacklevel: int = 7) -> None:
        """Store a sentence; the first process warns of it, at the call of `fit`."""
        self.notes.append(sentence)
        self.warned.append(sentence)
        if self.processes.first:
            warnings.warn(sentence, ShoalWarning, stacklevel=stacklevel)

    def end_if_waited(self, progress: Progress, trainer: Trainer) -> None:
        """End the run if the validation loss has not fallen for too long."""
        patience = self.settings.options.patience
        if trainer.ended is None and has_waited(trainer.rows, patience):
            folds = self.settings.options.folds is not None
            what = "out-of-fold {} of no member fell" if folds else "validation {} did not fall"
            trainer.ended = (
                f"The {what.format(_measure(trainer))} for {patience} epochs, "
                f"so the run ended after epoch {len(trainer.rows)}."
            )
            self.say(progress, trainer.ended)

    def conclude(self, progress: Progress, trainer: Trainer) -> None:
        """Say which members the run ends with, and warn of training that diverged."""
        self._tell_best(progress, trainer)
        diverged = divergence_sentence(trainer.rows)
        if diverged is not None:
            if any(note.startswith(_EXPLODES) for note in self.notes):
                self.say(progress, diverged)  # the cause has been told, with what to do about it
            elif diverged not in self.notes:
                self._warn(diverged, stacklevel=6)
            return
        repulsion = trainer.settings.method.repulsion
        cold = trainer.settings.options.temperature == 0
        if repulsion is None or cold or self.processes.ensemble.members == 1:
            return
        self.say(progress, balance_sentence(trainer.rows))

    def _tell_best(self, progress: Progress, trainer: Trainer) -> None:
        if trainer.best is None or trainer.best.epoch is None:
            return
        epoch = trainer.best.epoch
        each = best_epochs(trainer.rows)
        if each is not None:
            known = [epoch for epoch in each if epoch is not None]
            sentence = f"{_BEST}s {min(known)} to {max(known)}: every member has the weights with "
            sentence += f"the lowest {_measure(trainer)} on its fold."
        else:
            loss = held_out_loss(trainer.rows[epoch - 1])
            sentence = f"{_BEST} {epoch}, which has the lowest "
            sentence += f"validation {_measure(trainer)} ({loss:.4g})."
        self.notes[:] = [n for n in self.notes if n == sentence or not n.startswith(_BEST)]
        self.say(progress, sentence)


def _measure(trainer: Trainer) -> str:
    """The name of the measure that decides: a likelihood of the user's own has no NLL."""
    if trainer.settings.options.keep == "crps":
        return "CRPS"
    return "NLL" if "nll" in trainer.rows[-1]["validation"] else "loss"


def health_warnings(trainer: Any) -> list[str]:
    """What is wrong at the end of an epoch, one sentence each.

    Args:
        trainer: the trainer, after its history row of the epoch.
    """
    rows, settings = trainer.rows, trainer.settings
    sentences = []
    repels = settings.method.repulsion is not None and settings.options.temperature != 0
    if repels and trainer.ensemble.members > 1:
        # An annealed run begins with one force alone; the balance is judged at its end.
        if settings.annealing is None or trainer.done:
            sentences.append(push_sentence(rows))
        sentences.append(bandwidth_sentence(rows))
    if trainer.mesh is not None:
        sentences.append(_straggler(trainer.mesh, rows))
    epoch = len(rows)
    if trainer.done or epoch & (epoch - 1) == 0:  # at epochs 1, 2, 4, 8, ...: the cost stays small
        x, _ = trainer.batches.first()
        first = 0 if trainer.mesh is None else trainer.mesh.own.start
        for member in constant_members(trainer.mover.moving, x):
            number = member + settings.options.frozen + first
            sentences.append(
                f"Member {number} predicts the same for every input (epoch {epoch}); lower the "
                f"learning rate or use an activation without dead units, such as GELU."
            )
    return [sentence for sentence in sentences if sentence is not None]


def is_new(sentence: str, notes: Iterable[str]) -> bool:
    """Whether no note has the same subject, which is the text before the first bracket."""
    subject = sentence.partition(" (")[0]
    return not any(note.startswith(subject) for note in notes)


def push_sentence(rows: Sequence[Row]) -> str | None:
    """One sentence if repulsion drives the loss up: push > 10 drive, and the loss rises.

    The loss rises if it is a nat above its smallest value so far, and twice that value.
    """
    last, losses = rows[-1], [row.get("loss") for row in rows]
    known = [loss for loss in (rows[0].get("initial_loss"), *losses[:-1]) if loss is not None]
    ratio, loss = last.get("ratio"), losses[-1]
    strong = ratio is not None and ratio > DOMINANT
    if not strong or not known or (loss is not None and not _far_above(loss, min(known))):
        return None
    now = "is not finite" if loss is None else f"rose from {min(known):.3g} to {loss:.3g} nats"
    return (
        f"{_EXPLODES} (epoch {len(rows)}): it is {ratio:.3g} times the driving "
        f"force, and the loss {now}; lower strength (strength='auto' chooses it) or temperature, "
        f"or set clip."
    )


def _far_above(loss: float, least: float) -> bool:
    return loss > least + max(abs(least), 1.0)


def bandwidth_sentence(rows: Sequence[Row]) -> str | None:
    """One sentence if members or their distances vanish under the kernel; None otherwise.

    The squared bandwidth of the median heuristic follows the squared distances of members. A fixed
    bandwidth stays, and all members become one under the kernel.
    """
    if len(rows) < 2 or (rows[-1].get("alive") or 0) < 2:
        return None
    h2 = [row["h2"] for row in rows if row.get("h2") is not None]
    effective = rows[-1].get("effective")
    what = None
    if len(h2) > 1 and h2[-1] < COLLAPSED * max(h2):
        what = f"h² fell from {max(h2):.3g} to {h2[-1]:.3g}"
    elif effective is not None and effective < SAME:
        what = f"the effective number of members is {effective:.3g}"
    return what and (
        f"The bandwidth collapsed (epoch {len(rows)}): {what}, so members are one function; "
        f"type strength='auto', lower the learning rate, or start members from different seeds."
    )


@torch.no_grad()
def constant_members(ensemble: Ensemble, x: Inputs) -> list[int]:
    """Finite members whose outputs are the same for the first inputs, though the inputs differ."""
    if isinstance(x, Opaque) or len(x) < 2:
        return []
    few = x[:_POINTS].to(ensemble.device)
    if not any(_differ(tensor) for tensor in tensors_in(few)):
        return []
    if not isinstance(few, Tensor) or few.is_floating_point():
        few = few.to(ensemble.dtype)
    device = ensemble.device
    generators = [device] if device.type == "cuda" else []
    with warnings.catch_warnings(), _evaluating(ensemble), torch.random.fork_rng(generators):
        warnings.simplefilter("ignore")
        try:
            outputs = ensemble(few).detach().double()
        except Exception:  # networks that take whole batches alone, such as cached features
            return []
    span = (outputs - outputs[:, :1]).abs().flatten(1).amax(1)
    size = outputs.abs().flatten(1).amax(1)
    constant = (span <= _RELATIVE * size) & outputs.flatten(1).isfinite().all(1)
    return (constant & ensemble.alive.to(constant.device)).nonzero().flatten().tolist()


@contextmanager
def _evaluating(ensemble: Ensemble) -> Iterator[None]:
    """Evaluation mode in the block; then every layer has its own mode and statistics again.

    An ensemble can share its networks with another one, which has set their mode since. Networks
    behind cached features were traced for training: they update statistics in every mode.
    """
    kept = {name: tensor.clone() for name, tensor in ensemble.buffers.items()}
    modes = [(m, m.training) for group in ensemble.groups for m in group.skeleton.modules()]
    was_training = ensemble.training
    try:
        ensemble.train(False)
        yield
    finally:
        ensemble.training = was_training
        for module, mode in modes:
            module.training = mode
        for name, tensor in ensemble.buffers.items():
            tensor.copy_(kept[name])


def _differ(tensor: Tensor) -> bool:
    return len(tensor) > 1 and bool((tensor != tensor[:1]).any())


def _straggler(mesh: Mesh, rows: Sequence[Row]) -> str | None:
    """The sentence about a rank that holds up the others; every process must ask."""
    steps = rows[-1]["step"] - (rows[-2]["step"] if len(rows) > 1 else 0)
    working = max(rows[-1]["seconds"] - mesh.waited, 0.0)
    mesh.waited = 0.0
    seconds = [float(text) for text in mesh.texts(repr(working / steps))]
    return straggler_sentence(seconds) if rows[-1]["seconds"] > LONG else None


def straggler_sentence(seconds: Sequence[float]) -> str | None:
    """One sentence if a rank holds up the others; None otherwise.

    Args:
        seconds: time of a step on every rank, without waiting for other ranks.

    >>> straggler_sentence([0.1, 0.11, 0.5]).partition(";")[0]
    'Rank 2 straggles (0.5 s per step): this is 4.8 times the median of the others'
    """
    *others, most = sorted(seconds)
    usual = median(others) if others else most
    if not most > STRAGGLING * usual:
        return None
    return (
        f"Rank {list(seconds).index(most)} straggles ({most:.3g} s per step): this is "
        f"{most / usual:.2g} times the median of the others; look at its device, its other "
        f"processes and its data loading."
    )


class Watchdog:
    """Reports a batch that does not come for a while, from a thread, and goes on waiting.

    Args:
        seconds: how long a batch may take.
        report: called in the thread with one sentence, once per stall.
    """

    def __init__(self, seconds: float, report: Callable[[str], None]) -> None:
        self.seconds, self.report = seconds, report
        self._waiting: float | None = None
        self._batches = 0
        self._change = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._watch, name="shoal-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._ended = True
            self._change.notify()
        self._thread.join()

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches, watched while they are read."""
        source = iter(batches)
        while True:
            self._wait(time.monotonic())
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                self._wait(None)
            self._batches += 1
            yield batch

    def _wait(self, since: float | None) -> None:
        # Without waking the thread: it looks after `seconds`, and again when time is left.
        self._waiting = since

    def _watch(self) -> None:
        reported, left = None, self.seconds
        while True:
            with self._change:
                if self._ended or self._change.wait_for(lambda: self._ended, left):
                    return
            since = self._waiting
            passed = 0.0 if since is None else time.monotonic() - since
            left = max(self.seconds - passed, self.seconds / 10)
            if since is not None and since != reported and passed >= self.seconds:
                reported = since
                self.report(
                    f"The data loader stalls (no batch for {passed:.3g} s after batch "
                    f"{self._batches}); look at its workers, its disk or its network, and try "
                    f"num_workers=0."
                )


def watching(
    trainer: Any, seconds: float, notes: list[str], say: Callable[[str], None]
) -> AbstractContextManager[Any]:
    """A block in which the batches of a loader are watched; arrays cannot stall.

    Args:
        trainer: its `waiting` reads the batches.
        seconds: how long a batch may take; infinity watches nothing.
        notes: gets the sentence, once per run.
        say: shows the sentence at once.
    """
    if not isinstance(trainer.batches, LoaderBatches) or seconds == float("inf"):
        return nullcontext()

    def report(sentence: str) -> None:
        say(sentence)
        if is_new(sentence, notes):
            notes.append(sentence)
            with suppress(ShoalWarning):  # a filter that raises cannot stop the waiting thread
                warnings.warn(sentence, ShoalWarning, stacklevel=2)

    dog = Watchdog(max(seconds, 1e-3), report)
    trainer.waiting = dog.watch
    return dog
