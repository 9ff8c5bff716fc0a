"""Every layer of `torch.nn` in a small network, and what the methods make of it.

`tests/engine/test_torch_layers.py` trains them, and `docs/second-order.md` shows the table.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS, WORDS = 4, 7

Call = Callable[[nn.Module, Tensor], Tensor]


def _plainly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def _first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]


def _twice(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x.flip(0))


def _unpooled(layer: nn.Module, x: Tensor) -> Tensor:
    pools = {
        nn.MaxUnpool1d: nn.MaxPool1d,
        nn.MaxUnpool2d: nn.MaxPool2d,
        nn.MaxUnpool3d: nn.MaxPool3d,
    }
    return layer(*pools[type(layer)](2, return_indices=True)(x))


@dataclass(frozen=True)
class Layer:
    """One layer, with what it needs.

    Attributes:
        make: makes the layer.
        shape: shape of one data point; None for tokens.
        call: how the network calls the layer.
        name: name in the table, if settings belong to it.
        together: whether `vmap` runs all members at once.
        refused: words of the sentence with which methods on input gradients refuse it.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] | None = (6,)
    call: Call = _plainly
    name: str | None = None
    together: bool = True
    refused: str | None = None

    @property
    def label(self) -> str:
        return self.name or type(self.make()).__name__

    @property
    def tokens(self) -> bool:
        return self.shape is None

    def x(self) -> Tensor:
        random = torch.Generator().manual_seed(0)
        if self.shape is None:
            return torch.randint(0, WORDS, (ROWS, 5), generator=random)
        return 2 * torch.randn(ROWS, *self.shape, generator=random)

    def build(self) -> nn.Module:
        return Around(self)


