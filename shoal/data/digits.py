"""Handwritten digits that come with scikit-learn: a real problem without a download."""

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.core.seeds import derive, generator
from shoal.data.dataset import Dataset, Split
from shoal.data.registry import registry
from shoal.data.shifts import rotated, signs

__all__ = ["ANGLES", "digits", "photograph_patches"]

ANGLES = (15, 30, 45, 60)
"""Degrees of the rotations under which the test images are judged."""

_POINTS, _CLASSES, _SIDE, _LEVELS = 1797, 10, 8, 16.0
_PHOTOGRAPHS = ("china.jpg", "flower.jpg")
_LUMINANCE = (0.299, 0.587, 0.114)


@registry.register("digits")
def digits(seed: int = 0, test_size: int = 500) -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels, rotated digits, and photographs as outsiders.

    Pixels are in [0, 1]. The shifts `rotated-15` to `rotated-60` are the test images turned by
    that angle, each image to the side that the seed chose for it, the same at every angle. The
    outsiders are 500 patches of two photographs; see `photograph_patches`.

    Args:
        seed: chooses the split, the sides and the patches.
        test_size: images kept for the test, in the proportions of the classes.
    """
    if not _CLASSES <= test_size <= _POINTS - _CLASSES:
        raise ConfigError(
            f"test_size must be from {_CLASSES} to {_POINTS - _CLASSES} "
            f"so that both parts hold every class, not {test_size}"
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
    patches would be a single tone. Places differ and are drawn evenly, so flat patches such as
    sky stay in; an ensemble should not be sure about them either.
    """
    patches = [_patches(name) for name in _PHOTOGRAPHS]
    counts = (n - n // 2, n // 2)
    chosen = [
        found[torch.randperm(len(found), generator=generator(seed, "digits", name))[:count]]
        for name, found, count in zip(_PHOTOGRAPHS, patches, counts, strict=True)
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
