"""`predict`: predictions of trained members, in batches and without gradients."""

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.core.devices import usable_device
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.structure import Inputs
from shoal.data.batches.array_batches import checked_size
from shoal.data.batches.sources import input_batches, input_count
from shoal.engine.members.precision import calculating_in
from shoal.engine.resources.graph import CapturedForward
from shoal.engine.resources.transfer import through_gpu
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Likelihood
from shoal.prediction.collected import CollectedOutputs, SoundMembers
from shoal.prediction.prediction_file import checked_out, read_prediction, writing
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = ["OutputBatches", "OutputStore", "collected", "member_outputs", "predict", "training_of"]


def predict(
    source: Any,
    x: Any,
    *,
    batch_size: int = 1024,
    device: str | torch.device | None = None,
    likelihood: Likelihood | None = None,
    weights: ArrayLike | None = None,
    out: str | os.PathLike[str] | None = None,
    load: Callable[[Path], Any] | None = None,
    keep: bool = False,
) -> Predictive:
    """Predict the targets of inputs `x` with the members of `source`.

    Diverged members are left out, and a warning names them. The ensemble keeps its mode and its
    device. On a GPU a run predicts in the precision of its training.

    Args:
        source: a run (anything with `ensemble` and `likelihood`) or an ensemble.
        x: an array or tensor [B, ...], a dict, tuple or object of inputs as the network takes them,
            a `Split`, a pair (x, y), a torch `Dataset` of points x or (x, y), or a loader or other
            iterable of batches.
        batch_size: inputs per forward pass; a loader has its own batch size.
        device: device of the computation; None for the ensemble's device.
        likelihood: distribution of the targets, given the outputs. None takes the run's likelihood,
            or `Categorical` for an ensemble.
        weights: weights of all members [M], including diverged members; None for equal weights.
        out: file that ends in .safetensors, to which the outputs are written batch by batch. The
            prediction then reads them from the file, and may be larger than the memory. The file
            appears when it is complete; `Predictive.load` opens it again.
        load: function that opens a run folder, if `source` is a path.
        keep: leave the prediction on its GPU, where metrics are faster.

    Returns:
        The prediction; its tensors are on the CPU, in single or double precision.
    """
    checked_size(batch_size)
    source = _opened(source, load)
    ensemble = getattr(source, "ensemble", source)
    if not callable(ensemble) or not hasattr(ensemble, "alive"):
        raise ConfigError(
            f"predict needs an Ensemble, a Run or a run folder, not {type(source).__name__}"
        )
    meaning: Likelihood = likelihood or getattr(source, "likelihood", None) or Categorical()
    path, keep = (None, keep) if out is None else (checked_out(out), False)
    batches = OutputBatches(ensemble, x, batch_size, device, keep, *training_of(source))
    return collected(batches, ensemble.alive, meaning, weights, path)


def collected(
    batches: "OutputBatches",
    alive: Tensor,
    likelihood: Likelihood,
    weights: ArrayLike | None = None,
    path: Path | None = None,
) -> Predictive:
    """The prediction from batches of outputs, in memory or in a file; see `predict`."""
    if path is None:
        outputs = CollectedOutputs(batches.count)
        sound = _sound(batches.into(outputs), alive)
        kept = sound.nonzero().flatten().tolist()
        return Predictive(outputs.finish(kept), likelihood, _of_sound(weights, sound))
    with writing(path, likelihood, batches.count) as file:
        sound = _sound(batches.into(file), alive)
        file.finish(sound.nonzero().flatten().tolist(), _of_sound(weights, sound))
    return Predictive(*read_prediction(path, likelihood))


def member_outputs(
    ensemble: Any,
    x: Any,
    batch_size: int = 1024,
    device: str | torch.device | None = None,
    keep: bool = False,
    precision: str | None = None,
    trained: Sequence[float] | None = None,
) -> Tensor:
    """Outputs of every member [M, B, C], diverged members included; see `predict`.

    Inputs are checked against `trained`, the range of the training inputs.
    """
    batches = OutputBatches(ensemble, x, batch_size, device, keep, precision, trained)
    outputs = CollectedOutputs(batches.count)
    return outputs.finish(range(len(batches.into(outputs))))


class OutputStore(Protocol):
    """What takes outputs batch by batch: memory, a file, or another process."""

    def add(self, outputs: Tensor) -> None:
        """Take the outputs of the next batch [M, B, ..., C]."""
        ...


