r"""Have several chains found the same distribution? Rank-normalised split R-hat and sample size.

Vehtari, Gelman, Simpson, Carpenter & Bürkner (2021), arXiv 1903.08008: each chain is cut in half,
the draws are replaced by the normal quantiles of their ranks, and $\hat R = \sqrt{var^+ / W}$
compares the variance of all with that within the halves, once for the draws and once for their
distances from the median.
"""

import torch
from torch import Tensor

__all__ = ["effective_draws", "split_rhat"]


def split_rhat(draws: Tensor) -> Tensor:
    """The larger R-hat of bulk and tails, for draws [chains, draws, ...] of many quantities."""
    folded = (draws - draws.flatten(0, 1).median(0).values).abs()
    return torch.maximum(_rhat(_normal_scores(draws)), _rhat(_normal_scores(folded)))


def effective_draws(draws: Tensor) -> Tensor:
    """Number of independent draws with the same error of the mean, by Geyer's initial sequence."""
    chains, length = draws.shape[:2]
    centred = draws - draws.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * length, dim=1).abs().square()
    covariance = torch.fft.irfft(spectrum, dim=1)[:, :length] / length
    within = covariance[:, 0].mean(0) * length / (length - 1)
    pooled = within * (length - 1) / length
    pooled = pooled + (draws.mean(1).var(0) if chains > 1 else 0.0)
    correlation = 1 - (within - covariance.mean(0)) / pooled
    even = length // 2 * 2
    pairs = correlation[:even:2] + correlation[1:even:2]
    falling = torch.cummin(pairs, 0).values
    kept = torch.where((pairs > 0).cummin(0).values, falling, 0.0)
    return chains * length / (2 * kept.sum(0) - 1).clamp(min=1 / (chains * length))


def _normal_scores(draws: Tensor) -> Tensor:
    flat = draws.flatten(0, 1)
    ranks = flat.argsort(0).argsort(0) + 1.0
    return torch.special.ndtri((ranks - 0.375) / (len(flat) + 0.25)).reshape(draws.shape)


def _rhat(values: Tensor) -> Tensor:
    half = values.shape[1] // 2
    halves = torch.cat([values[:, :half], values[:, -half:]])
    within, between = halves.var(1).mean(0), halves.mean(1).var(0)
    return (((half - 1) / half * within + between) / within).sqrt()
