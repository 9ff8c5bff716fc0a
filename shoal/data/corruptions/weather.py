"""Weather: snow, frost, fog."""

import math

import torch
from torch import Tensor

from shoal.data.corruptions.filters import luminance, motion_blurred, zoomed
from shoal.data.corruptions.registry import Draws, corruption

__all__ = ["fog", "frost", "ice", "plasma", "snow"]

_NUCLEI, _FOLD = 3, math.pi / 3

_BLUE = (0.88, 0.96, 1.0)


def plasma(draws: Draws, height: int, width: int, decay: float) -> Tensor:
    """Fractal clouds [B, H, W] from 0 to 1 by the diamond-square algorithm on a torus.

    Each new point is the mean of its four neighbours plus noise, whose size falls by `decay`² when
    their distance halves: the square, since the published generator scales its noise twice.
    Fournier, Fussell & Carpenter (1982).
    """
    side = 1 << max(1, math.ceil(math.log2(max(height, width))))
    cloud = torch.zeros(len(draws.index), side, side, device=draws.index.device).double()
    step, size = side, 1.0
    while step > 1:
        half = step // 2

        def noise(what: str, step: int = step, size: float = size) -> Tensor:
            count = side // step
            return draws.uniform(f"{what}/{step}", count, count, low=-size, high=size)

        corner = cloud[:, ::step, ::step]
        below = corner + corner.roll(-1, 1)
        cloud[:, half::step, half::step] = (below + below.roll(-1, 2)) / 4 + noise("square")
        centre = cloud[:, half::step, half::step]
        beside = corner + corner.roll(-1, 2) + centre + centre.roll(1, 1)
        cloud[:, ::step, half::step] = beside / 4 + noise("across")
        beside = corner + corner.roll(-1, 1) + centre + centre.roll(1, 2)
        cloud[:, half::step, ::step] = beside / 4 + noise("down")
        step, size = half, size / decay**2
    low, high = cloud.amin((1, 2), keepdim=True), cloud.amax((1, 2), keepdim=True)
    return ((cloud - low) / (high - low))[:, :height, :width]


def ice(draws: Draws, height: int, width: int) -> Tensor:
    """Frost on a window pane [B, 3, H, W]: sixfold crystals over pale, bluish clouds.

    Round each of three places a star of six arms grows, and from its arms side branches at 60
    degrees; the plane is folded into one sixth, where all arms and branches are straight lines.
    """
    film = plasma(draws, height, width, 1.5)
    across, down, turn, gap = draws.uniform("crystal", 4, _NUCLEI, 1, 1).unbind(1)
    rows = torch.arange(height, device=film.device)[:, None] - height * (1.4 * down - 0.2)
    columns = torch.arange(width, device=film.device) - width * (1.4 * across - 0.2)
    radius = (rows.square() + columns.square()).sqrt()
    angle = torch.atan2(rows.expand_as(radius), columns.expand_as(radius)) + _FOLD * turn
    angle = (angle + _FOLD / 2).remainder(_FOLD) - _FOLD / 2
    along, beside = radius * angle.cos(), radius * angle.sin().abs()
    spacing = min(height, width) * (0.12 + 0.08 * gap)
    branch = (along * math.sin(_FOLD) - beside * math.cos(_FOLD)) / spacing
    needle = torch.maximum(
        (-beside / (0.25 * spacing)).exp(),
        0.8 * (-(branch - branch.round()).abs() / 0.16).exp(),
    )
    reach = (-0.5 * (radius / (0.5 * max(height, width))).square()).exp()
    crystal = (needle * reach).amax(1)
    pane = (0.2 + 0.35 * film + 0.55 * crystal).clamp(0, 1)
    return pane[:, None] * pane.new_tensor(_BLUE)[:, None, None]


@corruption(
    "snow",
    (
        (0.1, 0.2, 1.0, 0.6, 8, 3.0, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4.0, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4.0, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6.0, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12.0, 0.8),
    ),
)
def snow(
    images: Tensor,
    draws: Draws,
    mean: float,
    stddev: float,
    zoom: float,
    cut: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Tensor:
    """Falling snow: bright flakes, smeared by their fall, over a whitened scene.

    The flakes are a layer N(mean, stddev²), zoomed, without what is below `cut`, and blurred along
    a line at -135 to -45 degrees; they are added twice, once upside down. The scene keeps a share
    of its colours and takes the rest from max(x, 1.5 grey + 0.5).
    """
    layer = mean + stddev * draws.normal("flakes", 1, *images.shape[-2:]).to(images)
    layer = zoomed(layer, zoom)
    flakes = torch.where(layer < cut, 0.0, layer).clamp(0, 1)
    fall = draws.uniform("fall", low=-135, high=-45).to(images)
    flakes = motion_blurred(flakes, radius, sigma, fall)
    white = torch.maximum(images, 1.5 * luminance(images) + 0.5)
    return keep * images + (1 - keep) * white + flakes + flakes.flip(2, 3)


@corruption("frost", ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)))
def frost(images: Tensor, draws: Draws, keep: float, share: float) -> Tensor:
    """Ice on the lens, a x + b ice.

    The published textures are photographs that Shoal may not distribute. Shoal draws a texture for
    each image with `ice` instead, so results are close to published results, but not equal.
    """
    pane = ice(draws, *images.shape[-2:]).to(images)
    return keep * images + share * (luminance(pane) if images.shape[1] == 1 else pane)


@corruption("fog", ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)))
def fog(images: Tensor, draws: Draws, thickness: float, decay: float) -> Tensor:
    """Clouds of fog, (x + c plasma) m / (m + c), where m is the brightest value of the image."""
    height, width = images.shape[-2:]
    clouds = plasma(draws, height, width, decay).to(images).unsqueeze(1)
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + thickness * clouds) * brightest / (brightest + thickness)
