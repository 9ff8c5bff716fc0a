"""Layers of a frozen trunk with a few trained tensors of their own: low rank, or factors.

A wrapper never computes its effective weight in `forward`. Members that share the trunk's weight W
then need one product with W for all members, and a small batched product for their own tensors.
`weight` and `bias` give the effective tensors to code that reads them instead of calling the layer,
for example the fast path of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention`.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.engine.members.layers import plus_product

__all__ = [
    "Adapter",
    "LoRAConv",
    "LoRAEmbedding",
    "LoRALinear",
    "LowRankWeight",
    "Scaled",
    "ScaledRows",
    "draw_apart",
    "is_convolution",
    "is_transposed",
    "root_mean_square",
    "size_of_weight",
]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_convolution(layer: nn.Module) -> bool:
    """Whether a layer is an ordinary convolution."""
    return isinstance(layer, CONVOLUTIONS)


def is_transposed(layer: nn.Module) -> bool:
    """Whether a layer is the linear layer of GPT-2, whose weight is [in, out]."""
    weight = getattr(layer, "weight", None)
    known = type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")
    return known and isinstance(weight, Tensor) and weight.ndim == 2


def root_mean_square(tensor: Tensor) -> float:
    """Root of the mean square of all elements.

    >>> root_mean_square(torch.tensor([3.0, -4.0]))
    3.5355339059327378
    """
    return tensor.detach().double().square().mean().sqrt().item() if tensor.numel() else 0.0


def size_of_weight(weight: Tensor) -> float:
    """Root mean square of a weight; that of a usual initialisation, if all elements are zero."""
    return root_mean_square(weight) or (3 * weight[0].numel()) ** -0.5


def draw_apart(narrow: Tensor, wide: Tensor, scaling: float, size: float) -> None:
    """Scale B, in place, so that the root mean square of s B A is `size`.

    |B A|² = <Bᵀ B, A Aᵀ> needs no matrix of the size of W.
    """
    with torch.no_grad():
        a, b = narrow.flatten(1).double(), wide.flatten(1).double()
        total = ((b.T @ b) * (a @ a.T)).sum().clamp_min(0).sqrt().item() * abs(scaling)
        now = total / (a.shape[1] * b.shape[0]) ** 0.5
        wide.mul_(size / now if now > 0 else 0.0)


class Adapter(nn.Module):
    """A layer of the trunk with trained tensors; other attributes are those of the layer.

    Attributes:
        base: the layer of the trunk.
    """

    base: Any

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base":
                raise
            return getattr(super().__getattr__("base"), name)


class LoRALinear(Adapter):
    """W x + b + s B A x, for `nn.Linear` and for the linear layers of GPT-2.

    A is [rank, in], B is [out, rank]. Hu et al. (2021), arXiv 2106.09685.
    """

    def __init__(self, base: Any, rank: int, scaling: float) -> None:
        super().__init__(base)
        weight = base.weight
        out, into = reversed(weight.shape) if is_transposed(base) else weight.shape
        like = {"device": weight.device, "dtype": weight.dtype}
        self.scaling = scaling
        self.lora_A = nn.Linear(into, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, out, bias=False, **like)

    def forward(self, x: Tensor) -> Tensor:
        """W x + b + s B (A x)."""
        # The factor s acts on the few numbers A x, not on the outputs.
        return plus_product(self.base(x), self.scaling * self.lora_A(x), self.lora_B.weight)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank]."""
        return self.lora_A.weight, self.lora_B.weight

    @property
    def weight(self) -> Tensor:
        """W + s B A, in the layout of W."""
        change = self.scaling * (self.lora_B.weight @ self.lora_A.weight)
        return self.base.weight + (change.T if is_transposed(self.base) else change)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer."""
        return self.base.bias


class LoRAConv(Adapter):
    """conv(x; W) + b + s conv(conv(x; A); B), for ungrouped convolutions.

    A has the stride, padding and dilation of the layer, and `rank` channels. B is 1 x 1.
    """

    def __init__(self, base: Any, rank: int, scaling: float) -> None:
        super().__init__(base)
        weight, kind = base.weight, CONVOLUTIONS[base.weight.ndim - 3]
        like = {"bias": False, "device": weight.device, "dtype": weight.dtype}
        shape = base.stride, base.padding, base.dilation
        narrow = kind(
            base.in_channels, rank, base.kernel_size, *shape,
            padding_mode=base.padding_mode, **like,
        )  # fmt: skip
        self.scaling = scaling
        self.lora_A = narrow
        if type(base).forward is not kind.forward:
            # A layer with its own forward may pad in it; A must treat its inputs alike.
            self.lora_A = copy.deepcopy(base, {id(t): None for t in base.parameters()})
            self.lora_A.weight, self.lora_A.bias = narrow.weight, None
            self.lora_A.out_channels = rank
        self.lora_B = kind(rank, base.out_channels, 1, **like)

    def forward(self, x: Tensor) -> Tensor:
        """conv(x; W) + b + s conv(conv(x; A); B)."""
        return self.base(x) + self.lora_B(self.scaling * self.lora_A(x))

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A [rank, in * places] and B [out, rank]."""
        return self.lora_A.weight.flatten(1), self.lora_B.weight.flatten(1)

    @property
    def weight(self) -> Tensor:
        """W + s B A, as a filter."""
        narrow, wide = self.factors
        return self.base.weight + self.scaling * (wide @ narrow).view_as(self.base.weight)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer."""
        return self.base.bias


class LoRAEmbedding(Adapter):
    """W[i] + s B A[i], for `nn.Embedding`; A is [rank, words], B is [width, rank]."""

    def __init__(self, base: Any, rank: int, scaling: float) -> None:
        super().__init__(base)
        words, width = base.weight.shape
        self.scaling = scaling
        self.lora_embedding_A = nn.Parameter(base.weight.new_empty(rank, words))
        self.lora_embedding_B = nn.Parameter(base.weight.new_empty(width, rank))
        nn.init.normal_(self.lora_embedding_A)
        nn.init.normal_(self.lora_embedding_B)

    def forward(self, tokens: Tensor) -> Tensor:
        """W[i] + s B A[i]."""
        narrow = F.embedding(tokens, self.lora_embedding_A.T, self.base.padding_idx)
        return self.base(tokens) + self.scaling * (narrow @ self.lora_embedding_B.T)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A [rank, words] and B [width, rank]."""
        return self.lora_embedding_A, self.lora_embedding_B

    @property
    def weight(self) -> Tensor:
        """W + s (B A)^T."""
        change = (self.lora_embedding_B @ self.lora_embedding_A).T
        return self.base.weight + self.scaling * change


