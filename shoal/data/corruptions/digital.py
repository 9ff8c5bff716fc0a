"""Of processing: brightness, contrast, stretching, coarse pixels, compression."""

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.data.corruptions.chance import Chance
from shoal.data.corruptions.filters import blurred, separable
from shoal.data.corruptions.jpeg import compressed
from shoal.data.corruptions.registry import corruption

__all__ = ["box", "brightness", "contrast", "elastic_transform", "jpeg_compression", "pixelate"]


@corruption("brightness", (0.05, 0.1, 0.15, 0.2, 0.3))
def brightness(images: Tensor, chance: Chance, more: float) -> Tensor:
    """More light: the value v = max(r, g, b) becomes min(v + c, 1), hue and saturation stay.

    All channels of a pixel are then multiplied by the same number; black becomes grey.
    """
    value = images.amax(1, keepdim=True)
    brighter = (value + more).clamp(max=1)
    return torch.where(value > 0, images * (brighter / value.clamp(min=1e-12)), brighter)


@corruption("contrast", (0.75, 0.5, 0.4, 0.3, 0.15))
def contrast(images: Tensor, chance: Chance, keep: float) -> Tensor:
    """Less contrast: c (x - m) + m, where m is the mean of the channel over the image."""
    mean = images.mean((2, 3), keepdim=True)
    return keep * (images - mean) + mean


@corruption(
    "elastic-transform",
    ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
)
def elastic_transform(
    images: Tensor, chance: Chance, stretch: float, smooth: float, tilt: float
) -> Tensor:
    """Stretched rubber: an affine map, then a smooth field of displacements.

    Three points round the centre move by U(-tilt, tilt), and the image with them; then each pixel
    is displaced by `stretch` times uniform noise blurred by `smooth`, all in units of the side.
    """
    side = images.shape[-2]
    tilted = _sampled(images, _tilted(images, chance, tilt * side), align_corners=True)
    if stretch == 0:
        return tilted
    field = chance.uniform("field", 2, *images.shape[-2:], low=-1, high=1).to(images)
    shift = stretch * side * blurred(field, smooth * side, truncate=3.0, border="reflect")
    return _sampled(tilted, _pixels(images) + shift.permute(0, 2, 3, 1), align_corners=False)


def _pixels(images: Tensor) -> Tensor:
    """Column and row of every pixel [H, W, 2]."""
    rows, columns = (torch.arange(side).to(images) for side in images.shape[-2:])
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)


def _tilted(images: Tensor, chance: Chance, tilt: float) -> Tensor:
    """Where each pixel [B, H, W, 2] comes from, so that three points move as they were drawn to."""
    height, width = images.shape[-2:]
    x, y, size = width // 2, height // 2, min(height, width) // 3
    corners = [(x + size, y + size), (x + size, y - size), (x - size, y - size)]
    before = images.new_tensor(corners)
    after = before + chance.uniform("tilt", 3, 2, low=-tilt, high=tilt).to(images)
    rows = torch.cat([after, torch.ones_like(after[..., :1])], -1)
    back = torch.linalg.solve(rows, before.expand_as(after))
    return torch.einsum("hwi,bij->bhwj", _pixels(images), back[:, :2]) + back[:, None, None, 2]


def _sampled(images: Tensor, places: Tensor, align_corners: bool) -> Tensor:
    """Images at places in pixels, mirrored at the border pixels or, unaligned, at the edge."""
    sides = images.new_tensor([images.shape[-1], images.shape[-2]])
    grid = 2 * places / (sides - 1) - 1 if align_corners else (2 * places + 1) / sides - 1
    options = {"padding_mode": "reflection", "align_corners": align_corners}
    return F.grid_sample(images, grid, **options)


@corruption("pixelate", (0.95, 0.9, 0.85, 0.75, 0.65))
def pixelate(images: Tensor, chance: Chance, share: float) -> Tensor:
    """Coarse pixels: shrunk to a share c of the side by box means, and enlarged again."""
    sizes = [(side, int(share * side)) for side in images.shape[-2:]]
    down, across = (box(side, few) @ box(few, side) for side, few in sizes)
    return separable(images, down.to(images), across.to(images))


def box(size: int, side: int) -> Tensor:
    """A row of `side` pixels resized to `size` [size, side] by means over the pixels of a box.

    A pixel belongs to the box in which its centre lies.

    >>> box(1, 2), box(2, 1)
    (tensor([[0.5000, 0.5000]]), tensor([[1.],
            [1.]]))
    """
    scale = side / size
    reach = max(scale, 1.0) / 2
    centre = (torch.arange(size).double()[:, None] + 0.5) * scale
    offset = torch.arange(side) + 0.5 - centre
    inside = (offset > -reach) & (offset <= reach)
    return (inside / inside.sum(1, keepdim=True)).float()


@corruption("jpeg-compression", (80, 65, 58, 50, 40))
def jpeg_compression(images: Tensor, chance: Chance, quality: int) -> Tensor:
    """The losses of JPEG at a quality from 1 to 100."""
    return compressed(images, quality)
