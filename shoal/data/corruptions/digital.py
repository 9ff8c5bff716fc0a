"""Corruptions by processing: brightness, contrast, stretching, coarse pixels, compression."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.data.corruptions.filters import blurred, separable
from shoal.data.corruptions.registry import Draws, corruption

__all__ = [
    "box",
    "brightness",
    "compressed",
    "contrast",
    "cosines",
    "elastic_transform",
    "jpeg_compression",
    "pixelate",
    "table",
]

_BLOCK = 8

_BRIGHTNESS = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)

_COLOUR = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)

_TO_YCC = (
    (0.299, 0.587, 0.114),
    (-0.168735892, -0.331264108, 0.5),
    (0.5, -0.418687589, -0.081312411),
)

_TO_RGB = ((1.0, 0.0, 1.402), (1.0, -0.344136286, -0.714136286), (1.0, 1.772, 0.0))


def compressed(images: Tensor, quality: int) -> Tensor:
    """Images [B, 1 or 3, H, W] in [0, 1] after JPEG compression.

    Args:
        images: images, which are rounded to bytes first.
        quality: JPEG quality from 1 to 100.
    """
    bytes_ = (255 * images).round()
    if images.shape[1] == 1:
        return _lossy(bytes_, table(_BRIGHTNESS, quality)) / 255
    ycc = torch.einsum("dc,bchw->bdhw", images.new_tensor(_TO_YCC), bytes_)
    bright = _lossy(ycc[:, :1].round(), table(_BRIGHTNESS, quality))
    colour = _lossy(_halved((ycc[:, 1:] + 128).round()), table(_COLOUR, quality))
    fine = F.interpolate(colour, scale_factor=2, mode="bilinear", align_corners=False)
    fine = fine[..., : images.shape[-2], : images.shape[-1]].round() - 128
    planes = torch.cat([bright, fine], 1)
    rgb = torch.einsum("cd,bdhw->bchw", images.new_tensor(_TO_RGB), planes)
    return rgb.round().clamp(0, 255) / 255


def table(standard: tuple[tuple[int, ...], ...], quality: int) -> Tensor:
    """Quantisation steps [8, 8] at a quality: the standard steps at 50, finer steps above.

    >>> table(_BRIGHTNESS, 50)[0, 0], table(_BRIGHTNESS, 75)[0, 0]
    (tensor(16.), tensor(8.))
    """
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = (torch.tensor(standard) * percent + 50) // 100
    return steps.clamp(1, 255).float()


def cosines() -> Tensor:
    """The orthonormal discrete cosine transform [8, 8] of a row of eight pixels."""
    k = torch.arange(_BLOCK, dtype=torch.float64)
    waves = torch.cos(math.pi * k[:, None] * (2 * k + 1) / (2 * _BLOCK)) * math.sqrt(2 / _BLOCK)
    waves[0] /= math.sqrt(2)
    return waves


def _lossy(planes: Tensor, steps: Tensor) -> Tensor:
    """Bytes whose blocks of 8 x 8 were rounded to multiples of `steps` in frequency."""
    height, width = planes.shape[-2:]
    padded = F.pad(planes - 128, (0, -width % _BLOCK, 0, -height % _BLOCK), mode="replicate")
    blocks = padded.unflatten(3, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK)).transpose(3, 4)
    waves, steps = cosines().to(planes), steps.to(planes)
    kept = _multiples(waves @ blocks @ waves.T, steps)
    pixels = (waves.T @ kept @ waves).transpose(3, 4).flatten(4, 5).flatten(2, 3)
    return (pixels[..., :height, :width] + 128).round().clamp(0, 255)


def _multiples(frequencies: Tensor, steps: Tensor) -> Tensor:
    """The nearest multiple of each step, halves away from zero, of frequencies in whole eighths.

    Encoders compute in eighths, so that halves are frequent and the direction of rounding matters.
    """
    eighths = (8 * frequencies).round()
    return eighths.sign() * ((eighths.abs() + 4 * steps) / (8 * steps)).floor() * steps


def _halved(planes: Tensor) -> Tensor:
    """Means of 2 x 2 bytes; halves are rounded down and up in turn, to avoid a bias."""
    height, width = planes.shape[-2:]
    even = F.pad(planes, (0, width % 2, 0, height % 2), mode="replicate")
    sums = 4 * F.avg_pool2d(even, 2)
    return ((sums + 1 + torch.arange(sums.shape[-1], device=planes.device) % 2) / 4).floor()


@corruption("brightness", (0.05, 0.1, 0.15, 0.2, 0.3))
def brightness(images: Tensor, draws: Draws, more: float) -> Tensor:
    """More light: the value v = max(r, g, b) becomes min(v + c, 1), hue and saturation stay.

    All channels of a pixel are then multiplied by the same number; black becomes grey.
    """
    value = images.amax(1, keepdim=True)
    brighter = (value + more).clamp(max=1)
    return torch.where(value > 0, images * (brighter / value.clamp(min=1e-12)), brighter)


@corruption("contrast", (0.75, 0.5, 0.4, 0.3, 0.15))
def contrast(images: Tensor, draws: Draws, keep: float) -> Tensor:
    """Less contrast: c (x - m) + m, where m is the mean of the channel over the image."""
    mean = images.mean((2, 3), keepdim=True)
    return keep * (images - mean) + mean


@corruption(
    "elastic-transform",
    ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
)
def elastic_transform(
    images: Tensor, draws: Draws, stretch: float, smooth: float, tilt: float
) -> Tensor:
    """Stretched rubber: an affine map, then a smooth field of displacements.

    Three points round the centre move by U(-tilt, tilt), and the image with them; then each pixel
    is displaced by `stretch` times uniform noise blurred by `smooth`, all in units of the side.
    """
    side = images.shape[-2]
    tilted = _sampled(images, _tilted(images, draws, tilt * side), align_corners=True)
    if stretch == 0:
        return tilted
    field = draws.uniform("field", 2, *images.shape[-2:], low=-1, high=1).to(images)
    shift = stretch * side * blurred(field, smooth * side, truncate=3.0, border="reflect")
    return _sampled(tilted, _pixels(images) + shift.permute(0, 2, 3, 1), align_corners=False)


def _pixels(images: Tensor) -> Tensor:
    """Column and row of every pixel [H, W, 2]."""
    rows, columns = (torch.arange(side).to(images) for side in images.shape[-2:])
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)


def _tilted(images: Tensor, draws: Draws, tilt: float) -> Tensor:
    """Source of each pixel [B, H, W, 2] under the affine map of three randomly moved points."""
    height, width = images.shape[-2:]
    x, y, size = width // 2, height // 2, min(height, width) // 3
    corners = [(x + size, y + size), (x + size, y - size), (x - size, y - size)]
    before = images.new_tensor(corners)
    after = before + draws.uniform("tilt", 3, 2, low=-tilt, high=tilt).to(images)
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
def pixelate(images: Tensor, draws: Draws, share: float) -> Tensor:
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
def jpeg_compression(images: Tensor, draws: Draws, quality: int) -> Tensor:
    """The losses of JPEG at a quality from 1 to 100."""
    return compressed(images, quality)
