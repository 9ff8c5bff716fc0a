"""Caveats of the evidence: coinciding members, other weightings, members not at an optimum."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.analysis.evidence.members import sites_of
from shoal.core.tree import add_scaled, member_norms, rows
from shoal.core.types import Tree
from shoal.data.dataset import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior, total_weight
from shoal.prediction.metrics.similarity import affinity
from shoal.prediction.predictive import ArrayLike, Predictive
from shoal.training.forces import forces
from shoal.training.step.drive import Batch

__all__ = [
    "Degeneracy",
    "Weighted",
    "compare",
    "degeneracy",
    "gradient_norms",
    "merged",
    "total_variation",
]


@dataclass(frozen=True)
class Degeneracy:
    """Groups of members that coincide; every member is in one group.

    Attributes:
        in_weights: groups of members with the same weights.
        in_function: groups of members with the same predictions.
    """

    in_weights: list[list[int]]
    in_function: list[list[int]]

    @property
    def effective(self) -> int:
        """Number of groups with different predictions."""
        return len(self.in_function)


def degeneracy(
    pred: Predictive, weights: Tree | None = None, tolerance: float = 1e-3
) -> Degeneracy:
    """Members with the same weights (equal architectures) or the same predictions.

    Args:
        pred: prediction of the members for some inputs.
        weights: their tensors [M, ...]; None for different architectures.
        tolerance: relative distance of weights, and Hellinger distance of predictions.
    """
    apart = (1 - affinity(pred)).clamp_min(0).sqrt()
    alone = [[member] for member in range(pred.size)]
    near = alone if weights is None else _groups(_relative_distances(weights) <= tolerance)
    return Degeneracy(near, _groups(apart <= tolerance))


def merged(weights: Tensor, groups: list[list[int]]) -> Tensor:
    """Weights of the point masses after merging each group, in the order of the groups."""
    return torch.stack([weights[group].sum() for group in groups])


def _relative_distances(weights: Tree) -> Tensor:
    flat = torch.cat([rows(tensor.detach()).double().cpu() for tensor in weights.values()], 1)
    lengths = flat.norm(dim=1)
    longest = torch.maximum(lengths[:, None], lengths).clamp_min(1e-300)
    return torch.stack([(flat - row).norm(dim=1) for row in flat]) / longest


def _groups(same: Tensor) -> list[list[int]]:
    """Connected components of a symmetric relation, each in ascending order."""
    left, found = set(range(len(same))), []
    while left:
        reached, fresh = set(), {min(left)}
        while fresh:
            reached |= fresh
            fresh = {j for i in fresh for j in same[i].nonzero().flatten().tolist()} - reached
        found.append(sorted(reached))
        left -= reached
    return found


GRID = 2001

REACH = 8.0


@dataclass(frozen=True)
class Weighted:
    """A weighting of the members and its scores.

    Attributes:
        weights: weights of the members [M].
        nll: NLL of the targets, in nats per point.
        total_variation: total variation from the uniform average, mean over the inputs.
    """

    weights: Tensor
    nll: float
    total_variation: float


def compare(pred: Predictive, y: ArrayLike, weights: Tensor) -> Weighted:
    """Evaluate a weighting and compare it with the uniform average."""
    uniform, other = replace(pred, weights=None), replace(pred, weights=weights)
    nll = -float(other.log_prob(y).double().mean())
    return Weighted(weights, nll, float(total_variation(uniform, other).mean()))


def total_variation(p: Predictive, q: Predictive) -> Tensor:
    """Total variation distance of two predictions for the same inputs [B]."""
    if p.likelihood.about.has_classes:
        return 0.5 * (p.probs.double() - q.probs.double()).abs().sum(-1)
    return torch.stack([_integrated(p, q, point) for point in range(len(p))])


def _integrated(p: Predictive, q: Predictive, point: int) -> Tensor:
    """Half the integral of |p - q| over the targets of one input, averaged over columns."""
    moments = [tuple(m[:, point].double() for m in pred.moments()) for pred in (p, q)]
    reach = [REACH * variance.sqrt() for _, variance in moments]
    low = torch.stack([(m - r).amin(0) for (m, _), r in zip(moments, reach, strict=True)]).amin(0)
    high = torch.stack([(m + r).amax(0) for (m, _), r in zip(moments, reach, strict=True)]).amax(0)
    grid = low + torch.linspace(0, 1, GRID, dtype=torch.float64)[:, None] * (high - low)
    densities = [
        pred.average(torch.distributions.Normal(m[:, None], v.sqrt()[:, None]).log_prob(grid).exp())
        for pred, (m, v) in zip((p, q), moments, strict=True)
    ]
    step = (high - low) / (GRID - 1)
    return (0.5 * (densities[0] - densities[1]).abs().sum(0) * step).mean()


def gradient_norms(
    ensemble: Ensemble, posterior: Posterior, data: Split, batch_size: int = 1024
) -> Tensor:
    """Norm of the gradient of log p(theta | D) / N for each member [M], over all data.

    Only private tensors count: a tensor that all members train moves by the mean of their
    gradients.

    Args:
        ensemble: the members; they run in evaluation mode and keep their mode.
        posterior: likelihood and prior, with N targets.
        data: the training data, with targets.
        batch_size: data points per forward pass.
    """
    training = ensemble.training
    ensemble.train(False)
    total: Tree | None = None
    sites = sites_of(ensemble, data)
    whole = total_weight(posterior.likelihood, data.y, sites)
    try:
        for x, y in _batches(ensemble, data, batch_size):
            velocity, _ = forces(ensemble, posterior, None, (x, y))
            drive = {name: velocity[name] for name in ensemble.weights}
            # each batch includes the whole prior, and the shares sum to one
            share = total_weight(posterior.likelihood, y, sites) / whole
            total = add_scaled(
                {n: torch.zeros_like(t) for n, t in drive.items()} if total is None else total,
                drive,
                share,
            )
    finally:
        ensemble.train(training)
    assert total is not None, "a split has at least one data point"
    return member_norms(total, ensemble.spans).cpu()


def _batches(ensemble: Ensemble, data: Split, batch_size: int) -> Iterator[Batch]:
    assert data.y is not None, "the evidence needs targets"
    for x, y in data.batches(batch_size):
        x = x.to(ensemble.device, ensemble.dtype if x.is_floating_point() else None)
        yield x, y.to(ensemble.device)