class OutputBatches:
    """The outputs of an ensemble, batch by batch; the arguments are those of `member_outputs`."""

    def __init__(
        self,
        ensemble: Any,
        x: Any,
        batch_size: int,
        device: str | torch.device | None,
        keep: bool,
        precision: str | None,
        trained: Sequence[float] | None,
    ) -> None:
        self.ensemble, self.x, self.size = ensemble, x, batch_size
        self.device, self.keep = device, keep
        self.precision, self.trained = precision, trained
        self.takes = getattr(ensemble, "takes_inputs", lambda count: False)
        self.count = input_count(x, self.takes)

    def into(self, store: OutputStore) -> Tensor:
        """Give all outputs to a store; returns which members have finite outputs [M]."""
        found = SoundMembers()
        with torch.no_grad(), _ready(self.ensemble, self.device, self.precision) as placed:
            for outputs in self._computed(placed, found):
                store.add(outputs)
        if found.sound is None:
            raise DataError("there is nothing to predict: x has no inputs")
        return found.sound

    def _computed(self, placed: Any, found: SoundMembers) -> Iterator[Tensor]:
        whole, there = getattr(placed, "takes_whole", None), torch.device(placed.device)
        batches = input_batches(
            self.x, self.size, None, placed.dtype, whole, self.trained, self.takes
        )
        on_gpu = there.type == "cuda"
        # blocks of offloaded members come through the host, which no captured pass contains
        captures = on_gpu and getattr(placed, "offload", None) is None
        forward = CapturedForward(placed, self.count) if captures else placed

        def compute(x: Inputs) -> Tensor:
            outputs = forward(x)
            found.see(outputs)
            return outputs

        if on_gpu and not self.keep:
            yield from through_gpu(batches, compute, there)
            return
        for batch in batches:
            outputs = compute(batch.to(there))
            # metrics sum in double precision, which only CUDA devices have
            yield outputs if on_gpu else outputs.cpu()


def _of_sound(weights: ArrayLike | None, sound: Tensor) -> Tensor | None:
    """The weights of the finite members, rescaled to sum 1."""
    if weights is None:
        return None
    given, sound = torch.as_tensor(weights, dtype=torch.float64), sound.cpu()
    if given.shape != sound.shape:
        raise DataError(
            f"weights must be one number for each of the {len(sound)} members, "
            f"not of shape {list(given.shape)}"
        )
    if bool(sound.all()):
        return given
    kept = given[sound]
    if not kept.sum() > 0:
        raise DataError("only diverged members have weight; give weight to finite members")
    return kept / kept.sum()


def training_of(source: Any) -> tuple[str | None, Sequence[float] | None]:
    """Precision of a run's training, and the range of its inputs; None for an ensemble."""
    precision = (getattr(source, "config", None) or {}).get("precision")
    return precision, (getattr(source, "provenance", None) or {}).get("input_range")


def _opened(source: Any, load: Callable[[Path], Any] | None) -> Any:
    if not isinstance(source, str | os.PathLike):
        return source
    if load is None:
        raise ConfigError(
            f"predict cannot open the folder '{source}'; type: predict(shoal.load('{source}'), x)"
        )
    return load(Path(source))


@contextmanager
def _ready(
    ensemble: Any, device: str | torch.device | None, precision: str | None
) -> Iterator[Any]:
    """The ensemble in evaluation mode on a device; restores its mode."""
    there = torch.device(ensemble.device) if device is None else usable_device(device)
    # moving in place would detach the tensors from an active optimiser
    placed = ensemble if there == ensemble.device else copy.deepcopy(ensemble).to(there)
    training = placed.training
    placed.train(False)
    try:
        with calculating_in(precision, placed) if _on_gpu(placed, there) else nullcontext():
            yield placed
    finally:
        placed.train(training)


def _on_gpu(ensemble: Any, device: torch.device) -> bool:
    return device.type == "cuda" and isinstance(ensemble, Ensemble)


def _sound(finite: Tensor, alive: Tensor) -> Tensor:
    """Which members are sound [M]: finite weights and outputs; a warning names the others."""
    sound = alive.to(finite.device) & finite
    if not sound.any():
        raise DataError(
            f"all {len(sound)} members diverged, so there is no prediction; "
            f"train again with a smaller learning rate"
        )
    if not sound.all():
        lost = ", ".join(str(i) for i in (~sound).nonzero().flatten().tolist())
        warnings.warn(
            f"left out of the prediction, diverged: members {lost} of {len(sound)}",
            ShoalWarning,
            stacklevel=4,
        )
    return sound