class Around(nn.Module):
    """Outputs [B, 2] of a layer whose inputs are scaled and shifted by weights."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        shape = layer.shape or ()
        self.scale = nn.Parameter(1 + 0.3 * torch.rand(shape))
        self.shift = nn.Parameter(0.3 * torch.randn(shape))
        self.layer, self.call, self.tokens = layer.make(), layer.call, layer.tokens
        self.head = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.call(self.layer, x if self.tokens else x * self.scale + self.shift)
        h = h * self.scale + self.shift if self.tokens else h
        h = h.flatten(1)
        return self.head * torch.stack((h.tanh().mean(1), h.square().mean(1)), 1)


_PLAIN = (
    "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU RReLU "
    "ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink"
)
_IN_PLACE = (nn.Hardsigmoid, nn.Hardswish, nn.RReLU, nn.ReLU6)

ACTIVATIONS: list[Layer] = [
    *(Layer(getattr(nn, name)) for name in _PLAIN.split()),
    *(Layer(lambda kind=kind: kind(1)) for kind in (nn.GLU, nn.Softmax, nn.LogSoftmax, nn.Softmin)),
    Layer(nn.Softmax2d, (3, 2, 2)),
    Layer(lambda: nn.Threshold(0.1, -0.3)),
    *(
        Layer(lambda kind=kind: kind(inplace=True), name=f"{kind.__name__}(inplace=True)")
        for kind in _IN_PLACE
    ),
]

LINE, IMAGE, BODY = (4, 8), (4, 6, 6), (2, 4, 4, 4)
_SHAPES = {"1d": LINE, "2d": IMAGE, "3d": BODY}

_MODES = {
    "nearest": IMAGE, "linear": LINE, "bilinear": IMAGE, "bicubic": IMAGE, "trilinear": BODY
}  # fmt: skip


def _each(name: str, *arguments: Any, **more: Any) -> list[Layer]:
    """The forms of a layer for lines, images and bodies."""
    found = []
    for axes, shape in _SHAPES.items():
        kind = getattr(nn, name + axes, None)
        if kind is not None:
            given = [shape[0] if each == "C" else each for each in arguments]
            found.append(Layer(lambda kind=kind, given=given: kind(*given), shape, **more))
    return found


_ENCODER, _DECODER = (
    functools.partial(kind, 8, 2, 8, 0.0, batch_first=True)
    for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
)

LAYERS: list[Layer] = [
    Layer(lambda: nn.Linear(6, 3)),
    Layer(nn.Identity),
    Layer(lambda: nn.Bilinear(6, 6, 3), call=_twice),
    *_each("Conv", "C", 3, 3),
    *_each("ConvTranspose", "C", 3, 3),
    *_each("BatchNorm", "C"),
    *_each("InstanceNorm", "C"),
    Layer(lambda: nn.SyncBatchNorm(4), IMAGE),
    Layer(lambda: nn.GroupNorm(2, 4), IMAGE),
    Layer(lambda: nn.LayerNorm(6)),
    Layer(lambda: nn.RMSNorm(6)),
    Layer(lambda: nn.LocalResponseNorm(2), IMAGE),
    Layer(lambda: nn.CrossMapLRN2d(2), IMAGE, refused="mul()", together=False),
    *_each("MaxPool", 2),
    *_each("AvgPool", 2),
    *_each("LPPool", 2, 2),
    Layer(lambda: nn.FractionalMaxPool2d(2, 2), IMAGE),
    Layer(lambda: nn.FractionalMaxPool3d(2, 2), BODY),
    *_each("AdaptiveAvgPool", 2),
    *_each("AdaptiveMaxPool", 2),
    *_each("MaxUnpool", 2, call=_unpooled),
    *_each("ReflectionPad", 1),
    *_each("ReplicationPad", 1),
    *_each("ZeroPad", 1),
    *_each("ConstantPad", 1, 0.5),
    *_each("CircularPad", 1),
    Layer(lambda: nn.PixelShuffle(2), IMAGE),
    Layer(lambda: nn.PixelUnshuffle(2), IMAGE),
    Layer(lambda: nn.ChannelShuffle(2), IMAGE),
    *(
        Layer(lambda mode=mode: nn.Upsample(None, 2, mode), shape, name=f"Upsample({mode})")
        for mode, shape in _MODES.items()
    ),
    Layer(lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE),
    Layer(lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
    Layer(lambda: nn.Unfold(2), IMAGE),
    Layer(lambda: nn.Fold((4, 4), 2), (8, 9)),
    Layer(nn.Flatten, IMAGE),
    Layer(lambda: nn.Unflatten(1, (2, 3))),
    Layer(nn.CosineSimilarity, LINE, _twice),
    Layer(nn.PairwiseDistance, LINE, _twice),
    Layer(lambda: nn.Dropout(0.3)),
    Layer(lambda: nn.Dropout1d(0.3), LINE),
    Layer(lambda: nn.Dropout2d(0.3), IMAGE),
    Layer(lambda: nn.Dropout3d(0.3), BODY),
    Layer(lambda: nn.AlphaDropout(0.3)),
    Layer(lambda: nn.FeatureAlphaDropout(0.3), IMAGE),
    *(
        Layer(lambda kind=kind: kind(8, 3, batch_first=True), LINE, _first, together=together)
        for kind, together in ((nn.RNN, True), (nn.LSTM, False), (nn.GRU, True))
    ),
    Layer(lambda: nn.RNNCell(6, 3)),
    Layer(lambda: nn.LSTMCell(6, 3), call=_first, together=False),
    Layer(lambda: nn.GRUCell(6, 3)),
    Layer(
        lambda: nn.MultiheadAttention(8, 2, batch_first=True), LINE,
        lambda layer, x: layer(x, x, x)[0],
    ),
    Layer(_ENCODER, LINE),
    Layer(lambda: nn.TransformerEncoder(_ENCODER(), 1), LINE),
    Layer(_DECODER, LINE, _twice),
    Layer(lambda: nn.TransformerDecoder(_DECODER(), 1), LINE, _twice),
    Layer(lambda: nn.Transformer(8, 2, 1, 1, 8, 0.0, batch_first=True), LINE, _twice),
    Layer(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 5, [2]), call=lambda layer, x: layer.log_prob(x)
    ),
    Layer(
        nn.Identity, call=lambda _, x: torch.cdist(x, x), name="torch.cdist",
        refused="_cdist_backward",
    ),
    Layer(lambda: nn.Embedding(WORDS, 3), None),
    Layer(lambda: nn.EmbeddingBag(WORDS, 3), None),
]  # fmt: skip


def markdown() -> str:
    """One row for all layers with the same outcome."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for layer in ACTIVATIONS + LAYERS:
        kind = "activations" if layer in ACTIVATIONS else "layers"
        forde = "refused" if layer.refused else "`forde-identity`" if layer.tokens else "yes"
        members = "together" if layer.together else "in turn"
        rows.setdefault((kind, forde, members), []).append(layer.label)
    lines = ["| | plain, `f-kde` | `forde` | members |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {kind}: {', '.join(f'`{name}`' for name in names)} | yes | {forde} | {members} |"
        for (kind, forde, members), names in rows.items()
    ]
    return "\n".join(lines)
