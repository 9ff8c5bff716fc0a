"""The vocabulary of residual networks: convolutions, shortcuts, blocks and the layers on top."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.models.parts import normalisation

__all__ = ["Block", "PreActivated", "Subsampled", "check_images", "convolution", "head", "stages"]


def convolution(before: int, width: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """3 x 3, with the size kept or divided by the stride."""
    return nn.Conv2d(before, width, 3, stride, padding=1, bias=bias)


def stages(
    block: Callable[[int, int, int], nn.Module], before: int, widths: tuple[int, ...], depth: int
) -> list[nn.Module]:
    """`depth` blocks for each width, the first of every later stage at half the size."""
    layers = []
    for stage, width in enumerate(widths):
        for index in range(depth):
            layers.append(block(before, width, 2 if stage and not index else 1))
            before = width
    return layers


def head(width: int, outputs: int) -> list[nn.Module]:
    """Average over the image, then a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, outputs)]


def check_images(input_shape: tuple[int, ...]) -> None:
    """Refuse inputs that are not images."""
    if len(input_shape) != 3:
        raise ConfigError(f"a residual network wants images [C, H, W], not {input_shape}")


class Block(nn.Module):
    """Two convolutions beside a shortcut, rectified after the sum. He et al., arXiv 1512.03385.

    Args:
        before: channels that come in.
        width: channels that go out.
        stride: of the first convolution.
        norm: None, `batch` or `layer`; without one the convolutions have biases.
        projected: a shortcut that changes shape is a 1 x 1 convolution, else it is subsampled.
    """

    def __init__(
        self,
        before: int,
        width: int,
        stride: int,
        norm: str | None = "batch",
        projected: bool = True,
    ) -> None:
        super().__init__()
        bias = norm is None
        self.first = convolution(before, width, stride, bias)
        self.first_norm = _norm(norm, width)
        self.second = convolution(width, width, bias=bias)
        self.second_norm = _norm(norm, width)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            narrow = nn.Conv2d(before, width, 1, stride, bias=bias)
            projection = nn.Sequential(narrow, *normalisation(norm, width, images=True))
            self.shortcut = projection if projected else Subsampled(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """relu(norm(conv(relu(norm(conv(x))))) + shortcut(x))."""
        h = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(h)) + self.shortcut(x))


class PreActivated(nn.Module):
    """Normalised and rectified before each convolution. He et al., arXiv 1603.05027.

    Args:
        before: channels that come in.
        width: channels that go out.
        stride: of the first convolution.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.BatchNorm2d(before)
        self.first = convolution(before, width, stride)
        self.second_norm = nn.BatchNorm2d(width)
        self.second = convolution(width, width)
        self.shortcut = None
        if stride != 1 or before != width:
            self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """conv(relu(norm(conv(a)))) + shortcut, with a = relu(norm(x))."""
        a = F.relu(self.first_norm(x))
        beside = x if self.shortcut is None else self.shortcut(a)
        return self.second(F.relu(self.second_norm(self.first(a)))) + beside


class Subsampled(nn.Module):
    """A shortcut without weights: every so many pixels, and channels of zeros around the others.

    Args:
        before: channels that come in.
        width: channels that go out.
        stride: pixels from one that is kept to the next.
    """

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        if width < before:
            raise ConfigError(f"a shortcut without weights cannot go from {before} to {width}")
        self.stride, more = stride, width - before
        self.around = more // 2, more - more // 2

    def forward(self, x: Tensor) -> Tensor:
        """Zeros, x, zeros, along the channels."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, *self.around))


def _norm(norm: str | None, width: int) -> nn.Module:
    return nn.Identity() if norm is None else normalisation(norm, width, images=True)[0]
