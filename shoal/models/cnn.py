"""Plain convolutional networks for small images."""

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from shoal.core.errors import ConfigError
from shoal.models.blueprint import registry
from shoal.models.parts import ACTIVATIONS, check_parts, check_widths, normalisation

__all__ = ["MediumCNN", "SmallCNN"]


@registry.register("small-cnn")
@dataclass(frozen=True)
class SmallCNN:
    """3 x 3 convolutions with pooling in between, and a linear layer on top.

    For images of 8 x 8 to 32 x 32 pixels. A block is convolution, normalisation, activation. Every
    block but the last is followed by 2 x 2 max pooling.

    >>> SmallCNN().build((1, 8, 8), 10)[-1].in_features
    128

    Attributes:
        channels: channels of each convolution.
        activation: `relu`, `tanh`, `gelu`, `silu`, `elu` or `softplus`.
        norm: None, `batch` or `layer` (over channels and pixels together).
        dropout: dropout probability of the features before the last layer.
    """

    channels: tuple[int, ...] = (16, 32, 32)
    activation: str = "relu"
    norm: str | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_widths("channels", self.channels)
        if not self.channels:
            raise ConfigError("channels must name at least one convolution, such as (16, 32)")
        check_parts(self.activation, self.norm, self.dropout)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
        """A freshly initialised network from images (channels, height, width) to outputs."""
        halvings = len(self.channels) - 1
        if len(input_shape) != 3 or min(input_shape[1:]) < 2**halvings:
            raise ConfigError(
                f"small-cnn with {len(self.channels)} convolutions needs images (channels, height, "
                f"width) of at least {2**halvings} x {2**halvings}, not inputs of shape "
                f"{tuple(input_shape)}; use 'mlp' for other inputs"
            )
        colours, height, width = input_shape
        layers: list[nn.Module] = []
        for before, after in pairwise((colours, *self.channels)):
            layers += [nn.MaxPool2d(2)] if layers else []
            layers += [nn.Conv2d(before, after, 3, padding=1)]
            layers += [*normalisation(self.norm, after, images=True)]
            layers += [ACTIVATIONS[self.activation]()]
        layers += [nn.Flatten()]
        layers += [nn.Dropout(self.dropout)] if self.dropout else []
        size = self.channels[-1] * (height >> halvings) * (width >> halvings)
        return nn.Sequential(*layers, nn.Linear(size, outputs))


@registry.register("medium-cnn", cite=("fort2019deep",))
@dataclass(frozen=True)
class MediumCNN:
    """The medium network of loss landscape studies: convolutions, each followed by dropout.

    Each 3 x 3 convolution is followed by dropout, 2 x 2 max pooling and, except for the last, a
    rectifier. A linear layer is on top. Filters follow Glorot & Bengio (2010), biases
    are zero. Fort et al. (2019), arXiv 1912.02757.

    >>> sum(p.numel() for p in MediumCNN().build((3, 32, 32), 10).parameters())
    971146

    Attributes:
        channels: channels of each convolution.
        dropout: dropout probability of the convolutions' outputs.
    """

    channels: tuple[int, ...] = (64, 128, 256, 256)
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check_widths("channels", self.channels)
        if not self.channels:
            raise ConfigError("channels must name at least one convolution, such as (16, 32)")
        check_parts("relu", None, self.dropout)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
        """A freshly initialised network from images (channels, height, width) to outputs."""
        if len(input_shape) != 3:
            raise ConfigError(
                f"medium-cnn needs images (channels, height, width), not inputs of shape "
                f"{tuple(input_shape)}; use 'mlp' for other inputs"
            )
        colours, height, width = input_shape
        layers: list[nn.Module] = []
        for before, after in pairwise((colours, *self.channels)):
            layers += [nn.ReLU()] if layers else []
            layers += [nn.Conv2d(before, after, 3, padding=1)]
            layers += [nn.Dropout(self.dropout)] if self.dropout else []
            layers += [nn.MaxPool2d(2, ceil_mode=True)]
            height, width = (height + 1) // 2, (width + 1) // 2
        layers += [nn.Flatten(), nn.Linear(self.channels[-1] * height * width, outputs)]
        for layer in layers:
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.get_parameter("bias"))
        return nn.Sequential(*layers)
