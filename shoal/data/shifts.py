"""Shifts: the same images, changed by something nameable."""

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import DataError

__all__ = ["flipped", "rotated", "signs"]


def rotated(images: Tensor, degrees: Tensor | float) -> Tensor:
    """Images [B, C, H, W], each turned anticlockwise about its centre by its own angle.

    Bilinear between pixels and zero outside the image; the shape stays, so corners are lost.

    >>> rotated(torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]]), 90.0).round()
    tensor([[[[2., 4.],
              [1., 3.]]]])
    """
    if images.ndim != 4:
        raise DataError(f"only images [B, C, H, W] can be rotated, not shape {list(images.shape)}")
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
    """Plus or minus one for each of `n` images, so that a shift has no preferred direction."""
    return 2.0 * torch.randint(2, (n,), generator=generator) - 1.0


def flipped(images: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """Images [B, C, H, W] mirrored left to right, and top to bottom, where the masks [B] say so."""
    turned = torch.where(across[:, None, None, None], images.flip(3), images)
    return torch.where(down[:, None, None, None], turned.flip(2), turned)
