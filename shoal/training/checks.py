"""What can be found wrong before anything is changed or written."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from shoal.core.devices import usable_device
from shoal.core.disk import checked_path
from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import nearest
from shoal.data.arrays import check_columns
from shoal.data.sources import ArrayBatches, LoaderBatches
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood, default_for

__all__ = [
    "PRECISIONS",
    "check_keeping",
    "check_targets",
    "default_likelihood",
    "destination",
]

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
    if precision is not None and not (isinstance(precision, str) and precision in PRECISIONS):
        raise ConfigError(
            f"there is no precision '{precision}'; {nearest(str(precision), PRECISIONS)}"
        )
    dtype = ensemble.dtype if precision is None else PRECISIONS[precision]
    return ensemble.device if device is None else usable_device(device), dtype


def check_keeping(out: str | Path | None, callbacks: Sequence[Callable[..., Any]]) -> None:
    """Refuse a folder or callbacks that would fail in training."""
    if out is not None:
        checked_path(out, "out")
    if not isinstance(callbacks, Sequence) or not all(callable(each) for each in callbacks):
        raise ConfigError("callbacks must be a list of functions of a run; type callbacks=[mine]")


def default_likelihood(ensemble: Ensemble, batches: ArrayBatches | LoaderBatches) -> Likelihood:
    """What fits the targets and the outputs of the networks."""
    outputs, y, _ = _outputs(ensemble, batches)
    check_columns(batches.y if isinstance(batches, ArrayBatches) else y)
    return default_for(y, outputs)


def check_targets(
    ensemble: Ensemble, likelihood: Likelihood, batches: ArrayBatches | LoaderBatches
) -> None:
    """The outputs of the networks must be what the likelihood of these targets needs."""
    outputs, y, x = _outputs(ensemble, batches)
    _check_last_batch(ensemble, batches, x)
    if isinstance(batches, ArrayBatches):
        likelihood.check(batches.y, outputs)
        return
    if likelihood.about.has_classes:
        batches.classes = outputs  # from here on every batch is checked when it is read
        batches.first()
        return
    likelihood.check(y, outputs)


def _outputs(
    ensemble: Ensemble, batches: ArrayBatches | LoaderBatches
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many outputs the networks have, and the targets and inputs of the first batch."""
    x, y = batches.first()
    few = x[:2].to(ensemble.device, ensemble.dtype if x.is_floating_point() else None)
    training = ensemble.training
    try:
        outputs = ensemble.train(False)(few)
        if not outputs.requires_grad or not _all_depend(ensemble, few):
            raise ConfigError(
                "the outputs of the network do not depend on its weights, so that nothing can be "
                "trained; look for detach(), .data or no_grad() in its forward or around fit"
            )
    finally:
        ensemble.train(training)
    return outputs.shape[-1], y, x


def _all_depend(ensemble: Ensemble, few: torch.Tensor) -> bool:
    """Of several architectures, the outputs of each depend on its weights."""
    ends = list(accumulate(group.members for group in ensemble.groups))
    spans = zip([0, *ends], ends, strict=False)
    return len(ends) == 1 or all(ensemble.part(*span)(few).requires_grad for span in spans)


def _single_point_batch(batches: ArrayBatches | LoaderBatches) -> int | None:
    """The batch size with which the last batch of an epoch has a single point, if it has."""
    size: Any = batches.batch_size if isinstance(batches, ArrayBatches) else None
    if isinstance(batches, LoaderBatches) and isinstance(batches.loader, DataLoader):
        size = None if batches.loader.drop_last else batches.loader.batch_size
    return size if size is not None and (batches.n - 1) % size == 0 else None


def _check_last_batch(
    ensemble: Ensemble, batches: ArrayBatches | LoaderBatches, x: torch.Tensor
) -> None:
    """A network that normalises over the batch cannot train on a single point."""
    size = _single_point_batch(batches)
    if size is None:
        return
    device = ensemble.device
    one = x[:1].to(device, ensemble.dtype if x.is_floating_point() else None)
    generators = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=generators):
        for group in ensemble.groups:
            try:
                group.member(0).train()(group.taken(one))
            except ValueError as error:
                loader = " or drop_last=True" if isinstance(batches, LoaderBatches) else ""
                raise DataError(
                    f"with batch_size={size} the last batch of an epoch has a single point, "
                    f"on which this network cannot train; choose another batch_size{loader}"
                ) from error
