"""Four corruptions for validation, which published means do not include."""

import torch
from torch import Tensor

from shoal.data.corruptions.filters import blurred, luminance
from shoal.data.corruptions.registry import Draws, corruption

__all__ = ["gaussian_blur", "saturate", "spatter", "speckle_noise"]

_WATER = (175 / 255, 238 / 255, 238 / 255)
_MUD = (63 / 255, 42 / 255, 20 / 255)
_SURE = 0.8


@corruption("speckle-noise", (0.06, 0.1, 0.12, 0.16, 0.2), standard=False)
def speckle_noise(images: Tensor, draws: Draws, stddev: float) -> Tensor:
    """Noise that grows with the light, x + x N(0, c²)."""
    return images + images * stddev * draws.normal("noise", *images.shape[1:]).to(images)


@corruption("gaussian-blur", (0.4, 0.6, 0.7, 0.8, 1.0), standard=False)
def gaussian_blur(images: Tensor, draws: Draws, sigma: float) -> Tensor:
    """Gaussian blur of c pixels."""
    return blurred(images, sigma)


@corruption(
    "spatter",
    (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1.0, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    standard=False,
)
def spatter(
    images: Tensor,
    draws: Draws,
    mean: float,
    stddev: float,
    smooth: float,
    cut: float,
    strength: float,
    mud: int,
) -> Tensor:
    """Drops on the lens, of water at severities 1 to 3 and of mud at 4 and 5.

    Drops are where a layer N(mean, stddev²), blurred by `smooth`, is above `cut`. Water is added in
    the shape of that layer, at most `strength` bright; the published shading of each drop by its
    rim is left out. Mud covers the drops, their shape blurred by `strength` and cut at 0.8.
    """
    noise = draws.normal("drops", 1, *images.shape[-2:]).to(images)
    layer = blurred(mean + stddev * noise, smooth)
    if mud:
        shape = blurred((layer > cut).to(images), strength)
        cover = torch.where(shape < _SURE, 0.0, shape)
        return images * (1 - cover) + cover * _tint(images, _MUD)
    drops = torch.where(layer < cut, 0.0, layer)
    brightest = drops.amax((1, 2, 3), keepdim=True).clamp(min=cut)
    return images + strength * drops / brightest * _tint(images, _WATER)


def _tint(images: Tensor, colour: tuple[float, float, float]) -> Tensor:
    tint = images.new_tensor(colour).view(1, 3, 1, 1)
    return luminance(tint) if images.shape[1] == 1 else tint


@corruption(
    "saturate",
    ((0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2)),
    standard=False,
    colour=True,
)
def saturate(images: Tensor, draws: Draws, factor: float, more: float) -> Tensor:
    """Paler, then gaudier colours: the saturation s of a pixel becomes a s + b within [0, 1].

    With v = max(r, g, b), a channel is v (1 - s f) for an f that the hue decides, so it moves on
    the line through v. Pixels without a hue turn reddish, as published. A grey image has no
    colours and stays unchanged.
    """
    if images.shape[1] == 1:
        return images
    value = images.amax(1, keepdim=True)
    depth = value - images.amin(1, keepdim=True)
    grey = depth <= 0
    saturation = depth / value.clamp(min=1e-12)
    changed = (factor * saturation + more).clamp(0, 1)
    red = images.new_tensor((0.0, 1.0, 1.0)).view(1, 3, 1, 1) * value
    missing = torch.where(grey, red, (value - images) / saturation.clamp(min=1e-12))
    return value - changed * missing
