"""What JPEG loses, without its files: colour transform, cosine transform, quantisation and back.

The tables are those of annex K of ITU-T T.81 (1992), scaled by the quality as in the widespread
library of the Independent JPEG Group; colour is kept at half the resolution. The entropy coding
that follows in a file loses nothing and is left out.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["compressed", "cosines", "table"]

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
    """Images [B, 1 or 3, H, W] in [0, 1] as they come back from a JPEG file.

    Args:
        images: rounded to bytes first.
        quality: from 1 to 100.
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
    """Quantisation steps [8, 8] at a quality: the standard ones at 50, finer above.

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
    """Means of 2 x 2 bytes; halves are rounded down and up by turns, so that no colour drifts."""
    height, width = planes.shape[-2:]
    even = F.pad(planes, (0, width % 2, 0, height % 2), mode="replicate")
    sums = 4 * F.avg_pool2d(even, 2)
    return ((sums + 1 + torch.arange(sums.shape[-1], device=planes.device) % 2) / 4).floor()
