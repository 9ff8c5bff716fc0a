"""Building blocks of architectures: activations, normalisations, residual blocks, last layers."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest

__all__ = [
    "ACTIVATIONS",
    "Block",
    "PreActivated",
    "Subsampled",
    "check_images",
    "check_parts",
    "check_widths",
    "convolution",
    "head",
    "normalisation",
    "stages",
]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}
"""Names of the activations that an architecture can be built with."""

_NORMS = ("batch", "layer")

_MOST_LAYERS = 1000


def check_parts(activation: str, norm: str | None, dropout: float) -> None:
    """Refuse invalid layer settings."""
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"there is no activation called '{activation}'; {nearest(str(activation), ACTIVATIONS)}"
        )
    if norm is not None and norm not in _NORMS:
        raise ConfigError(f"there is no norm called '{norm}'; {nearest(str(norm), _NORMS)}")
    if not 0 <= dropout < 1:
        raise ConfigError(f"dropout must be a probability below 1, not {dropout}")


def check_widths(name: str, widths: tuple[int, ...]) -> None:
    """Refuse layer widths that are not positive integers."""
    if not isinstance(widths, (tuple, list)):
        raise ConfigError(f"{name} must be a tuple of widths such as ({widths!r},)")
    if len(widths) > _MOST_LAYERS:
        raise ConfigError(f"{name} has {len(widths):,} layers; the limit is {_MOST_LAYERS:,}")
    for width in widths:
        if not isinstance(width, int) or width < 1:
            raise ConfigError(f"{name} must hold whole numbers of at least 1, not {width!r}")


def normalisation(norm: str | None, width: int, images: bool = False) -> list[nn.Module]:
    """The normalisation layer of `width` features or channels; an empty list without a norm."""
    if norm is None:
        return []
    if norm == "batch":
        return [nn.BatchNorm2d(width) if images else nn.BatchNorm1d(width)]
    return [nn.GroupNorm(1, width) if images else nn.LayerNorm(width)]


def convolution(before: int, width: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    """A 3 x 3 convolution; the stride divides the image size."""
    return nn.Conv2d(before, width, 3, stride, padding=1, bias=bias)


def stages(
    block: Callable[[int, int, int], nn.Module], before: int, widths: tuple[int, ...], depth: int
) -> list[nn.Module]:
    """`depth` blocks per width; every stage after the first halves the image size."""
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
        raise ConfigError(f"a residual network needs images [C, H, W], not {input_shape}")


class Block(nn.Module):
    """Two convolutions and a shortcut, rectified after the sum. He et al., arXiv 1512.03385.

    Args:
        before: input channels.
        width: output channels.
        stride: stride of the first convolution.
        norm: None, `batch` or `layer`; without a norm the convolutions have biases.
        projected: a shortcut that changes shape is a 1 x 1 convolution; otherwise it subsamples.
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
    """A block that normalises and rectifies before each convolution. He et al., arXiv 1603.05027.

    Args:
        before: input channels.
        width: output channels.
        stride: stride of the first convolution.
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
    """A shortcut without weights: subsamples the pixels and pads the channels with zeros.

    Args:
        before: input channels.
        width: output channels.
        stride: distance between kept pixels.
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
