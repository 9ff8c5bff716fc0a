"""Toy problems in one and two dimensions, on which uncertainty can be looked at.

Both follow D'Angelo & Fortuin (2021), arXiv 2106.11642.
"""

import math

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.seeds import generator
from shoal.data.dataset import Dataset, Split
from shoal.data.registry import registry

__all__ = ["toy_classification", "toy_regression", "true_curve"]

_INTERVALS = ((1.5, 2.5), (4.5, 6.0))
_GRID = (0.0, 7.0)
_RING_CLASSES, _RING_RADIUS, _FAR_RADIUS, _CENTRE_VARIANCE = 5, 5.0, 30.0, 0.4


def true_curve(x: Tensor) -> Tensor:
    """The function behind `toy-regression`, x sin x."""
    return x * x.sin()


@registry.register("toy-regression", cite=("dangelo2021repulsive",))
def toy_regression(
    seed: int = 0, points: int = 45, test_points: int = 200, noise_std: float = 0.25
) -> Dataset:
    """A noisy curve seen in two intervals: y = x sin x + noise.

    Training inputs are uniform in [1.5, 2.5] and in [4.5, 6]; test inputs are a grid on [0, 7],
    so most of the test lies between or beyond the data. Test targets carry the same noise: their
    log density and coverage are those of observations.

    Args:
        seed: chooses inputs and noise.
        points: training points in each interval.
        test_points: points of the test grid.
        noise_std: standard deviation of the noise.
    """
    _positive(points=points, test_points=test_points)
    if not noise_std >= 0:
        raise ConfigError(f"noise_std must not be negative, not {noise_std}")
    random = generator(seed, "toy-regression")
    places = torch.rand(len(_INTERVALS), points, generator=random)
    low, high = torch.tensor(_INTERVALS).T.unsqueeze(-1)
    train = (low + (high - low) * places).flatten()
    test = torch.linspace(*_GRID, test_points)

    def observed(x: Tensor) -> Split:
        noise = noise_std * torch.randn(len(x), generator=random)
        return Split(x.unsqueeze(-1), true_curve(x) + noise)

    return Dataset("toy-regression", train=observed(train), test=observed(test))


@registry.register("toy-classification", cite=("dangelo2021repulsive",))
def toy_classification(
    seed: int = 0, points: int = 40, test_points: int = 20, ood_points: int = 100
) -> Dataset:
    """Five classes on a ring in the plane, with outsiders far away and in the middle.

    Each class is a Gaussian of unit variance whose mean is on a circle of radius 5. The outsiders
    `ring` are at distance 30 on average (unit variance, any direction); `centre` is N(0, 0.4 I),
    equally far from every class.

    Args:
        seed: chooses every point.
        points: training points of each class.
        test_points: test points of each class.
        ood_points: points of each set of outsiders.
    """
    _positive(points=points, test_points=test_points, ood_points=ood_points)
    random = generator(seed, "toy-classification")
    turns = 2 * math.pi * torch.rand(ood_points, generator=random)
    far = _FAR_RADIUS + torch.randn(ood_points, 1, generator=random)
    near = math.sqrt(_CENTRE_VARIANCE) * torch.randn(ood_points, 2, generator=random)
    return Dataset(
        "toy-classification",
        train=_ring(points, random),
        test=_ring(test_points, random),
        ood={"ring": Split(far * _direction(turns)), "centre": Split(near)},
        classes=tuple(str(k) for k in range(_RING_CLASSES)),
    )


def _ring(points: int, random: torch.Generator) -> Split:
    y = torch.arange(_RING_CLASSES).repeat_interleave(points)
    means = _RING_RADIUS * _direction(2 * math.pi * y / _RING_CLASSES)
    return Split(means + torch.randn(len(y), 2, generator=random), y)


def _direction(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, not {count}")
