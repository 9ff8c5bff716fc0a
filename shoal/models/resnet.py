"""Residual networks for small images, with post- or pre-activation."""

import functools
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.core.errors import ConfigError
from shoal.models.blueprint import registry
from shoal.models.parts import (
    Block,
    PreActivated,
    check_images,
    check_parts,
    check_widths,
    convolution,
    head,
    normalisation,
    stages,
)

__all__ = ["PreActResNet18", "ResNet18", "ResNet20", "ResNet32", "WideResNet16x4"]


@registry.register("resnet18", cite=("he2016deep",))
@dataclass(frozen=True)
class ResNet18:
    """Residual network of 18 layers whose stem keeps small images at full size.

    A 3 x 3 convolution, then four stages of two blocks, then an average over the image. Each of the
    last three stages halves the image size. He et al. (2016), arXiv 1512.03385.

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
            raise ConfigError("a residual network needs at least one stage, not widths=()")
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
        norm: None, `batch` or `layer`; without a norm the convolutions have biases.
    """

    widths: tuple[int, ...] = (16, 32, 64)

    depth: ClassVar[int] = 3
    projected: ClassVar[bool] = False


@registry.register("resnet32", cite=("he2016deep", "dangelo2021repulsive"))
@dataclass(frozen=True)
class ResNet32(ResNet20):
    """The narrow residual network of 32 layers, by default without normalisation.

    Three stages of five blocks, as in the experiments of D'Angelo & Fortuin (2021), arXiv
    2106.11642: convolutions with biases, shortcuts without weights.

    >>> sum(p.numel() for p in ResNet32().build((3, 32, 32), 10).parameters())
    463018

    Attributes:
        widths: channels of the three stages.
        norm: None, `batch` or `layer`; without a norm the convolutions have biases.
    """

    norm: str | None = None

    depth: ClassVar[int] = 5


@registry.register("preact-resnet18", cite=("he2016identity",))
@dataclass(frozen=True)
class PreActResNet18:
    """Residual network of 18 layers with pre-activated blocks and a stem for small images.

    The sums along the shortcuts are never rectified. He et al. (2016), arXiv 1603.05027.

    >>> sum(p.numel() for p in PreActResNet18().build((3, 32, 32), 10).parameters())
    11172170

    Attributes:
        widths: channels of the stages.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)

    def __post_init__(self) -> None:
        check_widths("widths", self.widths)
        if not self.widths:
            raise ConfigError("a residual network needs at least one stage, not widths=()")

    @property
    def stem(self) -> int:
        """Channels before the first block."""
        return self.widths[0]

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network from images of this shape to this many outputs."""
        check_images(input_shape)
        last = self.widths[-1]
        return nn.Sequential(
            convolution(input_shape[0], self.stem),
            *stages(PreActivated, self.stem, self.widths, depth=2),
            nn.BatchNorm2d(last),
            nn.ReLU(),
            *head(last, outputs),
        )


@registry.register("wide-resnet16-4", cite=("zagoruyko2016wide",))
@dataclass(frozen=True)
class WideResNet16x4(PreActResNet18):
    """Wide residual network of 16 layers: three stages of two blocks, four times as wide.

    Zagoruyko & Komodakis (2016), arXiv 1605.07146.

    >>> sum(p.numel() for p in WideResNet16x4().build((3, 32, 32), 10).parameters())
    2748890

    Attributes:
        widths: channels of the stages.
    """

    widths: tuple[int, ...] = (64, 128, 256)

    narrow: ClassVar[int] = 16

    @property
    def stem(self) -> int:
        """Channels before the first block; widening does not change them."""
        return self.narrow
