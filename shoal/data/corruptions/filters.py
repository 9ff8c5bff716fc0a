"""Linear filters of images [B, C, H, W] that several corruptions share.

Blurs and changes of size are separable, so they are products with a small matrix for each side.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["blurred", "convolved", "luminance", "motion_blurred", "separable", "zoomed"]

_LUMINANCE = (0.299, 0.587, 0.114)


def luminance(images: Tensor) -> Tensor:
    """Luminance [B, 1, H, W] by the television standard; a grey image stays unchanged."""
    if images.shape[1] == 1:
        return images
    return torch.einsum("bchw,c->bhw", images, images.new_tensor(_LUMINANCE)).unsqueeze(1)


def separable(images: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Rows of pixels mixed by the matrix `down` [H', H], columns by `across` [W', W]."""
    return down @ images @ across.T


def blurred(images: Tensor, sigma: float, truncate: float = 4.0, border: str = "nearest") -> Tensor:
    """Gaussian blur, cut off at `truncate` standard deviations.

    Args:
        images: [B, C, H, W].
        sigma: standard deviation in pixels.
        truncate: radius of the filter in standard deviations.
        border: "nearest" repeats the last pixel, "reflect" mirrors the image at its edge.
    """
    down, across = (_gaussian(side, sigma, truncate, border) for side in images.shape[-2:])
    return separable(images, down.to(images), across.to(images))


def _gaussian(side: int, sigma: float, truncate: float, border: str) -> Tensor:
    """The blur of a row of `side` pixels as a matrix whose rows sum to one."""
    reach = int(truncate * sigma + 0.5)
    offset = torch.arange(-reach, reach + 1)
    weight = torch.ones(1) if reach == 0 else (-0.5 * (offset / sigma).square()).exp()
    place = torch.arange(side)[:, None] + offset
    if border == "nearest":
        place = place.clamp(0, side - 1)
    else:
        place = place.remainder(2 * side)
        place = torch.minimum(place, 2 * side - 1 - place)
    matrix = torch.zeros(side, side, dtype=torch.float64)
    return matrix.scatter_add_(1, place, (weight / weight.sum()).double().expand(side, -1))


def convolved(images: Tensor, kernel: Tensor) -> Tensor:
    """Every channel filtered by a symmetric kernel [k, k], mirrored at the border pixels."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (len(kernel) // 2,) * 4, mode="reflect")
    total = torch.zeros_like(images)
    # an explicit sum, since a GPU may compute convolutions in low precision
    for row, column in kernel.nonzero().tolist():
        near = padded[..., row : row + height, column : column + width]
        total += float(kernel[row, column]) * near
    return total


def motion_blurred(images: Tensor, radius: int, sigma: float, degrees: Tensor) -> Tensor:
    """Blur along a line: a half Gaussian of 2 radius + 1 pixels, with one angle per image.

    Args:
        images: [B, C, H, W].
        radius: half the length of the line.
        sigma: standard deviation of the Gaussian.
        degrees: direction of the line, clockwise from the right [B].
    """
    height, width = images.shape[-2:]
    steps = torch.arange(2 * radius + 1, device=images.device)
    weight = (-0.5 * (steps / sigma).square()).exp()
    angle = degrees.deg2rad()[:, None]
    right, below = ((steps * side - 0.5).ceil().long() for side in (angle.cos(), angle.sin()))
    rows, columns = (torch.arange(side, device=images.device) for side in (height, width))
    pixels, smeared = images.flatten(2), torch.zeros_like(images).flatten(2)
    for step, share in enumerate((weight / weight.sum()).tolist()):
        row = (rows + below[:, step, None]).clamp(0, height - 1)
        column = (columns + right[:, step, None]).clamp(0, width - 1)
        place = (row[:, :, None] * width + column[:, None]).flatten(1)
        smeared += share * pixels.gather(2, place[:, None].expand_as(pixels))
    return smeared.view_as(images)


def zoomed(images: Tensor, factor: float) -> Tensor:
    """The centre of the images, enlarged to their size by linear interpolation."""
    sides = images.shape[-2:]
    kept = [math.ceil(side / factor) for side in sides]
    top, left = ((side - keep) // 2 for side, keep in zip(sides, kept, strict=True))
    centre = images[..., top : top + kept[0], left : left + kept[1]]
    size = [max(side, round(keep * factor)) for side, keep in zip(sides, kept, strict=True)]
    large = F.interpolate(centre, size, mode="bilinear", align_corners=True)
    top, left = ((big - side) // 2 for side, big in zip(sides, size, strict=True))
    return large[..., top : top + sides[0], left : left + sides[1]]
