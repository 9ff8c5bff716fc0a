"""Loss, accuracy and disagreement at many points of weight space, in one batched forward pass."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.analysis.landscape.points import batch_norms, combined, refresh
from shoal.core.errors import DataError
from shoal.core.opaque import tensors_in
from shoal.core.structure import Inputs, Structured
from shoal.data.dataset import Split
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.resources.plan import default_runner
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.posterior import as_points

__all__ = ["Survey", "Tick", "apart", "chunk_size", "evaluated", "outputs", "survey"]

Tick = Callable[[int], None]
"""Called with the number of points evaluated."""

BATCH = {"cpu": 100, "cuda": 500}
"""Inputs per forward pass, by type of device."""

ROOM = {"cpu": 1 << 24, "cuda": 1 << 31}
"""Largest number of activations in a layer of a chunk of points, by type of device."""

_WIDENING = 32
"""Assumed ratio of a network's widest layer to its input."""


class Survey(NamedTuple):
    """Scores of K points of weight space on one data set.

    Attributes:
        loss: mean negative log-likelihood [K].
        accuracy: accuracy [K]; NaN in regression.
        apart: disagreement with R references [R, K]; see `apart`.
    """

    loss: Tensor
    accuracy: Tensor
    apart: Tensor


def survey(
    basis: Ensemble,
    coefficients: Tensor,
    split: Split,
    likelihood: Likelihood,
    references: Tensor | None = None,
    train: Inputs | None = None,
    tick: Tick = lambda count: None,
) -> Survey:
    """Loss, accuracy and disagreement with the references at the points coefficients @ basis.

    Args:
        basis: R networks.
        coefficients: coefficients of the points [K, R].
        split: labelled data.
        likelihood: likelihood of the outputs.
        references: outputs [Q, B, C] on the inputs of `split`; by default those of the basis.
        train: inputs for the statistics of batch normalisation at each point.
        tick: called with the number of points evaluated.
    """
    if references is None:
        references = outputs(basis, split.x)
    parts = []
    for part in coefficients.split(chunk_size(basis, split.x)):
        points = combined(basis, part)
        if batch_norms(points):
            if train is None:
                raise DataError("batch normalisation needs training inputs; give train=x")
            refresh(points, train)
        parts.append(evaluated(outputs(points, split.x), split, likelihood, references))
        tick(len(part))
    return Survey(*(torch.cat(tensors, -1) for tensors in zip(*parts, strict=True)))


def evaluated(
    predicted: Tensor, split: Split, likelihood: Likelihood, references: Tensor | None = None
) -> Survey:
    """The survey of networks whose outputs [K, B, ..., C] are known, without ignored targets."""
    targets = _targets(split).to(predicted.device)
    some = references is not None and len(references) > 0
    others = as_points(likelihood, references, targets)[0] if some else None  # pyright: ignore
    predicted, y = as_points(likelihood, predicted, targets)
    loss = -likelihood.log_prob(predicted, y).mean(-1)
    if likelihood.about.has_classes:
        right = likelihood.predicted(predicted) == likelihood.labels(y)
        accuracy = right.double().flatten(1).mean(-1)
    else:
        accuracy = torch.full_like(loss, torch.nan).double()
    far = apart(likelihood, predicted, predicted[:0] if others is None else others)
    return Survey(loss.double().cpu(), accuracy.cpu(), far.cpu())


def apart(likelihood: Any, predicted: Tensor, references: Tensor) -> Tensor:
    """Pairwise disagreement [R, K] of functions with outputs [K, B, C] and [R, B, C].

    This is the share of inputs with different labels; in regression, the root mean square
    difference of the predicted means.
    """
    references = references.to(predicted.device)
    if likelihood.about.has_classes:
        labels, others = (likelihood.predicted(f).flatten(1) for f in (predicted, references))
        each = [(labels != other).double().mean(-1) for other in others]
    else:
        mean, means = likelihood.mean(predicted), likelihood.mean(references)
        each = [(mean - m).double().square().mean((-2, -1)).sqrt() for m in means]
    return torch.stack(each) if each else predicted.new_zeros(0, len(predicted)).double()


def outputs(ensemble: Ensemble, x: Inputs, mapping: MemberRunner | None = None) -> Tensor:
    """Outputs [K, B, ..., C] of every member, without gradients, on the ensemble's device."""
    if mapping is None:
        mapping = default_runner(ensemble.groups, ensemble.device)
    with torch.no_grad():
        batches = [ensemble(batch, mapping) for batch in _batches(ensemble, x)]
    return torch.cat(batches, 1)


def chunk_size(ensemble: Ensemble, x: Inputs) -> int:
    """Points per chunk: enough to keep the device busy, within its memory."""
    kind = _kind(ensemble)
    numbers = min(len(x), BATCH[kind]) * _WIDENING * _size_of_one(x)
    return max(4, min(ROOM[kind] // max(numbers, 1), 256))


def _size_of_one(x: Inputs) -> int:
    """Numbers in one input."""
    if isinstance(x, Tensor):
        return x[0].numel()
    tensors = x.tensors.values() if isinstance(x, Structured) else tensors_in(x)
    return sum(tensor.numel() for tensor in tensors) // max(len(x), 1)


def _batches(ensemble: Ensemble, x: Inputs) -> Iterator[Inputs]:
    for batch in x.split(BATCH[_kind(ensemble)]):
        yield batch.to(ensemble.device, ensemble.dtype if batch.is_floating_point() else None)


def _kind(ensemble: Ensemble) -> str:
    return "cuda" if ensemble.device.type == "cuda" else "cpu"


def _targets(split: Split) -> Tensor:
    if split.y is None:
        raise DataError("the landscape needs labelled data, but these data have no targets")
    return split.y