class LowRankWeight(nn.Module):
    """A parametrisation W + s B A, for weights that a module uses without a layer.

    `nn.MultiheadAttention` has such weights: its projections of queries, keys and values.
    """

    def __init__(self, weight: Tensor, rank: int, scaling: float) -> None:
        super().__init__()
        out, into = weight.shape
        self.scaling = scaling
        self.lora_A = nn.Parameter(weight.new_empty(rank, into))
        self.lora_B = nn.Parameter(weight.new_empty(out, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        nn.init.kaiming_uniform_(self.lora_B, a=5**0.5)

    def forward(self, weight: Tensor) -> Tensor:
        """W + s B A."""
        return weight + self.scaling * (self.lora_B @ self.lora_A)

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank]."""
        return self.lora_A, self.lora_B


class Scaled(Adapter):
    """c * (W x + b) with a trained factor c per output channel, about 1.

    Close to (IA)^3, which scales keys, values and hidden units. Liu et al. (2022), arXiv
    2205.05638.
    """

    def __init__(self, base: Any, spread: float) -> None:
        super().__init__(base)
        weight: Tensor = base.weight
        channels = weight.shape[-1] if is_transposed(base) else weight.shape[0]
        self.scale = nn.Parameter(_factors(channels, weight, spread))

    def forward(self, x: Tensor) -> Tensor:
        """c * (W x + b)."""
        places = self.base.weight.ndim - 2
        return self.base(x) * self.scale.reshape(-1, *[1] * places)

    @property
    def weight(self) -> Tensor:
        """c * W, in the layout of W."""
        axes = [] if is_transposed(self.base) else [1] * (self.base.weight.ndim - 1)
        return self.base.weight * self.scale.reshape(-1, *axes)

    @property
    def bias(self) -> Tensor | None:
        """c * b."""
        return None if self.base.bias is None else self.base.bias * self.scale


class ScaledRows(nn.Module):
    """A parametrisation c * W with a factor per row, for weights without a layer."""

    def __init__(self, weight: Tensor, spread: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(_factors(len(weight), weight, spread))

    def forward(self, weight: Tensor) -> Tensor:
        """c * W."""
        return weight * self.scale.unsqueeze(-1)


def _factors(channels: int, weight: Tensor, spread: float) -> Tensor:
    like = {"device": weight.device, "dtype": weight.dtype}
    return 1 + spread * torch.randn(channels, **like)
