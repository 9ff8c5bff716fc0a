"""Distances between clouds of weights, for posteriors whose weights can be told apart.

The hidden units of a network can be permuted without changing its function, so that its weights are
not identified; these are for the linear problem, and for particles.
"""

import torch
from torch import Tensor

__all__ = ["covariance_error", "mean_error", "mmd", "sliced_wasserstein"]


def mean_error(x: Tensor, mean: Tensor, covariance: Tensor) -> float:
    """Length of the error of the mean, in units of the posterior's own spread, √tr S."""
    return float((x.mean(0) - mean.to(x)).norm() / covariance.to(x).trace().sqrt())


def covariance_error(x: Tensor, covariance: Tensor) -> float:
    """|C - S| / |S| by the Frobenius norm."""
    target = covariance.to(x)
    return float((torch.cov(x.mT, correction=0) - target).norm() / target.norm())


def sliced_wasserstein(x: Tensor, y: Tensor, directions: int = 200, seed: int = 0) -> float:
    r"""Root mean square, over random directions, of the Wasserstein-2 distance of the shadows.

    In one dimension $W_2² = ∫ (F^{-1} - G^{-1})²$, by the quantiles of both.
    """
    random = torch.Generator().manual_seed(seed)
    axes = torch.randn(x.shape[1], directions, generator=random).to(x)
    axes = axes / axes.norm(dim=0)
    levels = (torch.arange(512, dtype=x.dtype) + 0.5) / 512
    # The quantile function of M points is a staircase, with steps of height 1 / M.
    stairs = [_staircase(z @ axes, levels) for z in (x, y.to(x))]
    return float((stairs[0] - stairs[1]).square().mean().sqrt())


def _staircase(values: Tensor, levels: Tensor) -> Tensor:
    index = (levels * len(values)).long().clamp(max=len(values) - 1)
    return values.sort(0).values[index]


def mmd(x: Tensor, y: Tensor) -> float:
    """Maximum mean discrepancy with a Gaussian kernel as wide as the median distance in y."""
    y = y.to(x)
    h2 = torch.nn.functional.pdist(y).square().median()

    def mean_kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b).square() / (2 * h2)).mean()

    square = mean_kernel(x, x) + mean_kernel(y, y) - 2 * mean_kernel(x, y)
    return float(square.clamp(min=0).sqrt())
