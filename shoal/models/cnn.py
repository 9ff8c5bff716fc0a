"""A small convolutional network for small images."""

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from shoal.core.errors import ConfigError
from shoal.models.parts import ACTIVATIONS, check_parts, check_widths, normalisation
from shoal.models.registry import registry

__all__ = ["SmallCNN"]


@registry.register("small-cnn")
@dataclass(frozen=True)
class SmallCNN:
    """3 x 3 convolutions, halving the image between them, and a linear layer on top.

    Made for images of 8 x 8 to 32 x 32 pixels. Each block is convolved, normalised, activated;
    all but the last are followed by a maximum over 2 x 2 pixels.

    >>> SmallCNN().build((1, 8, 8), 10)[-1].in_features
    128

    Attributes:
        channels: channels of each convolution.
        activation: `relu`, `tanh`, `gelu`, `silu`, `elu` or `softplus`.
        norm: None, `batch` or `layer` (over channels and pixels together).
        dropout: probability with which a feature below the last layer is dropped in training.
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
                f"small-cnn with {len(self.channels)} convolutions wants images (channels, height, "
                f"width) of at least {2**halvings} x {2**halvings}, not inputs of shape "
                f"{tuple(input_shape)}; take 'mlp' for other inputs"
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
