"""Images as tensors, and the rotations and shifts of them."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.arguments import checked, instance_of, number
from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import nearest

__all__ = [
    "PIXELS",
    "as_pixels",
    "fitted",
    "flipped",
    "in_range",
    "in_unit",
    "pixel_range",
    "rotated",
    "signs",
]

PIXELS = ("unit", "signed", "standard")
"""Names of the ranges of pixel values."""

_CHUNKS, _ROUNDING = 64, 1e-5


def pixel_range(name: str, images: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest value that a pixel can have.

    The range is 0 to 1 for `unit` and -1 to 1 for `signed`. With `standard` the pixels of the
    training images have mean zero and variance one over all colours, so zero is their mean grey.

    >>> pixel_range("standard", np.array([0, 0, 255, 255], dtype=np.uint8))
    (-1.0, 1.0)
    """
    if name == "unit":
        return 0.0, 1.0
    if name == "signed":
        return -1.0, 1.0
    if name == "standard":
        mean, deviation = _moments(images)
        return -mean / deviation, (1 - mean) / deviation
    raise ConfigError(f"there is no pixel range called '{name}'; {nearest(name, PIXELS)}")


def _moments(images: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of pixels from 0 to 1, from the counts of the 256 bytes."""
    chunks = np.array_split(images.reshape(-1), _CHUNKS)  # bincount widens its input
    counts = sum(np.bincount(chunk, minlength=256) for chunk in chunks)
    share, shade = counts / images.size, np.arange(256) / 255
    mean = float(share @ shade)
    deviation = float(share @ (shade - mean) ** 2) ** 0.5
    if not deviation:
        raise DataError("all pixels of the training images are equal; write pixels = 'unit'")
    return mean, deviation


def as_pixels(images: np.ndarray) -> Tensor:
    """Bytes of any shape as floats from 0 to 1."""
    return torch.from_numpy(np.require(images, requirements=["C", "W"])).float().div_(255)


def in_range(x: Tensor, wanted: tuple[float, float]) -> Tensor:
    """Values from 0 to 1, rescaled to another range.

    >>> in_range(torch.tensor([0.0, 0.5, 1.0]), (-1.0, 1.0))
    tensor([-1.,  0.,  1.])
    """
    low, high = wanted
    return x if (low, high) == (0.0, 1.0) else x * (high - low) + low


def in_unit(x: Tensor, limits: tuple[float, float]) -> Tensor:
    """Values of a range, rescaled to 0 to 1; the inverse of `in_range`.

    >>> in_unit(torch.tensor([-1.0, 0.0, 1.0]), (-1.0, 1.0))
    tensor([0.0000, 0.5000, 1.0000])
    """
    low, high = limits
    if (low, high) == (0.0, 1.0):
        return x
    unit = (x - low) / (high - low)
    ends = unit.clamp(0, 1)
    return torch.where((unit - ends).abs() < _ROUNDING, ends, unit)


def fitted(x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Inputs in the training shape: rows, grey images and channels-last images are converted.

    >>> fitted(torch.zeros(5, 28, 28), (1, 28, 28), "mine").shape
    torch.Size([5, 1, 28, 28])
    """
    actual = tuple(x.shape[1:])
    if actual == shape:
        return x
    if len(shape) == 3 and actual == (*shape[1:], shape[0]):
        return x.permute(0, 3, 1, 2).contiguous()
    flat, grey = (math.prod(shape),), shape[0] == 1 and actual == shape[1:]
    if grey or actual == flat or (shape == flat and math.prod(actual) == shape[0]):
        return x.reshape(-1, *shape)
    raise DataError(
        f"{name} has inputs of shape {actual}, but training inputs have shape {shape}, that is "
        f"{flat[0]} numbers per row; they must agree"
    )


def _angle(name: str, value: Any) -> Tensor | float:
    return value if isinstance(value, Tensor) else number(name, value)


@checked(images=instance_of(Tensor, "a tensor of images"), degrees=_angle)
def rotated(images: Tensor, degrees: Tensor | float) -> Tensor:
    """Images [B, C, H, W], each rotated anticlockwise about its centre by its own angle.

    Interpolation is bilinear, with zeros outside the image. The shape stays, so corners are lost.

    >>> rotated(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90.0).round()
    tensor([[[[2., 4.],
              [1., 3.]]]])
    """
    if images.ndim != 4:
        raise DataError(f"only images [B, C, H, W] can be rotated, not shape {list(images.shape)}")
    if isinstance(degrees, Tensor) and degrees.shape not in ((), (1,), (len(images),)):
        raise DataError(f"degrees has shape {list(degrees.shape)}; wanted one angle per image")
    height, width = images.shape[-2:]
    angle = torch.as_tensor(degrees, dtype=images.dtype, device=images.device).deg2rad()
    angle = angle.expand(len(images))
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    # The grid is in units of half an image side, hence the ratio of the sides off the diagonal.
    across = torch.stack([cos, -sin * height / width, zero], -1)
    down = torch.stack([sin * width / height, cos, zero], -1)
    shape = list(images.shape)
    grid = F.affine_grid(torch.stack([across, down], -2), shape, align_corners=False)
    return F.grid_sample(images, grid, padding_mode="zeros", align_corners=False)


def signs(n: int, generator: torch.Generator) -> Tensor:
    """A random sign for each of `n` images, so that a shift has no preferred direction."""
    return 2.0 * torch.randint(2, (n,), generator=generator) - 1.0


def flipped(images: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """Images [B, C, H, W] mirrored left to right and top to bottom by masks [B]."""
    turned = torch.where(across[:, None, None, None], images.flip(3), images)
    return torch.where(down[:, None, None, None], turned.flip(2), turned)
