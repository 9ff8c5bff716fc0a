"""Validation: data that never train, on which the ensemble is measured after every epoch.

The measures are those of the ensemble's prediction, not means over members. The epoch with the
lowest validation NLL is the best one: `keep="best"` returns its members, and `patience` ends the
run when later epochs are not better. With folds, every member is measured on its own fold and has a
best epoch of its own.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.core.storage.checkpoints import Checkpoint
from shoal.core.structure import Inputs, parted
from shoal.core.types import Tree
from shoal.data.batches.sources import ArrayBatches, LoaderBatches, batches_of
from shoal.data.dataset import Dataset, Split, held_out
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.processes.mesh import Mesh
from shoal.engine.resources.graph import captured_forward
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.prediction.metrics import mean_scores
from shoal.prediction.predictive import Predictive
from shoal.training.folder.history import best_epoch, best_epochs
from shoal.training.folder.run_folder import BEST
from shoal.training.options.options import Options

__all__ = [
    "BestMembers",
    "Data",
    "Validation",
    "evaluating",
    "has_waited",
    "keeps_best",
    "validation_batches",
]

Data = ArrayBatches | LoaderBatches

_EACH = f"{BEST}_likelihoods"
"""What the likelihood had learned by the best epoch of each member, in a checkpoint."""


def validation_batches(
    options: Options,
    batches: Data,
    ensemble: Ensemble,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Data, Data | None]:
    """The batches that train, and those of the validation data; None without any."""
    validation: Any = options.validation
    if validation is None:
        return batches, None
    if isinstance(validation, float):
        if isinstance(batches, LoaderBatches):
            raise ConfigError(
                f"validation={validation:g} divides arrays, and a loader came; "
                f"give validation=(x, y) or a loader of validation data"
            )
        rows = [each.to(batches.x.device) for each in held_out(batches.n, validation, options.seed)]
        trains, held = (replace(batches, x=batches.x[r], y=batches.y[r]) for r in rows)
        return trains, held
    if isinstance(validation, Dataset):
        if validation.validation is None:
            raise DataError(
                f"dataset '{validation.name}' has no validation split; give validation=0.1, which "
                f"holds out a tenth of the training data"
            )
        validation = validation.validation
    held = batches_of(
        validation,
        options.batch_size,
        options.seed,
        device,
        dtype,
        whole=ensemble.takes_whole,
    )
    return batches, held


class Validation:
    """Validation data, and how the ensemble is measured on them.

    Attributes:
        batches: the data, in batches.
        mesh: the processes with the other members; None for one process.
        frozen: number of frozen members, which every process has.
        captures: whether forward passes may be captured on a GPU, and replayed in later epochs.
    """

    def __init__(
        self, batches: Data, mesh: Mesh | None = None, frozen: int = 0, captures: bool = False
    ) -> None:
        self.batches, self.mesh, self.frozen, self.captures = batches, mesh, frozen, captures

    def measure(
        self, ensemble: Ensemble, likelihood: Likelihood, runner: MemberRunner | None = None
    ) -> dict[str, float | None]:
        """NLL (or loss), and accuracy or RMSE, of the ensemble; None for what is not finite.

        With several processes, all must call this.

        Args:
            ensemble: the members of this process.
            likelihood: with its learned numbers.
            runner: how members run; None for the default.
        """
        with torch.no_grad(), evaluating(ensemble):
            scores = mean_scores(self.predictions(ensemble, likelihood, runner))
        if self.mesh is not None:  # rounding must not let processes disagree about the best epoch
            scores = json.loads(self.mesh.from_first(json.dumps(scores)))
        return {name: v if math.isfinite(v) else None for name, v in scores.items()}

    def predictions(
        self, ensemble: Ensemble, likelihood: Likelihood, runner: MemberRunner | None = None
    ) -> Iterator[tuple[Predictive, Any, Any]]:
        """Prediction of the finite members, targets and weights of each batch."""
        captures = self.captures and runner is None and ensemble.device.type == "cuda"
        call = lambda x: ensemble(x, runner)  # noqa: E731
        points = self.batches.n
        passes = captured_forward(ensemble, points) if captures else nullcontext(call)
        with passes as forward:
            for x, y in self._batches():
                outputs, sound = self._outputs(ensemble, forward(x))
                if bool(sound.any()):
                    targets, weight = parted(y)
                    members = outputs if bool(sound.all()) else outputs[sound]
                    yield Predictive(members, likelihood), targets, weight

    def _batches(self) -> Iterator[tuple[Inputs, Any]]:
        batches = self.batches
        if isinstance(batches, LoaderBatches):
            yield from batches.sweep()
        else:
            yield from Split(batches.x, batches.y).batches(batches.batch_size)

    def _outputs(self, ensemble: Ensemble, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all members [M, B, ...], and which of them are finite [M]."""
        outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
        sound = ensemble.alive & (outputs < torch.inf).flatten(1).all(-1)
        if self.mesh is None:
            return outputs, sound
        first = self.frozen
        others, theirs = self.mesh.gather(outputs[first:], sound[first:], "validation")
        return torch.cat([outputs[:first], others]), torch.cat([sound[:first], theirs])


