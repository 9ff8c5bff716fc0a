"""The public image sets: MNIST and its relatives, CIFAR-10 and SVHN.

All have these settings:

- `subset`: train on the first so many images; None for all.
- `validation`: keep the first so many training images back as `Dataset.validation`.
- `pixels`: `"unit"` for values from 0 to 1, `"signed"` for -1 to 1, `"standard"` for mean zero and
  variance one over the training images.
- `ood`: foreign data, names of data sets or of your own files and folders; see `outsiders`.
"""

from shoal.data.dataset import Dataset
from shoal.data.picture_set import picture_set, tumbled, turned
from shoal.data.raw import RAW
from shoal.data.registry import registry

__all__ = ["cifar10", "fashion_mnist", "kmnist", "mnist", "notmnist", "svhn"]

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
