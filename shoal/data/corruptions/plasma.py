"""Clouds and ice: textures made from numbers instead of photographs."""

import math

import torch
from torch import Tensor

from shoal.data.corruptions.chance import Chance

__all__ = ["ice", "plasma"]

_NUCLEI, _FOLD = 3, math.pi / 3
_BLUE = (0.88, 0.96, 1.0)


def plasma(chance: Chance, height: int, width: int, decay: float) -> Tensor:
    """Fractal clouds [B, H, W] from 0 to 1 by the diamond-square algorithm on a torus.

    Each new point is the mean of its four neighbours plus noise, whose size falls by `decay`² when
    their distance halves: the square, since the published generator scales its noise twice.
    Fournier, Fussell & Carpenter (1982).
    """
    side = 1 << max(1, math.ceil(math.log2(max(height, width))))
    cloud = torch.zeros(len(chance.index), side, side, device=chance.index.device).double()
    step, size = side, 1.0
    while step > 1:
        half = step // 2

        def noise(what: str, step: int = step, size: float = size) -> Tensor:
            count = side // step
            return chance.uniform(f"{what}/{step}", count, count, low=-size, high=size)

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


def ice(chance: Chance, height: int, width: int) -> Tensor:
    """Frost on a window pane [B, 3, H, W]: sixfold crystals over pale, bluish clouds.

    Round each of three places a star of six arms grows, and from its arms side branches at 60
    degrees; the plane is folded into one sixth, where all arms and branches are straight lines.
    """
    film = plasma(chance, height, width, 1.5)
    across, down, turn, gap = chance.uniform("crystal", 4, _NUCLEI, 1, 1).unbind(1)
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
