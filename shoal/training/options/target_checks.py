"""Checks of targets before training: whether they fit the networks, and their likelihood."""

from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import DataLoader

from shoal.core.errors import ConfigError, DataError
from shoal.core.opaque import Opaque
from shoal.core.structure import Inputs, parted
from shoal.data.batches.arrays import check_columns
from shoal.data.batches.batch import Targets
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.engine.members.network_call import member_call
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood, default_for
from shoal.inference.likelihoods.custom_loss import Custom
from shoal.inference.posterior import site_axes

__all__ = ["check_targets", "default_likelihood"]


def default_likelihood(ensemble: Ensemble, batches: ArrayBatches | LoaderBatches) -> Likelihood:
    """The default likelihood for these targets and network outputs."""
    ensemble.derivatives = None
    outputs, y, _ = _outputs(ensemble, batches)
    targets, _ = parted(batches.y if isinstance(batches, ArrayBatches) else y)
    if not isinstance(targets, torch.Tensor):
        raise ConfigError(
            "targets in a structure have no default likelihood; "
            "type likelihood=shoal.likelihoods.Custom(loss)"
        )
    check_columns(targets)
    return default_for(targets, outputs.shape[-1])


def check_targets(
    ensemble: Ensemble,
    likelihood: Likelihood,
    batches: ArrayBatches | LoaderBatches,
    to_train: bool = True,
) -> torch.Size:
    """Refuse targets that do not fit the networks; returns the shape of one point's targets.

    The shape is empty for one target per data point, (T,) for tokens, (H, W) for places. Batches
    to train on must also have a size that the networks can train on. From here on the outputs of
    the members end in the derivatives that the likelihood is of, if there are any.
    """
    ensemble.derivatives = likelihood.derivatives_by
    outputs, y, x = _outputs(ensemble, batches)
    if to_train:
        ensemble.keep_written(_as_taken(x[:2], ensemble))
        _check_last_batch(ensemble, batches, x)

    uneven = isinstance(x, Opaque) and ensemble.derivatives is not None
    shape = outputs.shape  # a loader keeps the check, which must not keep the graph of the outputs

    checked: list[bool] = []

    def check(targets: Any) -> None:
        sites = shape[2:-1]
        if checked and uneven:  # derivatives by rows of data points, whose number differs
            return
        checked.append(True)
        likelihood.check(targets, shape[-1], *site_axes(sites))
        if "any" in likelihood.about.kinds:
            _check_sites(targets, sites)

    if isinstance(batches, ArrayBatches):
        check(parted(batches.y)[0])
    else:
        batches.check = check  # from here on every batch is checked when it is read
        batches.first()
    few, weight = parted(y[: outputs.shape[1]])
    few = few.to(outputs.device)
    if weight is not None and isinstance(likelihood, Custom):
        likelihood.check_weighable(outputs.detach(), few)
    return likelihood.objective(outputs.detach(), few).shape[2:]


def _check_sites(y: torch.Tensor, sites: torch.Size) -> None:
    """Refuse targets without one value per place; sequences may differ in length by batch."""
    if len(sites) > 1 and y.shape[1 : 1 + len(sites)] != sites:
        wanted = ", ".join(map(str, ("N", *sites)))
        raise DataError(
            f"y has shape {tuple(y.shape)}, but the network gives outputs for ({wanted}) targets"
        )


def _outputs(
    ensemble: Ensemble, batches: ArrayBatches | LoaderBatches
) -> tuple[torch.Tensor, Targets, Inputs]:
    """Outputs of the networks for the first points, and targets and inputs of the first batch.

    One member stands for all of its architecture: the members may still be on the host, where a
    pass of all takes as long as many steps on a GPU.
    """
    x, y = batches.first()
    few = _as_taken(x[:2], ensemble)
    training = ensemble.training
    shown = ensemble if len(ensemble.groups) > 1 else ensemble.slice_members(0, 1)
    try:
        outputs = shown.train(False)(few)
        if not outputs.requires_grad or not _all_depend(ensemble, few):
            raise ConfigError(
                "the outputs of the network do not depend on its weights, so nothing can be "
                "trained; look for detach(), .data or no_grad() in its forward or around fit"
            )
    finally:
        ensemble.train(training)
    if outputs.shape[1] != len(few):
        raise DataError(
            f"the network returns {outputs.shape[1]} outputs for {len(few)} data points; "
            f"the first axis of its outputs must be the batch"
        )
    return outputs, y, x


def _as_taken(x: Inputs, ensemble: Ensemble) -> Inputs:
    """Inputs on the device of the members, real ones in the type of the members."""
    if isinstance(x, torch.Tensor) and not x.is_floating_point():
        return x.to(ensemble.device)
    return x.to(ensemble.device).to(ensemble.dtype)


def _all_depend(ensemble: Ensemble, few: Inputs) -> bool:
    """Whether the outputs of every architecture depend on its weights."""
    ends = list(accumulate(group.members for group in ensemble.groups))
    spans = zip([0, *ends], ends, strict=False)
    return len(ends) == 1 or all(ensemble.slice_members(*span)(few).requires_grad for span in spans)


def _single_point_batch(batches: ArrayBatches | LoaderBatches) -> int | None:
    """The batch size if it leaves a last batch of one data point; None otherwise."""
    size: Any = batches.batch_size if isinstance(batches, ArrayBatches) else None
    if isinstance(batches, LoaderBatches) and isinstance(batches.loader, DataLoader):
        size = None if batches.loader.drop_last else batches.loader.batch_size
    return size if size is not None and (batches.n - 1) % size == 0 else None


def _check_last_batch(ensemble: Ensemble, batches: ArrayBatches | LoaderBatches, x: Inputs) -> None:
    """Refuse a last batch of one data point if the network normalises over the batch."""
    size = _single_point_batch(batches)
    if size is None or isinstance(x, Opaque):
        return
    device = ensemble.device
    one = _as_taken(x[:1], ensemble)
    generators = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=generators):
        for group in ensemble.groups:
            try:
                member = group.member(0).train()
                member_call(member, group.taken(one))
            except ValueError as error:
                loader = " or drop_last=True" if isinstance(batches, LoaderBatches) else ""
                raise DataError(
                    f"with batch_size={size} the last batch of an epoch has one data point, "
                    f"on which this network cannot train; choose another batch_size{loader}"
                ) from error
