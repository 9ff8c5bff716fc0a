"""Image data sets: MNIST and its relatives, CIFAR-10, SVHN."""

from collections.abc import Mapping

import torch

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.data.dataset import Dataset, Split, registry
from shoal.data.images import as_pixels, flipped, in_range, pixel_range, rotated, signs
from shoal.data.load import outsiders
from shoal.data.raw import RAW, Images

__all__ = [
    "cifar10",
    "fashion_mnist",
    "kmnist",
    "mnist",
    "notmnist",
    "picture_set",
    "svhn",
    "tumbled",
    "turned",
]


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


ANGLES = (15, 30, 45, 60)

DIGITS = tuple("0123456789")

FASHION = (
    *("T-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)

KANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")

LETTERS = tuple("ABCDEFGHIJ")

OBJECTS = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

_LETTER_TEST = 2000


@registry.register("mnist", cite=("lecun1998gradient",))
def mnist(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("notmnist", "fashion-mnist", "kmnist"),
    angles: tuple[int, ...] = ANGLES,
    seed: int = 0,
) -> Dataset:
    """60,000 handwritten digits of 28 x 28 pixels and 10,000 to test, with three foreign sets.

    The shift `rotated-flipped` is the test set turned by any angle and mirrored in half of the
    cases across and in half of them down; it is the RotatedMNIST of the study of D'Angelo &
    Fortuin's method that Shoal repeats, which states neither angles nor shares. `rotated-15` to
    `rotated-60` are turned by that angle to either side, the same at every angle.

    Args:
        subset: train on the first so many images; None for all.
        validation: training images, the first ones, to keep back.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1 as in the published study.
        ood: foreign data: names of data sets, or your own files and folders.
        angles: degrees of the rotated test sets.
        seed: chooses sides, angles and mirrors.
    """
    train, test = (RAW["mnist"](part) for part in ("train", "test"))
    shifts = turned(test, angles, seed) | {"rotated-flipped": tumbled(test, seed)}
    return picture_set("mnist", DIGITS, train, test, shifts, subset, validation, pixels, ood)


@registry.register("fashion-mnist", cite=("xiao2017fashion",))
def fashion_mnist(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("mnist",),
    angles: tuple[int, ...] = ANGLES,
    seed: int = 0,
) -> Dataset:
    """60,000 photographs of clothes of 28 x 28 pixels and 10,000 to test, with MNIST as foreign.

    Args:
        subset: train on the first so many images; None for all.
        validation: training images, the first ones, to keep back.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: foreign data: names of data sets, or your own files and folders.
        angles: degrees of the rotated test sets, each image to the side the seed chose.
        seed: chooses the sides.
    """
    train, test = (RAW["fashion-mnist"](part) for part in ("train", "test"))
    shifts = turned(test, angles, seed)
    return picture_set(
        "fashion-mnist", FASHION, train, test, shifts, subset, validation, pixels, ood
    )


@registry.register("kmnist", cite=("clanuwat2018deep",))
def kmnist(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("mnist",),
    angles: tuple[int, ...] = ANGLES,
    seed: int = 0,
) -> Dataset:
    """60,000 cursive Japanese characters of 28 x 28 pixels and 10,000 to test.

    Args:
        subset: train on the first so many images; None for all.
        validation: training images, the first ones, to keep back.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: foreign data: names of data sets, or your own files and folders.
        angles: degrees of the rotated test sets, each image to the side the seed chose.
        seed: chooses the sides.
    """
    train, test = (RAW["kmnist"](part) for part in ("train", "test"))
    shifts = turned(test, angles, seed)
    return picture_set("kmnist", KANA, train, test, shifts, subset, validation, pixels, ood)


@registry.register("notmnist", cite=("bulatov2011notmnist",))
def notmnist(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("mnist",),
) -> Dataset:
    """10,000 letters A to J in many fonts, 28 x 28 pixels: 8,000 to train on, 2,000 to test.

    About one in fifty is not a letter. As foreign data of another set all 10,000 are taken.

    Args:
        subset: train on the first so many images; None for all.
        validation: training images, the first ones, to keep back.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: foreign data: names of data sets, or your own files and folders.
    """
    x, y = RAW["notmnist"]("test")
    train, test = (x[:-_LETTER_TEST], y[:-_LETTER_TEST]), (x[-_LETTER_TEST:], y[-_LETTER_TEST:])
    return picture_set("notmnist", LETTERS, train, test, {}, subset, validation, pixels, ood)


@registry.register("cifar10", cite=("krizhevsky2009learning",))
def cifar10(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("svhn",),
) -> Dataset:
    """50,000 colour photographs of 32 x 32 pixels in ten classes and 10,000 to test.

    `shoal.data.human_labels` has what people said about the test images.

    Args:
        subset: train on the first so many images; None for all.
        validation: training images, the first ones, to keep back; 5,000 in published comparisons.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: foreign data: names of data sets, or your own files and folders.
    """
    train, test = (RAW["cifar10"](part) for part in ("train", "test"))
    return picture_set("cifar10", OBJECTS, train, test, {}, subset, validation, pixels, ood)


@registry.register("svhn", cite=("netzer2011reading",))
def svhn(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("cifar10",),
) -> Dataset:
    """73,257 digits of house numbers in colour, 32 x 32 pixels, and the first 10,000 to test.

    Args:
        subset: train on the first so many images; None for all.
        validation: training images, the first ones, to keep back.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: foreign data: names of data sets, or your own files and folders.
    """
    train, test = (RAW["svhn"](part) for part in ("train", "test"))
    return picture_set("svhn", DIGITS, train, test, {}, subset, validation, pixels, ood)
