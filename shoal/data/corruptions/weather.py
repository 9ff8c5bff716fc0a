"""Weather: snow, frost, fog."""

import torch
from torch import Tensor

from shoal.data.corruptions.chance import Chance
from shoal.data.corruptions.filters import luminance, motion_blurred, zoomed
from shoal.data.corruptions.plasma import ice, plasma
from shoal.data.corruptions.registry import corruption

__all__ = ["fog", "frost", "snow"]


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
    chance: Chance,
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
    layer = mean + stddev * chance.normal("flakes", 1, *images.shape[-2:]).to(images)
    layer = zoomed(layer, zoom)
    flakes = torch.where(layer < cut, 0.0, layer).clamp(0, 1)
    fall = chance.uniform("fall", low=-135, high=-45).to(images)
    flakes = motion_blurred(flakes, radius, sigma, fall)
    white = torch.maximum(images, 1.5 * luminance(images) + 0.5)
    return keep * images + (1 - keep) * white + flakes + flakes.flip(2, 3)


@corruption("frost", ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)))
def frost(images: Tensor, chance: Chance, keep: float, share: float) -> Tensor:
    """Ice on the lens, a x + b ice.

    The published textures are photographs that are not Shoal's to give away. These are drawn by
    `ice` instead, for each image its own, so results are near the published ones and not equal.
    """
    pane = ice(chance, *images.shape[-2:]).to(images)
    return keep * images + share * (luminance(pane) if images.shape[1] == 1 else pane)


@corruption("fog", ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75)))
def fog(images: Tensor, chance: Chance, thickness: float, decay: float) -> Tensor:
    """Clouds of fog, (x + c plasma) m / (m + c), where m is the brightest value of the image."""
    height, width = images.shape[-2:]
    clouds = plasma(chance, height, width, decay).to(images).unsqueeze(1)
    brightest = images.amax((1, 2, 3), keepdim=True)
    return (images + thickness * clouds) * brightest / (brightest + thickness)
