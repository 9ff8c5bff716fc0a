"""Residual networks for small images, rectified after every sum."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.core.errors import ConfigError
from shoal.models.blocks import Block, check_images, convolution, head, stages
from shoal.models.parts import check_parts, check_widths, normalisation
from shoal.models.registry import registry

__all__ = ["ResNet18", "ResNet20", "ResNet32"]


@registry.register("resnet18", cite=("he2016deep",))
@dataclass(frozen=True)
class ResNet18:
    """Residual network of 18 layers whose stem keeps small images at full size.

    A 3 x 3 convolution, then four stages of two blocks, the later three at half the size of the one
    before, then an average over what is left of the image. He et al. (2016), arXiv 1512.03385.

    >>> sum(p.numel() for p in ResNet18().build((3, 32, 32), 10).parameters())
    11173962

    Attributes:
        widths: channels of the four stages.
        norm: None, `batch` or `layer` (over channels and pixels together).
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)
    norm: str | None = "batch"

    depth: ClassVar[int] = 2
    projected: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_widths("widths", self.widths)
        if not self.widths:
            raise ConfigError("a residual network has at least one stage; give it some widths")
        check_parts("relu", self.norm, 0.0)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network from images of this shape to this many outputs."""
        check_images(input_shape)
        first = self.widths[0]
        block = functools.partial(Block, norm=self.norm, projected=self.projected)
        return nn.Sequential(
            convolution(input_shape[0], first, bias=self.norm is None),
            *normalisation(self.norm, first, images=True),
            nn.ReLU(),
            *stages(block, first, self.widths, self.depth),
            *head(self.widths[-1], outputs),
        )


@registry.register("resnet20", cite=("he2016deep",))
@dataclass(frozen=True)
class ResNet20(ResNet18):
    """The narrow residual network of 20 layers for CIFAR: three stages of three blocks.

    Shortcuts have no weights. He et al. (2016), arXiv 1512.03385, section 4.2.

    >>> sum(p.numel() for p in ResNet20().build((3, 32, 32), 10).parameters())
    269722

    Attributes:
        widths: channels of the three stages.
        norm: None, `batch` or `layer`; without one the convolutions have biases.
    """

    widths: tuple[int, ...] = (16, 32, 64)

    depth: ClassVar[int] = 3
    projected: ClassVar[bool] = False


@registry.register("resnet32", cite=("he2016deep", "dangelo2021repulsive"))
@dataclass(frozen=True)
class ResNet32(ResNet20):
    """The narrow residual network of 32 layers, without normalisation unless it is asked for.

    Three stages of five blocks, as in the experiments of D'Angelo & Fortuin (2021), arXiv
    2106.11642: convolutions with biases, shortcuts without weights.

    >>> sum(p.numel() for p in ResNet32().build((3, 32, 32), 10).parameters())
    463018

    Attributes:
        widths: channels of the three stages.
        norm: None, `batch` or `layer`; without one the convolutions have biases.
    """

    norm: str | None = None

    depth: ClassVar[int] = 5
