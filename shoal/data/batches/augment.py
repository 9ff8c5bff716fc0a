"""Augmentation of whole batches on their device, shared by all members or per member."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError, DataError
from shoal.core.random import hashed, uniform
from shoal.core.registry import Registry
from shoal.core.structure import Inputs

__all__ = ["Augmentation", "CropFlip", "augmented", "is_per_member", "registry"]

registry = Registry("augmentation")

Augmentation = Callable[[Tensor, Tensor], Tensor]
"""From inputs [B, ...] and a key (see `shoal.core.random`) to inputs of the same shape."""


def is_per_member(augment: Augmentation | None) -> bool:
    """Whether each member has its own inputs."""
    return bool(getattr(augment, "per_member", False))


def augmented(
    augment: Augmentation, x: Inputs, key: Tensor, members: range, own: bool = False
) -> Tensor:
    """Inputs [B, ...] for all members, or [M, B, ...] if each member has its own.

    The inputs of a member depend on its index and not on the ensemble size.

    Args:
        augment: changes the inputs.
        x: inputs [B, ...], or [M, B, ...] with `own`.
        key: of the step.
        members: the indices of the members.
        own: every member has its own batch.
    """
    if not isinstance(x, Tensor):
        raise DataError("augmentation needs inputs of one tensor; augment in the loader instead")
    if not own and not is_per_member(augment):
        return augment(x, key)
    batches = x if own else x.expand(len(members), *x.shape)
    return torch.stack([augment(x, hashed(key + m)) for x, m in zip(batches, members, strict=True)])


@registry.register("crop-flip")
@dataclass(frozen=True)
class CropFlip:
    """Random crops of the padded images, and mirror images.

    Attributes:
        padding: zeros around each image, the largest displacement in pixels.
        flip: mirror half of the images.
        per_member: every member gets its own crops, so that members differ by their data too.
    """

    padding: int = 4
    flip: bool = True
    per_member: bool = False

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ConfigError(f"padding must be zero or positive, not {self.padding}")

    def __call__(self, x: Tensor, key: Tensor) -> Tensor:
        """Images [B, C, H, W], gathered by index: no loop over images."""
        if x.ndim != 4:
            raise DataError(f"crop-flip wants images [B, C, H, W], not inputs {tuple(x.shape)}")
        if self.padding > max(x.shape[2:]):
            raise ConfigError(f"padding of {self.padding} is more than an image of {x.shape[-1]}")
        images, _, height, width = x.shape
        top, left, side = uniform(key, (3, images, 1))
        places = 2 * self.padding + 1
        rows = (top * places).long() + torch.arange(height, device=x.device)
        columns = (left * places).long() + torch.arange(width, device=x.device)
        if self.flip:
            columns = torch.where(side < 0.5, columns.flip(1), columns)
        padded = F.pad(x, (self.padding,) * 4).permute(0, 2, 3, 1)
        index = torch.arange(images, device=x.device)[:, None, None]
        return padded[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
