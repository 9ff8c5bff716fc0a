"""Image data sets: MNIST and its relatives, CIFAR-10, SVHN."""

from collections.abc import Mapping

import torch

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.data.dataset import Dataset, Split, registry
from shoal.data.files.raw import RAW, Images
from shoal.data.load import ood_sets
from shoal.data.sets.images import as_pixels, flipped, in_range, pixel_range, rotated, signs

__all__ = [
    "cifar10",
    "fashion_mnist",
    "image_dataset",
    "kmnist",
    "mnist",
    "notmnist",
    "rotated_flipped",
    "rotated_shifts",
    "svhn",
]


def image_dataset(
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
        name: name of the data set.
        classes: names of the classes.
        train: training images and labels.
        test: test images and labels.
        shifts: changed test images, with values from 0 to 1.
        subset: number of training images, taken from the start; None for all.
        validation: number of training images, the first ones, to hold out.
        pixels: name of the range of values.
        ood: names of OOD sets.
    """
    end = _end(len(train[0]), subset, validation)
    values = pixel_range(pixels, train[0][validation:end])
    evaluated = _split(test, values)
    return Dataset(
        name=name,
        train=_split((train[0][validation:end], train[1][validation:end]), values),
        test=evaluated,
        shifts={key: Split(in_range(s.x, values), s.y) for key, s in shifts.items()},
        ood=ood_sets(ood, tuple(evaluated.x.shape[1:]), values),
        classes=classes,
        validation=_split((train[0][:validation], train[1][:validation]), values)
        if validation
        else None,
        pixel_range=values,
    )


def _end(held: int, subset: int | None, validation: int) -> int:
    """The index after the last training image."""
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


def rotated_shifts(test: Images, angles: tuple[int, ...], seed: int) -> dict[str, Split]:
    """The test images rotated by each angle; the seed fixes the direction of each image."""
    if not angles:
        return {}
    clean = _split(test, (0.0, 1.0))
    side = signs(len(clean), generator(seed, "pictures", "side"))
    return {f"rotated-{a}": Split(rotated(clean.x, a * side), clean.y) for a in angles}


def rotated_flipped(test: Images, seed: int) -> Split:
    """The test images, mirrored at random across and down, and rotated by a random angle."""
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
    """60,000 handwritten digits of 28 x 28 pixels and 10,000 for the test, with three OOD sets.

    The shift `rotated-flipped` is the test set rotated by a random angle; half of the images are
    mirrored across, and half of them down. It is the RotatedMNIST of the study of D'Angelo &
    Fortuin's method that Shoal repeats; the study states neither angles nor shares. `rotated-15`
    to `rotated-60` are rotated by that angle, each image in one direction at every angle.

    Args:
        subset: number of training images, taken from the start; None for all.
        validation: number of training images, the first ones, to hold out.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1 as in the published study.
        ood: OOD sets: names of data sets, or your own files and folders.
        angles: angles of the rotated test sets in degrees.
        seed: fixes directions, angles and mirrors.
    """
    train, test = (RAW["mnist"](split) for split in ("train", "test"))
    shifts = rotated_shifts(test, angles, seed) | {"rotated-flipped": rotated_flipped(test, seed)}
    return image_dataset("mnist", DIGITS, train, test, shifts, subset, validation, pixels, ood)


@registry.register("fashion-mnist", cite=("xiao2017fashion",))
def fashion_mnist(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("mnist",),
    angles: tuple[int, ...] = ANGLES,
    seed: int = 0,
) -> Dataset:
    """60,000 photographs of clothes of 28 x 28 pixels and 10,000 for the test; OOD set: MNIST.

    Args:
        subset: number of training images, taken from the start; None for all.
        validation: number of training images, the first ones, to hold out.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: OOD sets: names of data sets, or your own files and folders.
        angles: angles of the rotated test sets in degrees; the seed fixes each direction.
        seed: fixes the directions.
    """
    train, test = (RAW["fashion-mnist"](split) for split in ("train", "test"))
    shifts = rotated_shifts(test, angles, seed)
    return image_dataset(
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
    """60,000 cursive Japanese characters of 28 x 28 pixels and 10,000 for the test.

    Args:
        subset: number of training images, taken from the start; None for all.
        validation: number of training images, the first ones, to hold out.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: OOD sets: names of data sets, or your own files and folders.
        angles: angles of the rotated test sets in degrees; the seed fixes each direction.
        seed: fixes the directions.
    """
    train, test = (RAW["kmnist"](split) for split in ("train", "test"))
    shifts = rotated_shifts(test, angles, seed)
    return image_dataset("kmnist", KANA, train, test, shifts, subset, validation, pixels, ood)


@registry.register("notmnist", cite=("bulatov2011notmnist",))
def notmnist(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("mnist",),
) -> Dataset:
    """10,000 letters A to J in many fonts, 28 x 28 pixels: 8,000 for training, 2,000 for the test.

    About one in fifty is not a letter. As OOD set of another data set, all 10,000 are used.

    Args:
        subset: number of training images, taken from the start; None for all.
        validation: number of training images, the first ones, to hold out.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: OOD sets: names of data sets, or your own files and folders.
    """
    x, y = RAW["notmnist"]("test")
    train, test = (x[:-_LETTER_TEST], y[:-_LETTER_TEST]), (x[-_LETTER_TEST:], y[-_LETTER_TEST:])
    return image_dataset("notmnist", LETTERS, train, test, {}, subset, validation, pixels, ood)


@registry.register("cifar10", cite=("krizhevsky2009learning",))
def cifar10(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("svhn",),
) -> Dataset:
    """50,000 colour photographs of 32 x 32 pixels in ten classes and 10,000 for the test.

    `shoal.data.human_labels` has human labels of the test images.

    Args:
        subset: number of training images, taken from the start; None for all.
        validation: number of training images, the first ones, to hold out; published: 5,000.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: OOD sets: names of data sets, or your own files and folders.
    """
    train, test = (RAW["cifar10"](split) for split in ("train", "test"))
    return image_dataset("cifar10", OBJECTS, train, test, {}, subset, validation, pixels, ood)


@registry.register("svhn", cite=("netzer2011reading",))
def svhn(
    subset: int | None = None,
    validation: int = 0,
    pixels: str = "unit",
    ood: str | tuple[str, ...] = ("cifar10",),
) -> Dataset:
    """73,257 digits of house numbers in colour, 32 x 32 pixels, and the first 10,000 for the test.

    Args:
        subset: number of training images, taken from the start; None for all.
        validation: number of training images, the first ones, to hold out.
        pixels: "unit" for 0 to 1, "signed" for -1 to 1, or "standard".
        ood: OOD sets: names of data sets, or your own files and folders.
    """
    train, test = (RAW["svhn"](split) for split in ("train", "test"))
    return image_dataset("svhn", DIGITS, train, test, {}, subset, validation, pixels, ood)
