"""Networks that only `shoal bench` has."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["EncoderViT"]


@dataclass(frozen=True)
class EncoderViT:
    """A vision transformer written with `nn.TransformerEncoderLayer` and a convolution for patches.

    Its sizes are those of `ViT()`.
    """

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network for images of this shape."""
        channels, height, width = input_shape
        layer = nn.TransformerEncoderLayer(
            192, 3, 768, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        return nn.Sequential(
            nn.Conv2d(channels, 192, 4, 4),
            nn.Flatten(2),
            _Tokens(192, height * width // 16),
            nn.TransformerEncoder(layer, 6, nn.LayerNorm(192), enable_nested_tensor=False),
            _Mean(),
            nn.Linear(192, outputs),
        )


class _Tokens(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.place = nn.Parameter(0.02 * torch.randn(count, width))

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) + self.place


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)
