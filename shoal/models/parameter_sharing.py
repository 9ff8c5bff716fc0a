"""Members that share most of their weights, which all members train together.

Members of rank one differ by factors: W x becomes s * W (r * x) + b. W is shared and trained by all
members. r, s and b are private. The weight of a member is W * (s rᵀ), W times a matrix of rank one.
Members with several heads have private last layers on one trunk. A network is one member;
`shared_tensors` names what members share.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest, nested_field
from shoal.models.blueprint import Architecture, registry
from shoal.models.mlp import MLP
from shoal.models.parts import ACTIVATIONS, check_parts, check_widths

__all__ = ["BatchEnsemble", "Factors", "MultiHead", "RankOneConv2d", "RankOneLinear", "TabM"]

FACTORS = ("signs", "normal", "ones")


def draw_factors(kind: str, size: int, like: Tensor | None = None) -> nn.Parameter:
    """Factors of `size` channels: random signs, N(1, 0.5²), or ones.

    >>> draw_factors("ones", 3).tolist()
    [1.0, 1.0, 1.0]
    """
    if kind not in FACTORS:
        raise ConfigError(f"there are no factors called '{kind}'; {nearest(str(kind), FACTORS)}")
    drawn = torch.ones(size) if like is None else torch.ones(size).to(like)
    if kind == "signs":
        drawn = 2.0 * torch.randint_like(drawn, 2) - 1.0
    elif kind == "normal":
        drawn = 1.0 + 0.5 * torch.randn_like(drawn)
    return nn.Parameter(drawn)


class Factors(nn.Module):
    """r * x with a trained factor per feature.

    Args:
        features: number of features.
        kind: `signs`, `normal` or `ones`.
    """

    def __init__(self, features: int, kind: str = "signs") -> None:
        super().__init__()
        self.r = draw_factors(kind, features)

    def forward(self, x: Tensor) -> Tensor:
        """r * x."""
        return self.r * x


class RankOneLinear(nn.Linear):
    """s * W (r * x) + b. Wen et al. (2020), arXiv 2002.06715.

    Args:
        inputs: width of x.
        outputs: width of the result.
        r: how r is drawn: `signs`, `normal` or `ones`.
        s: how s is drawn.
        bias: whether there is a bias b.
    """

    def __init__(
        self, inputs: int, outputs: int, r: str = "signs", s: str = "signs", bias: bool = True
    ) -> None:
        super().__init__(inputs, outputs, bias)
        self.r, self.s = draw_factors(r, inputs), draw_factors(s, outputs)

    def forward(self, input: Tensor) -> Tensor:
        """s * W (r * x) + b."""
        # The product has no private tensor but its inputs, so it is one for all members.
        scaled = F.linear(self.r * input, self.weight) * self.s
        return scaled if self.bias is None else scaled + self.bias


class RankOneConv2d(nn.Conv2d):
    """s * conv(r * x; W) + b with a factor per channel. Wen et al. (2020), arXiv 2002.06715.

    Args:
        inputs: channels of x.
        outputs: channels of the result.
        kernel_size: size of the filters.
        r: how r is drawn: `signs`, `normal` or `ones`.
        s: how s is drawn.
        options: of `nn.Conv2d`.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel_size: Any, r: str = "signs", s: str = "signs",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(inputs, outputs, kernel_size, **options)
        self.r, self.s = draw_factors(r, inputs), draw_factors(s, outputs)

    def forward(self, input: Tensor) -> Tensor:
        """s * conv(r * x; W) + b."""
        scaled = self._conv_forward(self.r[:, None, None] * input, self.weight, None)
        scaled = scaled * self.s[:, None, None]
        return scaled if self.bias is None else scaled + self.bias[:, None, None]


