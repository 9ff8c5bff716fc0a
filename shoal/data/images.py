"""Images as tensors: bytes become single precision once, in the range that is asked for."""

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import nearest

__all__ = ["PIXELS", "as_pixels", "fitted", "in_range", "in_unit", "pixel_range"]

PIXELS = {"unit": (0.0, 1.0), "signed": (-1.0, 1.0)}
"""Ranges of pixel values by name."""


def pixel_range(name: str) -> tuple[float, float]:
    """The smallest and the largest value of a pixel."""
    if name not in PIXELS:
        raise ConfigError(f"there are no pixels called '{name}'; {nearest(name, PIXELS)}")
    return PIXELS[name]


def as_pixels(images: np.ndarray) -> Tensor:
    """Bytes of any shape as floats from 0 to 1."""
    return torch.from_numpy(np.require(images, requirements=["C", "W"])).float().div_(255)


def in_range(x: Tensor, wanted: tuple[float, float]) -> Tensor:
    """Values from 0 to 1 stretched to another range.

    >>> in_range(torch.tensor([0.0, 0.5, 1.0]), (-1.0, 1.0))
    tensor([-1.,  0.,  1.])
    """
    low, high = wanted
    return x if (low, high) == (0.0, 1.0) else x * (high - low) + low


def in_unit(x: Tensor, found: tuple[float, float]) -> Tensor:
    """Values of a range as values from 0 to 1; `in_range` undoes it.

    >>> in_unit(torch.tensor([-1.0, 0.0, 1.0]), (-1.0, 1.0))
    tensor([0.0000, 0.5000, 1.0000])
    """
    low, high = found
    return x if (low, high) == (0.0, 1.0) else (x - low) / (high - low)


def fitted(x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Inputs of the shape that is trained on: rows, grey images and colours last are turned.

    >>> fitted(torch.zeros(5, 28, 28), (1, 28, 28), "mine").shape
    torch.Size([5, 1, 28, 28])
    """
    found = tuple(x.shape[1:])
    if found == shape:
        return x
    if len(shape) == 3 and found == (*shape[1:], shape[0]):
        return x.permute(0, 3, 1, 2).contiguous()
    if len(shape) == 3 and (found == shape[1:] and shape[0] == 1 or found == (np.prod(shape),)):
        return x.reshape(-1, *shape)
    raise DataError(
        f"inputs of '{name}' have shape {found}, those to train on {shape}; they must agree"
    )
