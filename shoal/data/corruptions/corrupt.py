"""Images made worse in a way that has a name and a severity."""

import operator

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.data.corruptions.chance import Chance
from shoal.data.corruptions.registry import SEVERITIES, registry

__all__ = ["check_images", "check_severity", "corrupt"]

_AT_ONCE = 2**22
"""Pixel values that are worked on together: enough to keep a GPU busy, little in memory."""


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    seed: int = 0,
    *,
    first: int = 0,
    device: str | torch.device | None = None,
) -> Tensor:
    """Images [B, 1 or 3, H, W] in [0, 1], corrupted; shape, type and device stay.

    What happens to image i depends on the seed, the corruption, the severity and i, and on nothing
    else: parts of a data set can be corrupted in any order, with `first` the place of the first.

    >>> corrupt(torch.full((1, 1, 4, 4), 0.5), "brightness", 3)[0, 0, 0]
    tensor([0.6500, 0.6500, 0.6500, 0.6500])

    Args:
        images: grey or coloured.
        name: one of `shoal list corruptions`.
        severity: 1 to 5.
        seed: chooses everything random.
        first: index of the first image.
        device: where to compute; None stays where the images are.
    """
    entry, severity = registry[name], check_severity(severity)
    check_images(images)
    done = torch.empty_like(images)
    count = max(1, _AT_ONCE // images[0].numel())
    there = images.device if device is None else torch.device(device)
    exact = torch.float64 if images.dtype == torch.float64 else torch.float32
    for start in range(0, len(images), count):
        part = images[start : start + count].to(there, exact)
        index = torch.arange(len(part), device=there) + first + start
        chance = Chance(seed, f"{name}-{severity}", index)
        done[start : start + count] = entry(part, chance, severity)
    return done


def check_severity(severity: int) -> int:
    """The severity, or an error that says which there are."""
    try:
        whole = operator.index(severity)
    except TypeError:
        whole = 0
    if whole not in SEVERITIES:
        raise ConfigError(f"a severity is a whole number from 1 to 5, not {severity!r}")
    return whole


def check_images(images: Tensor) -> None:
    """Refuse what is not at least one image of at least 4 x 4 pixels in [0, 1]."""
    shape = list(images.shape)
    if len(shape) != 4 or shape[1] not in (1, 3) or not len(images) or min(shape[2:]) < 4:
        raise DataError(
            f"only images [B, 1 or 3, H, W] of at least 4 x 4 pixels can be corrupted, "
            f"not shape {shape}"
        )
    if not images.is_floating_point():
        raise DataError(f"images must be numbers from 0 to 1, not {images.dtype}; divide by 255")
    low, high = (float(end) for end in images.aminmax())
    if not (low >= 0 and high <= 1):
        raise DataError(
            f"images must lie in [0, 1] to be corrupted, not in [{low:.3g}, {high:.3g}]; "
            f"corrupt them before they are normalised"
        )
