"""Augmentation of whole batches where they lie, the same for every member."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import Registry

__all__ = ["Augmentation", "CropFlip", "registry"]

registry = Registry("augmentation")

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
"""From inputs [B, ...] and a generator on the CPU to inputs of the same shape."""


@registry.register("crop-flip")
@dataclass(frozen=True)
class CropFlip:
    """Random crops of the padded images, and mirror images.

    Attributes:
        padding: zeros around each image, so that it can move by as many pixels.
        flip: mirror half of the images.
    """

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ConfigError(f"padding must be zero or positive, not {self.padding}")

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Images [B, C, H, W], gathered by index: no loop over images."""
        if x.ndim != 4:
            raise DataError(f"crop-flip wants images [B, C, H, W], not inputs {tuple(x.shape)}")
        images, _, height, width = x.shape
        top, left = torch.randint(0, 2 * self.padding + 1, (2, images, 1), generator=generator)
        rows = (top + torch.arange(height)).to(x.device)
        columns = left + torch.arange(width)
        if self.flip:
            mirrored = torch.rand(images, 1, generator=generator) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        columns = columns.to(x.device)
        padded = F.pad(x, (self.padding,) * 4).permute(0, 2, 3, 1)
        index = torch.arange(images, device=x.device)[:, None, None]
        return padded[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