@contextmanager
def evaluating(ensemble: Ensemble) -> Iterator[None]:
    """A block in which members are in evaluation mode and draw from generators of their own."""
    training = ensemble.training
    ensemble.train(False)
    on_gpu = ensemble.device.type == "cuda"
    try:
        with torch.random.fork_rng(devices=[ensemble.device] if on_gpu else []):
            yield
    finally:
        ensemble.train(training)


def keeps_best(options: Options) -> bool:
    """Whether the run ends with the members of its best epoch."""
    if options.folds is not None:
        return options.keep != "last"
    if options.keep == "crps":
        raise ConfigError('keep="crps" is for members with folds of their own; add folds=8')
    if options.validation is None:
        for name in ("patience", "keep"):
            if getattr(options, name) not in (None, "last"):
                raise ConfigError(
                    f"{name} needs validation data; give validation=0.1, which holds out a tenth "
                    f"of the training data"
                )
    return options.keep == "best" or (options.keep is None and options.patience is not None)


def has_waited(rows: Sequence[dict[str, Any]], patience: int | None) -> bool:
    """Whether `patience` epochs have passed without a lower validation NLL, of any member."""
    if patience is None or not rows:
        return False
    each = best_epochs(rows)
    best = best_epoch(rows) if each is None else max((e for e in each if e), default=0)
    return rows[-1]["epoch"] - (best or 0) >= patience


class BestMembers:
    """A copy of the members and the likelihood of the best epoch so far.

    Attributes:
        epoch: the best epoch; None before the first.
        parts: its tensors, as a checkpoint stores them.
    """

    def __init__(self) -> None:
        self.epoch: int | None = None
        self.parts: dict[str, dict[str, Tensor]] = {}

    def keep(self, epoch: int, ensemble: Ensemble, likelihood: Likelihood) -> None:
        """Copy the present state, into the memory of the former copy if there is one."""
        state = {BEST: ensemble.changing_state, f"{BEST}_likelihood": likelihood.state}
        for part, tensors in state.items():
            copies = self.parts.setdefault(part, {})
            for name, tensor in tensors.items():
                if name in copies:
                    copies[name].copy_(tensor.detach())
                else:
                    copies[name] = self._copied(tensor.detach(), ensemble)
        self.parts = {part: tensors for part, tensors in self.parts.items() if tensors}
        self.epoch = epoch

    def keep_some(
        self,
        epoch: int,
        ensemble: Ensemble,
        likelihood: Likelihood,
        better: Tensor,
        mine: Tensor,
    ) -> None:
        """Copy the present state of some members; the first time, of all.

        The likelihood that members share becomes the mean over their best epochs.

        Args:
            epoch: the present epoch.
            ensemble: the members of this process.
            likelihood: with its learned numbers.
            better: which trained members to copy, of all processes [M].
            mine: which members of this process to copy.
        """
        if BEST not in self.parts:
            self.keep(epoch, ensemble, likelihood)
        state, copies = ensemble.changing_state, self.parts[BEST]
        for name, span in ensemble.member_spans.items():
            rows = mine[span].nonzero().flatten()
            copies[name][rows] = state[name].detach()[rows.to(state[name].device)].to(copies[name])
        self.epoch = epoch
        if likelihood.state:
            each = self.parts.setdefault(_EACH, {})
            for name, tensor in likelihood.state.items():
                now = tensor.detach().cpu().expand(len(better), *tensor.shape)
                each.setdefault(name, now.clone())[better] = now[better]
            mean = {n: t[0] + (t - t[0]).mean(0) for n, t in each.items()}  # exact if all agree
            self.parts[f"{BEST}_likelihood"] = mean

    def _copied(self, tensor: Tensor, ensemble: Ensemble) -> Tensor:
        if ensemble.offload is not None and tensor.ndim and not tensor.is_cuda:
            return ensemble.offload.stored(tensor)
        return tensor.to("cpu", copy=True)

    @property
    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {} if self.epoch is None else {BEST: {"epoch": self.epoch}}

    @property
    def ensemble(self) -> Tree:
        """The members of the best epoch."""
        return self.parts[BEST]

    @property
    def likelihood(self) -> Tree:
        """What the likelihood had learned by the best epoch."""
        return self.parts.get(f"{BEST}_likelihood", {})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue with the copy of a checkpoint, if it has one."""
        if BEST in checkpoint.state and BEST in checkpoint.parts:
            self.epoch = checkpoint.state[BEST]["epoch"]
            names = BEST, f"{BEST}_likelihood", _EACH
            self.parts = {n: dict(t) for n, t in checkpoint.parts.items() if n in names}
