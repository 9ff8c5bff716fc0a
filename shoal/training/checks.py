"""What can be found wrong before anything is changed or written."""

from typing import Any

import torch

from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import nearest
from shoal.data.arrays import check_labels
from shoal.data.sources import ArrayBatches, LoaderBatches
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood
from shoal.inference.streams import open_queues

__all__ = ["PRECISIONS", "check_targets", "default_likelihood", "destination"]

PRECISIONS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "tf32": torch.float32,
    "bfloat16": torch.float32,
}
"""Type of the weights; in the last of them the networks alone calculate in lower precision."""


def destination(
    ensemble: Any, device: torch.device | str | None, precision: str | None
) -> tuple[torch.device, torch.dtype]:
    """Where and in which type the members are to be trained."""
    if not isinstance(ensemble, Ensemble):
        raise ConfigError(
            f"fit trains an Ensemble, not a {type(ensemble).__name__}; "
            f"type: Ensemble.init(build, members=5)"
        )
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(
            f"there is no precision '{precision}'; {nearest(str(precision), PRECISIONS)}"
        )
    dtype = ensemble.dtype if precision is None else PRECISIONS[precision]
    return ensemble.device if device is None else _usable(device), dtype


def default_likelihood(ensemble: Ensemble, batches: ArrayBatches | LoaderBatches) -> Likelihood:
    """Classes for whole numbers; for real ones a learned noise if there are outputs for it."""
    outputs, y = _outputs(ensemble, batches)
    if not y.is_floating_point():
        return Categorical()
    columns = 1 if y.ndim == 1 else y.shape[-1]
    return HeteroscedasticGaussian() if outputs == 2 * columns else Gaussian()


def check_targets(
    ensemble: Ensemble, likelihood: Likelihood, batches: ArrayBatches | LoaderBatches
) -> None:
    """The outputs of the networks must be what the likelihood of these targets needs."""
    outputs, y = _outputs(ensemble, batches)
    _check_last_batch(ensemble, batches)
    if likelihood.task == "classification":
        if isinstance(batches, ArrayBatches):
            check_labels(batches.y, outputs)
            return
        batches.classes = outputs  # from here on every batch is checked when it is read
        next(iter(batches.batches(0)))
        return
    if not y.is_floating_point():
        raise DataError("regression needs real targets; convert the whole numbers to float")
    columns = 1 if y.ndim == 1 else y.shape[-1]
    if outputs != likelihood.width(columns):
        raise DataError(
            f"targets have {columns} columns, for which the likelihood needs "
            f"{likelihood.width(columns)} outputs, but the network has {outputs}"
        )


def _usable(device: torch.device | str) -> torch.device:
    open_queues(device)
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the device '{device}' cannot be used: {reason}; type device='cpu'"
        ) from error


@torch.no_grad()
def _outputs(ensemble: Ensemble, batches: ArrayBatches | LoaderBatches) -> tuple[int, torch.Tensor]:
    """How many outputs the networks have for these inputs, and the targets of the first batch."""
    x, y = next(iter(batches.batches(0)))
    few = x[:2].to(ensemble.device, ensemble.dtype if x.is_floating_point() else None)
    training = ensemble.training
    outputs = ensemble.train(False)(few).shape[-1]
    ensemble.train(training)
    return outputs, y


def _check_last_batch(ensemble: Ensemble, batches: ArrayBatches | LoaderBatches) -> None:
    """A network that normalises over the batch cannot train on a single point."""
    if not isinstance(batches, ArrayBatches) or (batches.n - 1) % batches.batch_size:
        return
    device, x = ensemble.device, batches.x[:1]
    one = x.to(device, ensemble.dtype if x.is_floating_point() else None)
    generators = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=generators):
        for group in ensemble.groups:
            try:
                group.member(0).train()(one)
            except ValueError as error:
                raise DataError(
                    f"with batch_size={batches.batch_size} the last batch of an epoch has a "
                    f"single point, on which this network cannot train; choose another batch_size"
                ) from error
