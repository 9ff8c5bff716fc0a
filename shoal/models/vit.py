"""The vision transformer of Dosovitskiy et al. (2021), arXiv 2010.11929."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.models.blueprint import registry

__all__ = ["ViT"]


@registry.register("vit", cite=("dosovitskiy2021image",))
@dataclass(frozen=True)
class ViT:
    """Patches of an image as tokens, pre-normalised blocks, and the mean of the tokens.

    Attributes:
        width: length of a token.
        depth: number of blocks.
        heads: attention heads of a block.
        patch: side of a patch, in pixels.
        expansion: width of the perceptron in a block, as a multiple of `width`.
        dropout: dropout probability in the blocks.
    """

    width: int = 192
    depth: int = 6
    heads: int = 3
    patch: int = 4
    expansion: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "patch", "expansion"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.heads:
            raise ConfigError(
                f"{self.heads} heads cannot share a width of {self.width}; "
                f"choose a width that is a multiple of heads"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, not {self.dropout}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network for images of this shape."""
        if len(input_shape) != 3:
            raise ConfigError(f"vit needs images [channels, height, width], not {input_shape}")
        channels, height, width = input_shape
        if height % self.patch or width % self.patch:
            raise ConfigError(
                f"patches of {self.patch} pixels do not cover images of {height} x {width}; "
                f"choose a patch that divides both"
            )
        tokens = (height // self.patch) * (width // self.patch)
        return _Transformer(self, channels, tokens, outputs)


class _Transformer(nn.Module):
    def __init__(self, sizes: ViT, channels: int, tokens: int, outputs: int) -> None:
        super().__init__()
        self.patch = sizes.patch
        self.embed = nn.Linear(channels * sizes.patch**2, sizes.width)
        self.place = nn.Parameter(0.02 * torch.randn(tokens, sizes.width))
        self.blocks = nn.Sequential(*(_Block(sizes) for _ in range(sizes.depth)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, C] for images [B, channels, height, width]."""
        patches = x.unflatten(-1, (-1, self.patch)).unflatten(-3, (-1, self.patch))
        # [B, channels, rows, side, columns, side] as [B, rows columns, channels side side]
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        tokens = self.blocks(self.embed(patches) + self.place)
        return self.head(self.norm(tokens).mean(1))


class _Block(nn.Module):
    def __init__(self, sizes: ViT) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.drop = sizes.heads, nn.Dropout(sizes.dropout)
        self.before, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.between = nn.Linear(width, width), nn.LayerNorm(width)
        self.up = nn.Linear(width, sizes.expansion * width)
        self.down = nn.Linear(sizes.expansion * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x + attention, then x + perceptron, each of the normalised tokens."""
        # [B, T, 3, heads, D] as three tensors [B, heads, T, D]
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(query, key, value)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.between(x)))))
