"""Mild shifts: copies of inputs as they may look after training, for choices without test data.

Real inputs get noise. Images also get a translation, a lower contrast and a blur. Integers, tokens
and structures have no copies.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.random import generator

__all__ = ["CONTRAST", "NOISE", "TRANSLATION", "mild_shifts"]

NOISE = 0.3
"""Standard deviation of the noise, in standard deviations of a column or channel."""

TRANSLATION = 0.1
"""Translation, as a share of an image's side."""

CONTRAST = 0.7
"""Factor of the differences from an image's mean."""


def mild_shifts(x: object, seed: int) -> dict[str, Tensor]:
    """Shifted copies of inputs [N, ...] by name; empty where inputs are not real numbers.

    >>> list(mild_shifts(torch.rand(4, 3), seed=0))
    ['noise']
    >>> list(mild_shifts(torch.rand(4, 1, 8, 8), seed=0))
    ['noise', 'translation', 'contrast', 'blur']

    Args:
        x: inputs; images have the shape [N, C, H, W].
        seed: fixes the noise.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or len(x) < 2:
        return {}
    copies = {"noise": noisy(x, seed)}
    if x.ndim == 4:
        copies |= {"translation": translated(x), "contrast": flatter(x), "blur": blurred(x)}
    return copies


def noisy(x: Tensor, seed: int) -> Tensor:
    """Inputs with Gaussian noise, of the columns' or channels' standard deviation times `NOISE`."""
    kept = 1 if x.ndim == 4 else x.ndim - 1
    spread = x.std([axis for axis in range(x.ndim) if axis != kept], keepdim=True)
    drawn = torch.randn(x.shape, generator=generator(seed, "mild noise"), dtype=torch.float32)
    return x + NOISE * spread * drawn.to(x.device, x.dtype)


def translated(x: Tensor) -> Tensor:
    """Images moved down and to the right; the first row and column fill the gap."""
    for axis in (-2, -1):
        side = x.shape[axis]
        source = torch.arange(side, device=x.device) - max(round(TRANSLATION * side), 1)
        x = x.index_select(axis, source.clamp(min=0))
    return x


def flatter(x: Tensor) -> Tensor:
    """Images of lower contrast, around the mean of each image's channels."""
    mean = x.mean((-2, -1), keepdim=True)
    return mean + CONTRAST * (x - mean)


def blurred(x: Tensor) -> Tensor:
    """Images whose pixels are means of 3 x 3 pixels; the border is repeated."""
    return F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
