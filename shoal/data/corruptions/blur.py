"""Blurs: out of focus, through frosted glass, of a moving and of a zooming camera."""

import torch
from torch import Tensor

from shoal.data.corruptions.chance import Chance
from shoal.data.corruptions.filters import blurred, convolved, motion_blurred, zoomed
from shoal.data.corruptions.registry import corruption

__all__ = ["defocus_blur", "disc", "glass_blur", "motion_blur", "zoom_blur"]


@corruption("defocus-blur", ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1)))
def defocus_blur(images: Tensor, chance: Chance, radius: float, smoothing: float) -> Tensor:
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
def glass_blur(images: Tensor, chance: Chance, sigma: float, reach: int, passes: int) -> Tensor:
    """Frosted glass: pixels change places with a neighbour, between two Gaussian blurs.

    From the lower right to the upper left, each pixel is swapped with one at most `reach` rows and
    columns away, `passes` times over. The swaps move numbers of places, of all images at once, and
    the pixels follow in the end.
    """
    soft = blurred(images, sigma).flatten(2)
    place = _shuffled(images, chance, reach, passes)
    moved = soft.gather(2, place[:, None].expand_as(soft))
    return blurred(moved.view_as(images), sigma)


def _shuffled(images: Tensor, chance: Chance, reach: int, passes: int) -> Tensor:
    """Where the pixel at each place comes from [B, H W]."""
    height, width = images.shape[-2:]
    spots = [
        row * width + column
        for row in range(height - 1 - reach, reach - 1, -1)
        for column in range(width - 1 - reach, reach - 1, -1)
    ] * passes
    choices = 2 * reach + 1
    draw = chance.uniform("swap", 2, len(spots), high=choices).floor().long() - reach
    offset = (draw[:, 0] * width + draw[:, 1]).T.contiguous()
    place = torch.arange(height * width, device=images.device)[:, None].repeat(1, len(images))
    for spot, aside in zip(spots, offset, strict=True):
        other = (spot + aside).unsqueeze(0)
        mine, theirs = place[spot].clone(), place.gather(0, other)
        place[spot] = theirs[0]
        place.scatter_(0, other, mine.unsqueeze(0))
    return place.T


@corruption("motion-blur", ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5)))
def motion_blur(images: Tensor, chance: Chance, radius: int, sigma: float) -> Tensor:
    """A moving camera: a one-sided Gaussian along a line at -45 to 45 degrees."""
    degrees = chance.uniform("angle", low=-45, high=45).to(images)
    return motion_blurred(images, radius, sigma, degrees)


@corruption("zoom-blur", (106, 111, 116, 121, 126))
def zoom_blur(images: Tensor, chance: Chance, limit: int) -> Tensor:
    """A camera that moves forward: mean of the image and its zooms by 1, 1.01, ... below c."""
    factors = [percent / 100 for percent in range(100, limit)]
    total = images.clone()
    for factor in factors:
        total += zoomed(images, factor)
    return total / (len(factors) + 1)
