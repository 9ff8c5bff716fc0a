"""Predictions from trained members: in batches, without gradients, whatever trained them."""

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.devices import usable_device
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.data.batches import checked_size
from shoal.data.dataset import Split
from shoal.data.sources import input_batches
from shoal.engine.plan import default_runner
from shoal.engine.precision import calculating_in
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Likelihood
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = ["member_outputs", "predict"]


def predict(
    source: Any,
    x: Tensor | np.ndarray | Split | Iterable[Any],
    *,
    batch_size: int = 1024,
    device: str | torch.device | None = None,
    likelihood: Likelihood | None = None,
    weights: ArrayLike | None = None,
    load: Callable[[Path], Any] | None = None,
    keep: bool = False,
) -> Predictive:
    """What the members of `source` say about the inputs `x`.

    Members that training gave up on, and members whose outputs are not numbers, are left out with
    a warning that names them. The ensemble comes back in the mode and on the device it was in.
    On a GPU a run calculates in the precision it was trained in.

    Args:
        source: a run (anything with `ensemble` and `likelihood`) or an ensemble.
        x: an array or tensor [B, ...], a `Split`, a pair (x, y), a torch `Dataset` of points x or
            (x, y), or a loader or other iterable of batches x or (x, y).
        batch_size: how many inputs go through the members at once; a loader brings its own.
        device: where to compute; None stays where the ensemble is.
        likelihood: what the outputs mean; None takes the run's, or `Categorical` for an ensemble.
        weights: of all members [M], those that are left out included; None weighs all alike.
        load: how to open a run folder when `source` is a path.
        keep: leave the prediction on the GPU that made it, where its metrics are computed sooner.

    Returns:
        The prediction, its members on the CPU in single or double precision.
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
    """Outputs of every member [M, B, C], dead ones included, without gradients; see `predict`.

    Inputs are held against `trained`, the range of those that the members were trained on.
    """
    with torch.no_grad(), _ready(ensemble, device, keep, precision) as call:
        whole = getattr(ensemble, "takes_whole", None)
        batches = input_batches(x, batch_size, None, ensemble.dtype, whole, trained)
        outputs = [call(batch) for batch in batches]
    if not outputs:
        raise DataError("there is nothing to predict: x holds no inputs")
    return torch.cat(outputs, dim=1)


def _of_sound(weights: ArrayLike | None, sound: Tensor) -> Tensor | None:
    """The weights of the members that take part, as shares of what they have together."""
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
        raise DataError("all the weight lies on members that are no longer alive; weigh others")
    return kept / kept.sum()


def _opened(source: Any, load: Callable[[Path], Any] | None) -> Any:
    if not isinstance(source, str | os.PathLike):
        return source
    if load is None:
        raise ConfigError(
            f"the folder '{source}' has to be opened before predicting; "
            f"type: predict(shoal.load('{source}'), x)"
        )
    return load(Path(source))


@contextmanager
def _ready(
    ensemble: Any,
    device: str | torch.device | None,
    keep: bool,
    precision: str | None,
) -> Iterator[Callable[[Tensor], Tensor]]:
    """The ensemble in evaluation mode, as a function of one batch; its mode comes back after."""
    there = torch.device(ensemble.device) if device is None else usable_device(device)
    # moving in place would cut the tensors off from an optimiser that is still at work
    placed = ensemble if there == ensemble.device else copy.deepcopy(ensemble).to(there)
    training = placed.training
    on_gpu = _on_gpu(placed, there)
    how: dict[str, Any] = (
        {"mapping": default_runner(placed.groups, placed.device)} if on_gpu else {}
    )

    def call(x: Tensor) -> Tensor:
        outputs = placed(x.to(there), **how)
        # metrics sum in double precision, which only this kind of GPU has
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
    """Which members to keep [M]: alive, and with outputs that are numbers (a -inf logit is one)."""
    sound = alive.to(members.device) & (members < torch.inf).flatten(1).all(-1)
    if not sound.any():
        raise DataError(
            f"none of the {len(sound)} members is alive, so there is nothing to predict with; "
            f"train again with a smaller learning rate"
        )
    if not sound.all():
        lost = ", ".join(str(i) for i in (~sound).nonzero().flatten().tolist())
        warnings.warn(
            f"left out of the prediction, no longer alive: members {lost} of {len(sound)}",
            ShoalWarning,
            stacklevel=3,
        )
    return sound
