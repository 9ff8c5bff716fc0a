"""How good and how different many points of weight space are, in one batched forward."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.analysis.landscape.points import batch_norms, combined, refresh
from shoal.core.errors import DataError
from shoal.data.dataset import Split
from shoal.engine.member_runner import MemberRunner
from shoal.engine.plan import default_runner
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood

__all__ = ["Survey", "Tick", "apart", "chunk_size", "judged", "outputs", "survey"]

Tick = Callable[[int], None]
"""Told how many points have been looked at."""

BATCH = {"cpu": 100, "cuda": 500}
"""Inputs that go through the networks at once, by kind of device."""

ROOM = {"cpu": 1 << 24, "cuda": 1 << 31}
"""Numbers that the widest layer of a chunk of points may take, by kind of device."""

_WIDENING = 32
"""A guess of how many times wider than its input a network is."""


class Survey(NamedTuple):
    """What K points of weight space do on one set of data.

    Attributes:
        loss: mean negative log likelihood [K].
        accuracy: share of right labels [K]; NaN in regression.
        apart: difference from R references [R, K]; see `apart`.
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
    train: Tensor | None = None,
    tick: Tick = lambda count: None,
) -> Survey:
    """Loss, accuracy and difference from the references at the points coefficients @ basis.

    Args:
        basis: R networks.
        coefficients: of the points [K, R].
        split: labelled data to judge by.
        likelihood: what the outputs mean.
        references: outputs [Q, B, C] on the inputs of `split`; by default those of the basis.
        train: inputs from which points with batch normalisation take their statistics.
        tick: told of progress.
    """
    if references is None:
        references = outputs(basis, split.x)
    parts = []
    for part in coefficients.split(chunk_size(basis, split.x)):
        found = combined(basis, part)
        if batch_norms(found):
            if train is None:
                raise DataError("batch normalisation needs training inputs; give train=x")
            refresh(found, train)
        parts.append(judged(outputs(found, split.x), split, likelihood, references))
        tick(len(part))
    return Survey(*(torch.cat(tensors, -1) for tensors in zip(*parts, strict=True)))


def judged(
    found: Tensor, split: Split, likelihood: Likelihood, references: Tensor | None = None
) -> Survey:
    """The survey of networks whose outputs [K, B, C] are known."""
    y = _targets(split).to(found.device)
    loss = -likelihood.log_prob(found, y).mean(-1)
    if likelihood.about.has_classes:
        accuracy = (found.argmax(-1) == y).double().mean(-1)
    else:
        accuracy = torch.full_like(loss, torch.nan).double()
    far = apart(likelihood, found, found[:0] if references is None else references)
    return Survey(loss.double().cpu(), accuracy.cpu(), far.cpu())


def apart(likelihood: Any, found: Tensor, references: Tensor) -> Tensor:
    """How different functions are [R, K] that give outputs [K, B, C] and [R, B, C].

    The share of inputs on which the labels differ; in regression the root mean square difference
    of the predicted means.
    """
    references = references.to(found.device)
    if likelihood.about.has_classes:
        labels, others = found.argmax(-1), references.argmax(-1)
        each = [(labels != other).double().mean(-1) for other in others]
    else:
        mean, means = likelihood.mean(found), likelihood.mean(references)
        each = [(mean - m).double().square().mean((-2, -1)).sqrt() for m in means]
    return torch.stack(each) if each else found.new_zeros(0, len(found)).double()


def outputs(ensemble: Ensemble, x: Tensor, mapping: MemberRunner | None = None) -> Tensor:
    """Outputs [K, B, C] of every member, without gradients, on the ensemble's device."""
    if mapping is None:
        mapping = default_runner(ensemble.groups, ensemble.device)
    with torch.no_grad():
        found = [ensemble(batch, mapping) for batch in _batches(ensemble, x)]
    return torch.cat(found, 1)


def chunk_size(ensemble: Ensemble, x: Tensor) -> int:
    """Points that run together: enough to keep the device busy without filling its memory."""
    kind = _kind(ensemble)
    numbers = min(len(x), BATCH[kind]) * _WIDENING * x[0].numel()
    return max(4, min(ROOM[kind] // max(numbers, 1), 256))


def _batches(ensemble: Ensemble, x: Tensor) -> Iterator[Tensor]:
    for batch in x.split(BATCH[_kind(ensemble)]):
        yield batch.to(ensemble.device, ensemble.dtype if batch.is_floating_point() else None)


def _kind(ensemble: Ensemble) -> str:
    return "cuda" if ensemble.device.type == "cuda" else "cpu"


def _targets(split: Split) -> Tensor:
    if split.y is None:
        raise DataError("the landscape is judged by labelled data, but these have no targets")
    return split.y
