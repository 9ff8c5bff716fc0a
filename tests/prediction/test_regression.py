import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from shoal.core.errors import ConfigError
from shoal.inference.likelihoods import Gaussian, HeteroscedasticGaussian, LogNormal
from shoal.prediction import Predictive
from shoal.prediction.metrics import coverage, crps, nll, pit, registry, rmse, sharpness

WEIGHTS = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)


def mixture(points=4, columns=1, weights=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(3, points, 2 * columns, generator=generator, dtype=torch.float64)
    return Predictive(outputs, HeteroscedasticGaussian(), weights)


def distribution(pred, b, k):
    """Distribution function of the mixture, from scipy."""
    mean, variance = pred.moments()
    share = [1 / 3] * 3 if pred.weights is None else pred.weights.tolist()
    parts = [
        (w, stats.norm(float(m), math.sqrt(v)))
        for w, m, v in zip(share, mean[:, b, k], variance[:, b, k], strict=True)
    ]
    return lambda t: sum(w * part.cdf(t) for w, part in parts)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_crps_and_pit_agree_with_numerical_integration(weights):
    pred = mixture(columns=2, weights=weights)
    y = torch.tensor([[0.3, -1.0], [2.0, 0.1], [-0.4, 5.0], [0.0, 0.0]], dtype=torch.float64)
    areas, ranks = [], np.zeros((4, 2))
    for b in range(4):
        for k in range(2):
            F, target = distribution(pred, b, k), float(y[b, k])
            below = integrate.quad(lambda t, F=F: F(t) ** 2, -20, target, limit=200)[0]
            above = integrate.quad(lambda t, F=F: (1 - F(t)) ** 2, target, 25, limit=200)[0]
            areas.append(below + above)
            ranks[b, k] = F(target)
    assert crps(pred, y) == pytest.approx(np.mean(areas), rel=1e-7)
    assert pit(pred, y).numpy() == pytest.approx(ranks, rel=1e-12)


def test_crps_of_one_narrow_gaussian_is_the_absolute_error():
    pred = Predictive(torch.zeros(1, 3, 1, dtype=torch.float64), Gaussian(1e-9))
    assert crps(pred, [1.0, -2.0, 3.0]) == pytest.approx(2.0, rel=1e-6)


def test_rmse_nll_and_sharpness_literally():
    pred, y = mixture(), torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    mean, variance = pred.moments()
    assert rmse(pred, y) == pytest.approx(float((mean.mean(0)[:, 0] - y).square().mean().sqrt()))
    density = stats.norm(mean[..., 0], variance[..., 0].sqrt()).pdf(y).mean(0)
    assert nll(pred, y) == pytest.approx(-np.log(density).mean(), rel=1e-12)
    second = (variance + mean.square()).mean(0) - mean.mean(0).square()
    assert sharpness(pred) == pytest.approx(float(second.sqrt().mean()))


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_coverage_of_calibrated_targets_is_the_level(level):
    """Targets drawn from the mixture itself, at evenly spread quantiles."""
    n = 2000
    pred = Predictive(mixture(points=1).members.expand(-1, n, -1), HeteroscedasticGaussian())
    F = distribution(pred, 0, 0)
    grid = np.linspace(-15, 15, 20001)
    quantiles = (np.arange(n) + 0.5) / n
    y = np.interp(quantiles, F(grid), grid)
    assert coverage(pred, y, level) == pytest.approx(level, abs=1e-3)
    assert registry[f"coverage_{round(100 * level)}"](pred, y) == coverage(pred, y, level)


def test_coverage_uses_the_mixture_and_not_a_gaussian_of_its_moments():
    """Two far peaks: nothing lies in the middle, but the median is inside any interval."""
    pred = Predictive(torch.tensor([[[-10.0]], [[10.0]]]).double().expand(-1, 2, -1), Gaussian())
    assert coverage(pred, [0.0, 10.0], 0.4) == 0.5
    assert coverage(pred, [0.0, 10.0], 0.6) == 1.0


@pytest.mark.parametrize("level", [0.0, 1.0, 90])
def test_the_level_is_a_fraction(level):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        coverage(mixture(), [0.0] * 4, level)


def many_members(kind, members=300, points=2):
    """Members as chains give them: alike, of different noise, in separate modes, or narrow."""
    generator = torch.Generator().manual_seed(1)
    mean, log_std = torch.randn(2, members, points, 1, generator=generator, dtype=torch.float64)
    factors = {"alike": (0.3, 0.0), "noisy": (1, 0.7), "narrow": (1, 0), "modes": (0.5, 0.3)}
    spread, uneven = factors[kind]
    mean = spread * mean + (
        20 * torch.arange(members).view(-1, 1, 1) % 60 if kind == "modes" else 0
    )
    std = (uneven * log_std).exp() * (0.02 if kind == "narrow" else 1)
    return mean, std.square()


CLOSE = {"rtol": 1e-4, "atol": 0}


@pytest.mark.parametrize("kind", ["alike", "noisy", "narrow", "modes"])
@pytest.mark.parametrize("likelihood", [HeteroscedasticGaussian(), LogNormal()])
def test_distances_of_many_members_are_those_of_all_pairs(likelihood, kind, monkeypatch):
    mean, variance = many_members(kind)
    scale = 0.1 if isinstance(likelihood, LogNormal) else 1.0
    outputs = torch.cat([scale * mean, (scale**2 * variance).expm1().log()], -1)
    weights = None
    if kind in ("noisy", "modes"):
        weights = torch.linspace(0, 1, len(mean), dtype=torch.float64).softmax(0)
    many = (likelihood.distances_to_mixture, likelihood.mixture_distance)
    found, whole = (distance(outputs, weights) for distance in many)
    for module in ("likelihood", "real_targets"):
        monkeypatch.setattr(f"shoal.inference.likelihoods.{module}.PAIRED", len(mean))
    torch.testing.assert_close(whole, likelihood.mixture_distance(outputs, weights), **CLOSE)
    pairs = likelihood.distances_to_mixture(outputs, weights)
    torch.testing.assert_close(found, pairs, rtol=1e-2, atol=0)
