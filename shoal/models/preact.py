"""Residual networks that normalise and rectify before each convolution."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from shoal.core.errors import ConfigError
from shoal.models.blocks import PreActivated, check_images, convolution, head, stages
from shoal.models.parts import check_widths
from shoal.models.registry import registry

__all__ = ["PreActResNet18", "WideResNet16x4"]


@registry.register("preact-resnet18", cite=("he2016identity",))
@dataclass(frozen=True)
class PreActResNet18:
    """Residual network of 18 layers with pre-activated blocks and a stem for small images.

    What is added along the shortcuts is never rectified. He et al. (2016), arXiv 1603.05027.

    >>> sum(p.numel() for p in PreActResNet18().build((3, 32, 32), 10).parameters())
    11172170

    Attributes:
        widths: channels of the stages.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)

    def __post_init__(self) -> None:
        check_widths("widths", self.widths)
        if not self.widths:
            raise ConfigError("a residual network has at least one stage; give it some widths")

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
        """Channels before the first block, which widening leaves alone."""
        return self.narrow
