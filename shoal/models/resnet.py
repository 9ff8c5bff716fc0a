"""Residual networks for small images."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.models.parts import check_widths
from shoal.models.registry import registry

__all__ = ["ResNet18"]


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
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)

    def __post_init__(self) -> None:
        check_widths("widths", self.widths)
        if not self.widths:
            raise ConfigError("a residual network has at least one stage; give it some widths")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network from images of this shape to this many outputs."""
        if len(input_shape) != 3:
            raise ConfigError(f"a residual network wants images [C, H, W], not {input_shape}")
        before = self.widths[0]
        layers: list[nn.Module] = [
            nn.Conv2d(input_shape[0], before, 3, padding=1, bias=False),
            nn.BatchNorm2d(before),
            nn.ReLU(),
        ]
        for stage, width in enumerate(self.widths):
            layers += [_Block(before, width, stride=2 if stage else 1), _Block(width, width, 1)]
            before = width
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs)]
        return nn.Sequential(*layers, *head)


class _Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            narrow = nn.Conv2d(before, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(narrow, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(h)) + self.shortcut(x))
