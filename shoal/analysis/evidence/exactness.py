r"""How far one weighting of the members is from another, in what they predict.

Total variation is $\frac12 \sum_c |p(c|x) - q(c|x)|$ for classes and $\frac12 \int |p - q| dy$ for
real targets, where it is integrated on a grid for each column and the mean over columns is taken.
Both lie between 0 and 1: the largest difference in the probability of any event.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = ["Weighted", "compare", "total_variation"]

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
