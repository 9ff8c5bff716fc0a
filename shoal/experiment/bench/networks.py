"""The networks that `shoal bench` times, with their default sizes; those on sequences are here."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.inference.adapters import last_layer, lora
from shoal.inference.members import Build
from shoal.models.blueprint import Architecture
from shoal.models.cnn import SmallCNN
from shoal.models.mlp import MLP
from shoal.models.resnet import ResNet18
from shoal.models.vit import ViT

__all__ = [
    "CLASSES",
    "NETWORKS",
    "CausalTransformer",
    "EncoderViT",
    "Network",
    "RecurrentReader",
    "SequenceCNN",
    "network",
    "perceptron",
]


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


CLASSES = 10


@dataclass(frozen=True)
class Network:
    """A network with its default sizes.

    Attributes:
        name: what to type.
        architecture: what to build.
        input_shape: shape of one input.
        members: M.
        batches: full batches per epoch.
        precision: default precision.
        layers: widths from input to output, for a network of matrix products only.
        adapt: turns one frozen network into a factory of members that share it; None for members
            that are networks of their own.
        classes: number of outputs.
        words: size of the vocabulary, for inputs that are tokens; None for real inputs.
        places: shape of one data point's targets; empty for one target per data point.
        batch_size: B.
    """

    name: str
    architecture: Architecture
    input_shape: tuple[int, ...]
    members: int = 20
    batches: int = 100
    precision: str = "float32"
    layers: tuple[int, ...] | None = None
    adapt: Callable[[nn.Module], Build] | None = None
    classes: int = CLASSES
    words: int | None = None
    places: tuple[int, ...] = ()
    batch_size: int = 128

    @property
    def blueprint(self) -> Build:
        """Builds one member; no `Blueprint`, since a run stores only architectures of Shoal."""
        return functools.partial(self.architecture.build, self.input_shape, self.classes)


def perceptron(width: int = 100) -> Network:
    """The perceptron 784-100-100-100-10 of published studies, or one of another width."""
    hidden = (width, width, width)
    return Network("mlp", MLP(hidden), (784,), batches=468, layers=(784, *hidden, CLASSES))


def _low_rank(module: nn.Module) -> Build:
    return lora(module, rank=4, targets=("blocks.*",))


def _on_a_trunk(
    name: str, architecture: Architecture, members: int, adapt: Callable[[nn.Module], Build]
) -> Network:
    return Network(name, architecture, (3, 32, 32), members, 20, "bfloat16", adapt=adapt)


def _on_sequences(name: str, architecture: Architecture, shape: tuple[int, ...]) -> Network:
    return Network(name, architecture, shape, 10, 20, "bfloat16")


NETWORKS = {
    "mlp": perceptron(),
    "small-cnn": Network("small-cnn", SmallCNN(), (1, 28, 28)),
    "resnet18": Network("resnet18", ResNet18(), (3, 32, 32), 10, 20, precision="bfloat16"),
    "resnet18-bare": Network(
        "resnet18-bare", ResNet18(norm=None), (3, 32, 32), 10, 20, precision="bfloat16"
    ),
    "vit": Network("vit", ViT(), (3, 32, 32), 10, 20, precision="bfloat16"),
    "vit-encoder": Network("vit-encoder", EncoderViT(), (3, 32, 32), 10, 20, "bfloat16"),
    "vit-heads": _on_a_trunk("vit-heads", ViT(), 100, last_layer),
    "vit-lora": _on_a_trunk("vit-lora", ViT(), 100, _low_rank),
    "vit-base-lora": _on_a_trunk(
        "vit-base-lora", ViT(width=768, depth=12, heads=12), 16, _low_rank
    ),
    "gru": _on_sequences("gru", RecurrentReader("gru"), (64, 32)),
    "lstm": _on_sequences("lstm", RecurrentReader("lstm"), (64, 32)),
    "cnn1d": _on_sequences("cnn1d", SequenceCNN(), (32, 256)),
    "gpt2": Network(
        "gpt2", CausalTransformer(), (128,), 10, 20, "bfloat16", None, None, 256, 256, (128,)
    ),
}
"""The networks of `shoal bench`; a bare network has no normalisation.

Members of `vit-heads`, `vit-lora` and `vit-base-lora` share a frozen transformer. Each has a head,
or adapters of rank 4 in all linear layers of the blocks and a head. `gpt2` has outputs per token.
"""


def network(name: str) -> Network:
    """The network called `name`."""
    if name not in NETWORKS:
        raise ConfigError(f"there is no model {name!r} to measure; {nearest(name, NETWORKS)}")
    return NETWORKS[name]
