"""`predict`: predictions of trained members, in batches and without gradients."""

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.devices import usable_device
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.structure import Inputs
from shoal.data.batches import checked_size
from shoal.data.sources import input_batches
from shoal.engine.plan import default_runner
from shoal.engine.precision import calculating_in
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Likelihood
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = ["member_outputs", "predict"]


def predict(
    source: Any,
    x: Any,
    *,
    batch_size: int = 1024,
    device: str | torch.device | None = None,
    likelihood: Likelihood | None = None,
    weights: ArrayLike | None = None,
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
    precision = (getattr(source, "config", None) or {}).get("precision")
    trained = (getattr(source, "provenance", None) or {}).get("input_range")
    members = member_outputs(ensemble, x, batch_size, device, keep, precision, trained)
    sound = _sound(members, ensemble.alive)
    return Predictive(members[sound], meaning, _of_sound(weights, sound))


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
    with torch.no_grad(), _ready(ensemble, device, keep, precision) as call:
        whole = getattr(ensemble, "takes_whole", None)
        takes = getattr(ensemble, "takes_inputs", lambda count: False)
        batches = input_batches(x, batch_size, None, ensemble.dtype, whole, trained, takes)
        outputs = [call(batch) for batch in batches]
    if not outputs:
        raise DataError("there is nothing to predict: x has no inputs")
    if len({each.shape[2:] for each in outputs}) > 1:
        raise DataError(
            "the batches give outputs of different shapes, such as sequences of different lengths; "
            "pad the inputs to one length, or predict one batch at a time"
        )
    return torch.cat(outputs, dim=1)


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
    ensemble: Any,
    device: str | torch.device | None,
    keep: bool,
    precision: str | None,
) -> Iterator[Callable[[Inputs], Tensor]]:
    """The ensemble in evaluation mode, as a function of one batch; restores its mode."""
    there = torch.device(ensemble.device) if device is None else usable_device(device)
    # moving in place would detach the tensors from an active optimiser
    placed = ensemble if there == ensemble.device else copy.deepcopy(ensemble).to(there)
    training = placed.training
    on_gpu = _on_gpu(placed, there)
    how: dict[str, Any] = (
        {"mapping": default_runner(placed.groups, placed.device)} if on_gpu else {}
    )

    def call(x: Inputs) -> Tensor:
        outputs = placed(x.to(there), **how)
        # metrics sum in double precision, which only CUDA devices have
        outputs = outputs if keep and there.type == "cuda" else outputs.cpu()
        return outputs if outputs.dtype == torch.float64 else outputs.float()

    placed.train(False)
    try:
        with calculating_in(precision, placed) if on_gpu else nullcontext():
            yield call
    finally:
        placed.train(training)


def _on_gpu(ensemble: Any, device: torch.device) -> bool:
    return device.type == "cuda" and isinstance(ensemble, Ensemble)


def _sound(members: Tensor, alive: Tensor) -> Tensor:
    """Which members are finite [M]: weights and outputs; a logit of -inf is allowed."""
    sound = alive.to(members.device) & (members < torch.inf).flatten(1).all(-1)
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
            stacklevel=3,
        )
    return sound
