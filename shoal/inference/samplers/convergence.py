"""How well chains of draws agree with themselves and with each other."""

import math

import torch
from torch import Tensor

__all__ = ["autocorrelation", "effective_draws", "split_rhat"]


def split_rhat(draws: Tensor) -> Tensor:
    """The larger R-hat of bulk and tails, for draws [chains, draws, ...] of many quantities.

    Every chain is split in halves. R-hat² = 1 + B / W up to terms of 1 / draws, with the variance B
    of the means of halves and the mean variance W within a half, both of normal scores (Vehtari et
    al., 2021, arXiv 1903.08008). One chain is compared with itself: its first half with its second.
    """
    folded = (draws - draws.flatten(0, 1).median(0).values).abs()
    return torch.maximum(_rhat(_normal_scores(draws)), _rhat(_normal_scores(folded)))


def effective_draws(draws: Tensor) -> Tensor:
    """Number of independent draws with the same error of the mean, by Geyer's initial sequence.

    Draws [chains, draws, ...] of many quantities. A quantity that is constant counts in full. The
    number is at most S log10 S of S draws, as for Vehtari et al. (2021).
    """
    chains, length = draws.shape[:2]
    total = chains * length
    covariance = _autocovariance(draws)
    within = covariance[:, 0].mean(0) * length / (length - 1)
    pooled = within * (length - 1) / length
    pooled = pooled + (draws.mean(1).var(0) if chains > 1 else 0.0)
    correlation = 1 - (within - covariance.mean(0)) / pooled
    even = length // 2 * 2
    pairs = correlation[:even:2] + correlation[1:even:2]
    falling = torch.cummin(pairs, 0).values
    kept = torch.where((pairs > 0).cummin(0).values, falling, 0.0)
    found = total / (2 * kept.sum(0) - 1).clamp(min=1 / max(math.log10(total), 1.0))
    constant = (draws == draws[:1, :1]).flatten(0, 1).all(0)  # rounding gives it a variance
    return torch.where(constant, float(total), found)


def autocorrelation(draws: Tensor, lags: int) -> Tensor:
    """Correlation of draws that are 0 to `lags` - 1 apart, within each chain.

    Draws [chains, draws, ...] give [chains, lags, ...]; a quantity that is constant gives NaN.
    """
    covariance = _autocovariance(draws)
    return covariance[:, :lags] / covariance[:, :1]


def _autocovariance(draws: Tensor) -> Tensor:
    """Covariance within each chain by lag, [chains, draws, ...], by Fourier transforms."""
    length = draws.shape[1]
    centred = draws - draws.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * length, dim=1).abs().square()
    return torch.fft.irfft(spectrum, n=2 * length, dim=1)[:, :length] / length


def _normal_scores(draws: Tensor) -> Tensor:
    flat = draws.flatten(0, 1)
    columns = flat.reshape(len(flat), -1).mT.contiguous()
    ordered = columns.sort(1).values
    # Equal draws, such as probabilities of exactly 1, share the mean of their ranks.
    ends = [torch.searchsorted(ordered, columns, right=right) for right in (False, True)]
    ranks = ((ends[0] + ends[1] + 1) / 2.0).to(flat.dtype).mT.reshape(flat.shape)
    return torch.special.ndtri((ranks - 0.375) / (len(flat) + 0.25)).reshape(draws.shape)


def _rhat(values: Tensor) -> Tensor:
    half = values.shape[1] // 2
    halves = torch.cat([values[:, :half], values[:, -half:]])
    within, between = halves.var(1).mean(0), halves.mean(1).var(0)
    ratio = (((half - 1) / half * within + between) / within).sqrt()
    return torch.where((within == 0) & (between == 0), 1.0, ratio)  # a constant
