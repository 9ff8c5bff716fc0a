"""Networks on sequences for `shoal bench`: recurrent, convolutional, transformers of two kinds."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CausalTransformer", "EncoderViT", "RecurrentReader", "SequenceCNN"]


@dataclass(frozen=True)
class RecurrentReader:
    """A recurrent layer over a sequence [B, T, D]; its last output gives the class.

    Attributes:
        kind: `gru` or `lstm`.
        width: length of the hidden state.
    """

    kind: str = "gru"
    width: int = 128

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network."""
        return _Reader(
            {"gru": nn.GRU, "lstm": nn.LSTM}[self.kind], self.width, input_shape, outputs
        )


class _Reader(nn.Module):
    def __init__(
        self, kind: type[nn.GRU | nn.LSTM], width: int, input_shape: tuple[int, ...], outputs: int
    ) -> None:
        super().__init__()
        self.cells = kind(input_shape[-1], width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, C]."""
        return self.head(self.cells(x)[0][:, -1])


@dataclass(frozen=True)
class SequenceCNN:
    """Convolutions along a sequence [B, D, T] with pooling in between, and a mean.

    Attributes:
        channels: channels of each convolution.
        width: length of the filters.
    """

    channels: tuple[int, ...] = (64, 128, 128)
    width: int = 5

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network."""
        layers: list[nn.Module] = []
        before = input_shape[0]
        for after in self.channels:
            layers += [nn.MaxPool1d(2)] if layers else []
            layers += [nn.Conv1d(before, after, self.width, padding=self.width // 2)]
            layers += [nn.BatchNorm1d(after), nn.ReLU()]
            before = after
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(before, outputs)
        )


@dataclass(frozen=True)
class CausalTransformer:
    """A network like GPT-2: tokens [B, T], pre-normalised blocks, one output per token.

    Radford et al. (2019), Language Models are Unsupervised Multitask Learners.

    Attributes:
        width: length of an embedding.
        depth: number of blocks.
        heads: attention heads of a block.
    """

    width: int = 256
    depth: int = 6
    heads: int = 4

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network whose vocabulary has `outputs` tokens."""
        return _Decoder(self, input_shape[0], outputs)


class _Decoder(nn.Module):
    def __init__(self, sizes: CausalTransformer, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, sizes.width)
        self.place = nn.Parameter(0.02 * torch.randn(length, sizes.width))
        blocks = (_CausalBlock(sizes.width, sizes.heads) for _ in range(sizes.depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, T, vocabulary]."""
        return self.head(self.norm(self.blocks(self.tokens(x) + self.place)))


class _CausalBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention to earlier tokens and a perceptron, each with a shortcut."""
        # [B, T, 3 heads D] as three of [B, heads, T, D]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


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
