"""Toy problems against their definitions."""

import math

import pytest
import torch

from shoal.core.errors import ConfigError
from shoal.data import registry
from shoal.data.sets.builtin import toy_classification, toy_regression, true_curve


def test_regression_inputs_are_where_they_should_be():
    data = toy_regression()
    x = data.train.x.squeeze(-1)
    assert data.train.x.shape == (90, 1)
    assert data.train.y.shape == (90,)
    assert ((x >= 1.5) & (x <= 2.5)).sum() == 45
    assert ((x >= 4.5) & (x <= 6.0)).sum() == 45
    assert (data.task, data.outputs, data.input_shape) == ("regression", 1, (1,))
    grid = data.test.x.squeeze(-1)
    torch.testing.assert_close(grid, torch.linspace(0, 7, 200))


def test_regression_is_x_sin_x_without_noise():
    data = toy_regression(noise_std=0.0)
    for part in (data.train, data.test):
        x = part.x.squeeze(-1)
        torch.testing.assert_close(part.y, x * torch.sin(x))


def test_regression_noise_has_its_size():
    n = 20_000
    data = toy_regression(points=n // 2, test_points=n)
    for part in (data.train, data.test):
        noise = part.y - true_curve(part.x.squeeze(-1))
        assert abs(noise.mean()) < 5 * 0.25 / n**0.5
        assert abs(noise.std() - 0.25) < 5 * 0.25 / (2 * n) ** 0.5


def test_regression_inputs_fill_the_intervals_evenly():
    x = toy_regression(points=20_000).train.x.squeeze(-1)
    left, right = x[x < 3], x[x > 3]
    assert abs(left.mean() - 2.0) < 5 * (1 / 12 / 20_000) ** 0.5
    assert abs(right.var() - 1.5**2 / 12) < 0.01


def test_classification_counts_and_parts():
    data = registry.make("toy-classification")
    assert torch.bincount(data.train.y).tolist() == [40] * 5
    assert torch.bincount(data.test.y).tolist() == [20] * 5
    assert data.train.y.dtype == torch.int64
    assert (data.task, data.outputs, data.input_shape) == ("classification", 5, (2,))
    assert set(data.ood) == {"ring", "centre"}


def test_classes_are_unit_gaussians_on_a_ring_of_radius_five():
    n = 20_000
    train = toy_classification(points=n).train
    for k in range(5):
        x = train.x[train.y == k]
        angle = 2 * math.pi * k / 5
        mean = 5 * torch.tensor([math.cos(angle), math.sin(angle)])
        assert (x.mean(0) - mean).abs().max() < 5 / n**0.5
        assert (torch.cov(x.T) - torch.eye(2)).abs().max() < 5 * (2 / n) ** 0.5


def test_ood_sets_are_far_away_and_in_the_middle():
    n = 20_000
    ood = toy_classification(ood_points=n).ood
    distance = ood["ring"].x.norm(dim=1)
    assert abs(distance.mean() - 30) < 5 / n**0.5
    assert abs(distance.std() - 1) < 5 / (2 * n) ** 0.5
    assert ood["ring"].x.mean(0).abs().max() < 5 * 30 / n**0.5
    assert (torch.cov(ood["centre"].x.T) - 0.4 * torch.eye(2)).abs().max() < 0.02
    assert ood["ring"].y is None


@pytest.mark.parametrize("make", [toy_regression, toy_classification])
def test_the_seed_decides_everything(make):
    assert torch.equal(make(seed=3).train.x, make(seed=3).train.x)
    assert torch.equal(make(seed=3).test.y, make(seed=3).test.y)
    assert not torch.equal(make(seed=3).train.x, make(seed=4).train.x)


@pytest.mark.parametrize(
    ("make", "settings", "sentence"),
    [
        (toy_regression, {"points": 0}, "points must be at least 1, not 0"),
        (toy_regression, {"noise_std": -1.0}, "noise_std must not be negative, not -1.0"),
        (toy_classification, {"ood_points": -2}, "ood_points must be at least 1, not -2"),
    ],
)
def test_refuses_impossible_settings(make, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make(**settings)
