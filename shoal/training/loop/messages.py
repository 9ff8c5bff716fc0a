"""What a run says while it trains: notes for its folder, warnings, and lines of progress."""

import warnings

from shoal.core.display.progress import Progress
from shoal.core.errors import DataError, ShoalWarning
from shoal.training.loop.several_processes import Processes
from shoal.training.loop.trainer import Trainer
from shoal.training.loop.validation import has_waited
from shoal.training.mover.health import findings, is_new
from shoal.training.mover.history import LESS, balance_sentence, divergence_sentence, held_out_loss
from shoal.training.options.settings import Settings

__all__ = ["Messages"]

_BEST = "The members are those of epoch "


class Messages:
    """The messages of one session.

    Attributes:
        notes: all sentences so far, which the run stores.
    """

    def __init__(self, notes: list[str], processes: Processes, settings: Settings) -> None:
        self.notes, self.processes, self.settings = notes, processes, settings

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
        for sentence in self.processes.gather_unique(findings(trainer)):
            if is_new(sentence, self.notes):
                self._warn(sentence)

    def _warn(self, sentence: str) -> None:
        """Store a sentence in the notes; the first process warns of it, at the call of `fit`."""
        self.notes.append(sentence)
        if self.processes.first:
            warnings.warn(sentence, ShoalWarning, stacklevel=7)

    def end_if_waited(self, progress: Progress, trainer: Trainer) -> None:
        """End the run if the validation loss has not fallen for too long."""
        patience = self.settings.options.patience
        if trainer.ended is None and has_waited(trainer.rows, patience):
            trainer.ended = (
                f"The validation {_measure(trainer)} did not fall for {patience} epochs, "
                f"so the run ended after epoch {len(trainer.rows)}."
            )
            self.say(progress, trainer.ended)

    def conclude(self, progress: Progress, trainer: Trainer) -> None:
        """Say which members the run ends with, and whether training diverged."""
        self._tell_best(progress, trainer)
        diverged = divergence_sentence(trainer.rows)
        if diverged is not None:
            self.say(progress, diverged)
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
        loss = held_out_loss(trainer.rows[epoch - 1])
        sentence = f"{_BEST}{epoch}, which has the lowest "
        sentence += f"validation {_measure(trainer)} ({loss:.4g})."
        self.notes[:] = [n for n in self.notes if n == sentence or not n.startswith(_BEST)]
        self.say(progress, sentence)


def _measure(trainer: Trainer) -> str:
    """The name of the measure that decides: a likelihood of the user's own has no NLL."""
    return "NLL" if "nll" in trainer.rows[-1]["validation"] else "loss"
