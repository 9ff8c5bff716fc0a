"""How a set of images becomes a data set: parts, shifts, pixel values and foreign data."""

from collections.abc import Mapping

import torch

from shoal.core.errors import ConfigError
from shoal.core.seeds import generator
from shoal.data.dataset import Dataset, Split
from shoal.data.images import as_pixels, in_range, pixel_range
from shoal.data.outsiders import outsiders
from shoal.data.raw import Images
from shoal.data.shifts import flipped, rotated, signs

__all__ = ["picture_set", "tumbled", "turned"]


def picture_set(
    name: str,
    classes: tuple[str, ...],
    train: Images,
    test: Images,
    shifts: Mapping[str, Split],
    subset: int | None,
    validation: int,
    pixels: str,
    ood: str | tuple[str, ...],
) -> Dataset:
    """A data set of images given as bytes.

    Args:
        name: how it is called.
        classes: names of the classes.
        train: images and labels to train on.
        test: images and labels to test.
        shifts: test images that were changed, with values from 0 to 1.
        subset: train on the first so many images; None for all.
        validation: training images, the first ones, to keep back.
        pixels: name of the range of values.
        ood: foreign data.
    """
    end = _end(len(train[0]), subset, validation)
    values = pixel_range(pixels, train[0][validation:end])
    judged = _split(test, values)
    return Dataset(
        name=name,
        train=_split((train[0][validation:end], train[1][validation:end]), values),
        test=judged,
        shifts={key: Split(in_range(s.x, values), s.y) for key, s in shifts.items()},
        ood=outsiders(ood, tuple(judged.x.shape[1:]), values),
        classes=classes,
        validation=_split((train[0][:validation], train[1][:validation]), values)
        if validation
        else None,
        pixel_range=values,
    )


def _end(held: int, subset: int | None, validation: int) -> int:
    """Where the training images end."""
    if not 0 <= validation < held:
        raise ConfigError(f"validation must be from 0 to {held - 1:,}, not {validation}")
    if subset is None:
        return held
    if not 1 <= subset <= held - validation:
        raise ConfigError(f"subset must be from 1 to {held - validation:,}, not {subset}")
    return validation + subset


def _split(images: Images, values: tuple[float, float]) -> Split:
    x, y = images
    return Split(in_range(as_pixels(x), values), torch.from_numpy(y.astype("int64")))


def turned(test: Images, angles: tuple[int, ...], seed: int) -> dict[str, Split]:
    """The test images turned by each angle, to the side that the seed chose for each image."""
    if not angles:
        return {}
    clean = _split(test, (0.0, 1.0))
    side = signs(len(clean), generator(seed, "pictures", "side"))
    return {f"rotated-{a}": Split(rotated(clean.x, a * side), clean.y) for a in angles}


def tumbled(test: Images, seed: int) -> Split:
    """The test images mirrored by chance, across and down, and turned by any angle."""
    clean = _split(test, (0.0, 1.0))
    random = generator(seed, "pictures", "tumbled")
    turn = 360 * torch.rand(len(clean), generator=random) - 180
    mirrored = flipped(clean.x, *torch.rand(2, len(clean), generator=random) < 0.5)
    return Split(rotated(mirrored, turn), clean.y)
