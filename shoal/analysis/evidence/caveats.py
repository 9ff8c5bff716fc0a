"""Where theory and members part: members that coincide, weightings that differ, missed optima."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.tree import add_scaled, member_norms, rows
from shoal.core.types import Tree
from shoal.data.dataset import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior
from shoal.prediction.predictive import ArrayLike, Predictive
from shoal.prediction.similarity import affinity
from shoal.training.step import Batch, forces

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
    """Which members coincide.

    Attributes:
        in_weights: groups of members with the same weights, every member in one.
        in_function: groups of members with the same predictions, every member in one.
    """

    in_weights: list[list[int]]
    in_function: list[list[int]]

    @property
    def effective(self) -> int:
        """The number of different functions."""
        return len(self.in_function)


def degeneracy(
    pred: Predictive, weights: Tree | None = None, tolerance: float = 1e-3
) -> Degeneracy:
    """Members that are the same, in weights (equal architectures) or in what they predict.

    Args:
        pred: what the members say about some inputs.
        weights: their tensors [M, ...]; None when they are of different architectures.
        tolerance: relative distance of weights, and Hellinger distance of predictions.
    """
    apart = (1 - affinity(pred)).clamp_min(0).sqrt()
    alone = [[member] for member in range(pred.size)]
    near = alone if weights is None else _groups(_relative_distances(weights) <= tolerance)
    return Degeneracy(near, _groups(apart <= tolerance))


def merged(weights: Tensor, groups: list[list[int]]) -> Tensor:
    """Weights of the point masses that are left when each group is one, in the order of groups."""
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
    """A weighting of the members, judged.

    Attributes:
        weights: of the members [M].
        nll: mean negative log likelihood of the targets, in nats.
        total_variation: from the uniform average, the mean over the inputs.
    """

    weights: Tensor
    nll: float
    total_variation: float


def compare(pred: Predictive, y: ArrayLike, weights: Tensor) -> Weighted:
    """Judge a weighting beside the uniform average of the same members."""
    uniform, other = replace(pred, weights=None), replace(pred, weights=weights)
    nll = -float(other.log_prob(y).double().mean())
    return Weighted(weights, nll, float(total_variation(uniform, other).mean()))


def total_variation(p: Predictive, q: Predictive) -> Tensor:
    """Distance of two predictions for the same inputs [B]."""
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
    """Length of the gradient of log p(theta | D) / N for each member [M], over all the data.

    Args:
        ensemble: the members; they run as in prediction, and come back in the mode they were in.
        posterior: likelihood and prior, with N = len(data).
        data: what the members were trained on, with targets.
        batch_size: points that go through the members at once.
    """
    training = ensemble.training
    ensemble.train(False)
    total: Tree | None = None
    try:
        for x, y in _batches(ensemble, data, batch_size):
            drive, _ = forces(ensemble, posterior, None, (x, y))
            # each batch has the whole prior in it, and these shares sum to one
            share = len(x) / len(data)
            total = add_scaled(
                {n: torch.zeros_like(t) for n, t in drive.items()} if total is None else total,
                drive,
                share,
            )
    finally:
        ensemble.train(training)
    assert total is not None, "a split has at least one point"
    return member_norms(total, ensemble.spans).cpu()


def _batches(ensemble: Ensemble, data: Split, batch_size: int) -> Iterator[Batch]:
    assert data.y is not None, "the evidence of data without targets is not asked for"
    for x, y in zip(data.x.split(batch_size), data.y.split(batch_size), strict=True):
        x = x.to(ensemble.device, ensemble.dtype if x.is_floating_point() else None)
        yield x, y.to(ensemble.device)
