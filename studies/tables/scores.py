"""Scores of a forecast, by the same formulas for all models; no part of shoal is used."""

from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp, ndtr, ndtri

LEAST = 1e-6
"""Probabilities of classes are at least so large, for all models."""

LEVELS = (np.arange(200) + 0.5) / 200
"""The grid of levels of CRPS by pinball losses."""


class Mixture(NamedTuple):
    """Gaussians [K, N] of equal weight; K is 1 for a single Gaussian."""

    mean: np.ndarray
    std: np.ndarray


class Quantiles(NamedTuple):
    """Quantiles [L, N] at levels [L], and a prediction of the mean [N]."""

    levels: np.ndarray
    values: np.ndarray
    mean: np.ndarray


class Classes(NamedTuple):
    """Probabilities [N, C]."""

    probs: np.ndarray


def scores(forecast, y):
    """All scores of a forecast."""
    if isinstance(forecast, Classes):
        return class_scores(forecast.probs, y)
    if isinstance(forecast, Mixture):
        found = {"crps": mixture_crps(*forecast, y), "nll": mixture_nll(*forecast, y)}
        mean = forecast.mean.mean(0)
        low, high = (mixture_quantile(*forecast, level) for level in (0.05, 0.95))
    else:
        found = {"crps": pinball_crps(forecast, y)}
        mean, (low, high) = forecast.mean, at_levels(forecast, np.array([0.05, 0.95]))
    found["rmse"] = float(np.sqrt(np.mean((mean - y) ** 2)))
    return found | interval_scores(low, high, y)


def interval_scores(low, high, y):
    """Share of targets inside, and the mean width."""
    inside = (low <= y) & (y <= high)
    return {"coverage": float(inside.mean()), "width": float(np.mean(high - low))}


def class_scores(probs, y):
    """Log-loss, error, Brier score and ECE of 15 bins of equal mass."""
    probs = np.clip(probs, LEAST, None)
    probs = probs / probs.sum(1, keepdims=True)
    rows = np.arange(len(y))
    top, right = probs.max(1), probs.argmax(1) == y
    bins = np.array_split(np.argsort(top, kind="stable"), 15)
    gaps = [abs(top[b].mean() - right[b].mean()) * len(b) for b in bins if len(b)]
    return {
        "log_loss": float(-np.log(probs[rows, y]).mean()),
        "error": float(1 - right.mean()),
        "brier": float(((probs - np.eye(probs.shape[1])[y]) ** 2).sum(1).mean()),
        "ece": float(sum(gaps) / len(y)),
    }


def expected_distance(shift, std):
    """E|X| of X ~ N(shift, std²)."""
    z = shift / std
    return 2 * std * np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi) + shift * (2 * ndtr(z) - 1)


def mixture_crps(mean, std, y):
    """E|X - y| - E|X - X'| / 2 in closed form. Grimit et al. (2006), doi 10.1256/qj.05.235."""
    error = expected_distance(y - mean, std).mean(0)
    spread = [
        expected_distance(m - mean, np.hypot(s, std)).mean(0)
        for m, s in zip(mean, std, strict=True)
    ]
    return float((error - 0.5 * np.mean(spread, 0)).mean())


def mixture_nll(mean, std, y):
    """Mean of -log p(y) in the units of y."""
    log_prob = -0.5 * ((y - mean) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    return float(-(logsumexp(log_prob, 0) - np.log(len(mean))).mean())


def mixture_quantile(mean, std, level):
    """The point at which the distribution function of the mixture is `level`, by bisection."""
    ends = mean + std * ndtri(level)
    low, high = ends.min(0), ends.max(0)
    for _ in range(60 if len(mean) > 1 else 0):
        middle = (low + high) / 2
        below = ndtr((middle - mean) / std).mean(0) < level
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def at_levels(forecast, levels):
    """Quantiles [levels, N], linear in the normal score of the level, and beyond the ends too."""
    given, wanted = ndtri(forecast.levels), ndtri(levels)
    values = np.sort(forecast.values, 0)
    left = np.clip(np.searchsorted(given, wanted) - 1, 0, len(given) - 2)
    share = (wanted - given[left]) / (given[left + 1] - given[left])
    return values[left] + share[:, None] * (values[left + 1] - values[left])


def pinball_crps(forecast, y):
    """Twice the mean pinball loss over the levels."""
    error = y - at_levels(forecast, LEVELS)
    return float(2 * np.maximum(LEVELS[:, None] * error, (LEVELS[:, None] - 1) * error).mean())
