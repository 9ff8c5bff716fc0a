"""Tensors [B, C, ...] of images and videos, and one number for each of their channels."""

import torch
from torch import Tensor

__all__ = ["CHANNELS_LAST", "alike", "all_but_channels", "per_channel", "wide"]

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Layouts of images [B, C, H, W] and of videos [B, C, T, H, W] with one channel beside the next."""


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Numbers [C] as a tensor that is spread over one like this."""
    return values.view(1, -1, *[1] * (like.ndim - 2))


def all_but_channels(t: Tensor) -> list[int]:
    """The axes over which a channel extends."""
    return [axis for axis in range(t.ndim) if axis != 1]


def wide(t: Tensor) -> Tensor:
    """Half precision as single, everything else as it is."""
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def alike(t: Tensor, x: Tensor) -> Tensor:
    """`t` with its channels last in memory, as those of x are."""
    return t.contiguous(memory_format=CHANNELS_LAST.get(x.ndim, torch.contiguous_format))
