"""Data sets without a download: toy problems in one and two dimensions, and scanned digits."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.core.random import derive, generator
from shoal.data.dataset import Dataset, Split, registry
from shoal.data.sets.images import rotated, signs

__all__ = [
    "ANGLES",
    "digits",
    "photograph_patches",
    "toy_classification",
    "toy_regression",
    "true_curve",
]

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
    """Noisy regression on two intervals: y = x sin x + noise.

    Training inputs are uniform in [1.5, 2.5] and in [4.5, 6]. Test inputs are a grid on [0, 7], so
    most of the test set lies between or beyond the training data. Test targets have the same noise,
    so that log density and coverage refer to observations.

    Args:
        seed: fixes inputs and noise.
        points: training points per interval.
        test_points: test points of the grid.
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
    """Five classes on a ring in the plane, with OOD sets far away and in the centre.

    Each class is a Gaussian of unit variance whose mean is on a circle of radius 5. The OOD set
    `ring` is at distance 30 on average (unit variance, any direction). The OOD set `centre` is
    N(0, 0.4 I), equally far from every class.

    Args:
        seed: fixes every point.
        points: training points per class.
        test_points: test points per class.
        ood_points: points per OOD set.
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


ANGLES = (15, 30, 45, 60)
"""Rotation angles of the shifts, in degrees."""

_POINTS, _CLASSES, _SIDE, _LEVELS = 1797, 10, 8, 16.0

_PHOTOGRAPHS = ("china.jpg", "flower.jpg")

_LUMINANCE = (0.299, 0.587, 0.114)


@registry.register("digits")
def digits(seed: int = 0, test_size: int = 500) -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels, rotated digits, and photographs as OOD set.

    Pixels are in [0, 1]. The shifts `rotated-15` to `rotated-60` are the test images rotated by
    that angle. The seed fixes the direction of each image, the same at every angle. The OOD set
    has 500 patches of two photographs; see `photograph_patches`.

    Args:
        seed: fixes the split, the directions and the patches.
        test_size: number of test images, stratified by class.
    """
    if not _CLASSES <= test_size <= _POINTS - _CLASSES:
        raise ConfigError(
            f"test_size must be from {_CLASSES} to {_POINTS - _CLASSES} "
            f"so that both splits have every class, not {test_size}"
        )
    bunch = require("sklearn.datasets", extra="report").load_digits()
    x = torch.from_numpy(bunch.images).float().unsqueeze(1) / _LEVELS
    y = torch.from_numpy(bunch.target).long()
    train, test = _stratified(y, test_size, seed)
    side = signs(len(test), generator(seed, "digits", "side"))
    return Dataset(
        name="digits",
        train=Split(x[train], y[train]),
        test=Split(x[test], y[test]),
        shifts={f"rotated-{a}": Split(rotated(x[test], a * side), y[test]) for a in ANGLES},
        ood={"photographs": Split(photograph_patches(500, seed))},
        classes=tuple(str(digit) for digit in range(_CLASSES)),
        pixel_range=(0.0, 1.0),
    )


def photograph_patches(n: int, seed: int) -> Tensor:
    """Patches [n, 1, 8, 8] in [0, 1] from two photographs, half of them from each.

    A pixel is the mean luminance of 8 x 8 pixels of the photograph: at full resolution most
    patches would have a single tone. Positions are distinct and uniform, so flat patches such as
    sky are included; the confidence should be low there too.
    """
    patches = [_patches(name) for name in _PHOTOGRAPHS]
    counts = (n - n // 2, n // 2)
    chosen = [
        crops[torch.randperm(len(crops), generator=generator(seed, "digits", name))[:count]]
        for name, crops, count in zip(_PHOTOGRAPHS, patches, counts, strict=True)
    ]
    return torch.cat(chosen)


def _patches(photograph: str) -> Tensor:
    require("PIL", extra="report")
    pixels = require("sklearn.datasets", extra="report").load_sample_image(photograph)
    grey = torch.tensor(pixels).float() @ torch.tensor(_LUMINANCE) / 255.0
    coarse = F.avg_pool2d(grey[None, None], _SIDE)
    places = coarse.unfold(2, _SIDE, 1).unfold(3, _SIDE, 1)
    return places.reshape(-1, 1, _SIDE, _SIDE)


def _stratified(y: Tensor, test_size: int, seed: int) -> tuple[Tensor, Tensor]:
    selection = require("sklearn.model_selection", extra="report")
    train, test = selection.train_test_split(
        range(len(y)),
        test_size=test_size,
        stratify=y.numpy(),
        random_state=derive(seed, "digits", "split") % 2**32,
    )
    return torch.tensor(train), torch.tensor(test)
