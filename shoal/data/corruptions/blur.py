"""Blurs: out of focus, through frosted glass, of a moving and of a zooming camera."""

import torch
from torch import Tensor

from shoal.data.corruptions.filters import blurred, convolved, motion_blurred, zoomed
from shoal.data.corruptions.registry import Draws, corruption

__all__ = ["defocus_blur", "disc", "glass_blur", "motion_blur", "zoom_blur"]


@corruption("defocus-blur", ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)))
def defocus_blur(images: Tensor, draws: Draws, radius: float, smoothing: float) -> Tensor:
    """Out of focus: every point becomes a disc, which is itself smoothed."""
    return convolved(images, disc(radius, smoothing))


def disc(radius: float, smoothing: float) -> Tensor:
    """The pixels within `radius` of the centre, blurred by a Gaussian of 3 x 3 pixels."""
    reach = int(radius) + 1
    offset = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (offset.square()[:, None] + offset.square() <= radius**2).double()
    near = (-0.5 * (torch.tensor([-1.0, 0.0, 1.0]).double() / smoothing).square()).exp()
    gauss = near[:, None] * near / near.sum() ** 2
    smooth = torch.nn.functional.conv2d(inside[None, None], gauss[None, None], padding=1)[0, 0]
    return smooth / smooth.sum()


@corruption("glass-blur", ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)))
def glass_blur(images: Tensor, draws: Draws, sigma: float, reach: int, passes: int) -> Tensor:
    """Frosted glass: pixels take the value of a neighbour, `passes` times, between Gaussian blurs.

    The published code swaps two pixels of an array in place, and the second assignment reads the
    result of the first: a pixel takes the value of its neighbour, and the neighbour keeps it. Real
    swaps would carry a pixel across the image.
    """
    soft = blurred(images, sigma)
    for number in range(passes):
        soft = _displaced(soft, draws, f"pass {number}", reach)
    return blurred(soft, sigma)


def _displaced(images: Tensor, draws: Draws, what: str, reach: int) -> Tensor:
    """Every inner pixel, taken from -reach to reach - 1 rows and columns away."""
    height, width = images.shape[-2:]
    offset = draws.uniform(what, 2, height, width, low=-reach, high=reach).floor().long()
    row, column = (torch.arange(size, device=images.device) for size in (height, width))
    inside = [(at > reach) & (at <= len(at) - reach) for at in (row, column)]
    offset = torch.where(inside[0][:, None] & inside[1], offset, 0)
    place = (row[:, None] + offset[:, 0]) * width + column + offset[:, 1]
    flat = images.flatten(2)
    return flat.gather(2, place.flatten(1)[:, None].expand_as(flat)).view_as(images)


@corruption("motion-blur", ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)))
def motion_blur(images: Tensor, draws: Draws, radius: int, sigma: float) -> Tensor:
    """A moving camera: a one-sided Gaussian along a line at -45 to 45 degrees."""
    degrees = draws.uniform("angle", low=-45, high=45).to(images)
    return motion_blurred(images, radius, sigma, degrees)


@corruption("zoom-blur", (106, 111, 116, 121, 126))
def zoom_blur(images: Tensor, draws: Draws, limit: int) -> Tensor:
    """A camera that moves forward: mean of the image and its zooms by 1, 1.01, ... below c."""
    factors = [percent / 100 for percent in range(100, limit)]
    total = images.clone()
    for factor in factors:
        total += zoomed(images, factor)
    return total / (len(factors) + 1)