@registry.register("batch-ensemble", cite=("wen2020batchensemble", "dusenberry2020efficient"))
@dataclass(frozen=True)
class BatchEnsemble:
    """Members of a network whose linear layers and convolutions share their weights.

    Every such layer is s * W (r * x) + b with private r, s and b. Norms are private, too. Factors
    are random signs, as of Wen et al. (2020), arXiv 2002.06715, or drawn from N(1, 0.5²), as of the
    rank-1 networks of Dusenberry et al. (2020), arXiv 2005.07186.

    >>> BatchEnsemble().build((2,), 3).shared_tensors
    ('1.weight', '3.weight', '5.weight')

    Attributes:
        network: the architecture, such as `mlp` or `small-cnn`.
        factors: `signs` or `normal`.
    """

    network: Architecture = nested_field(registry, MLP)
    factors: str = "signs"

    def __post_init__(self) -> None:
        draw_factors(self.factors, 1)
        check_plain("batch-ensemble", self.network)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network: one member."""
        network = self.network.build(input_shape, outputs)
        shared = []
        for name, layer in list(network.named_modules()):
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                _add_factors(layer, self.factors)
                shared.append(f"{name}.weight")
        network.shared_tensors = tuple(shared)  # pyright: ignore
        return network


def check_plain(name: str, network: object) -> None:
    """Refuse an architecture that decides itself which tensors members share."""
    if isinstance(network, (BatchEnsemble, TabM)) or hasattr(network, "trunk"):
        raise ConfigError(
            f"{name} needs an architecture without shared tensors, such as 'mlp', "
            f"not {type(network).__name__}"
        )


def _add_factors(layer: Any, factors: str) -> None:
    """Turn a layer into one with factors, in place."""
    linear = isinstance(layer, nn.Linear)
    into, out = (
        (layer.in_features, layer.out_features)
        if linear
        else (layer.in_channels, layer.out_channels)
    )
    layer.__class__ = RankOneLinear if linear else RankOneConv2d
    layer.r = draw_factors(factors, into, layer.weight)
    layer.s = draw_factors(factors, out, layer.weight)


@registry.register("tabm", cite=("gorishniy2024tabm",))
@dataclass(frozen=True)
class TabM:
    """The perceptron for tables whose members share their weights.

    A hidden layer is s * W (r * x) + b with private r, s and b; only the first r is random (signs),
    all others start at 1. Members have private last layers. With `mini`, the first r and the last
    layer alone are private. Gorishniy et al. (2024), arXiv 2410.24210. Their members start at equal
    biases; here biases are drawn independently.

    >>> TabM(hidden=(8, 8), mini=True).build((3,), 1).shared_tensors
    ('2.weight', '2.bias', '5.weight', '5.bias')

    Attributes:
        hidden: widths of the hidden layers.
        activation: `relu`, `tanh`, `gelu`, `silu`, `elu` or `softplus`.
        dropout: dropout probability of hidden units.
        mini: whether only the first factors and the last layer are private.
    """

    hidden: tuple[int, ...] = (512, 512, 512)
    activation: str = "relu"
    dropout: float = 0.1
    mini: bool = False

    def __post_init__(self) -> None:
        check_widths("hidden", self.hidden)
        if not self.hidden:
            raise ConfigError("tabm needs at least one hidden layer, such as hidden=(512,)")
        check_parts(self.activation, None, self.dropout)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network from inputs of this shape: one member."""
        widths = (math.prod(input_shape), *self.hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        layers += [Factors(widths[0])] if self.mini else []
        shared: list[str] = []
        for index, (before, after) in enumerate(pairwise(widths)):
            place = len(layers)
            shared += [f"{place}.weight"] + ([f"{place}.bias"] if self.mini else [])
            first = "ones" if index else "signs"
            layers += [
                nn.Linear(before, after)
                if self.mini
                else RankOneLinear(before, after, r=first, s="ones")
            ]
            layers += [ACTIVATIONS[self.activation]()]
            layers += [nn.Dropout(self.dropout)] if self.dropout else []
        network = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
        network.shared_tensors = tuple(shared)  # pyright: ignore
        return network


@registry.register("multi-head", cite=("lee2015m",))
@dataclass(frozen=True)
class MultiHead:
    """Private last layers on a shared trunk, f_i(x) = h_i(g(x)).

    The trunk g is computed once for all members and trained by all of them. Lee et al. (2015),
    arXiv 1511.06314.

    >>> network = MultiHead(MLP(hidden=(7,))).build((2,), 3)
    >>> network.shared_tensors, network.head
    (('trunk.*',), Linear(in_features=7, out_features=3, bias=True))

    Attributes:
        trunk: the architecture, such as `mlp` or `small-cnn`; its last layer is the head.
    """

    trunk: Architecture = nested_field(registry, MLP)

    def __post_init__(self) -> None:
        check_plain("multi-head", self.trunk)

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A freshly initialised network: one member."""
        network = self.trunk.build(input_shape, outputs)
        if not isinstance(network, nn.Sequential) or not list(network[:-1].parameters()):
            raise ConfigError(
                "multi-head needs a network with layers before its last one, such as 'mlp'; "
                "choose another trunk"
            )
        parts = OrderedDict(trunk=network[:-1], head=network[-1])
        whole = nn.Sequential(parts)
        whole.shared_tensors = ("trunk.*",)  # pyright: ignore
        return whole
