"""Agreement of engines: a few steps of each, compared with the same steps by a loop in float64.

The deviation is the largest difference of any tensor of the ensemble (weights, running statistics)
from the reference, relative to the largest element of that tensor. The networks are smooth, since
at a kink, or between two equal maxima, rounding would change the gradient.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import ShoalWarning
from shoal.core.types import Tree
from shoal.engine.members.precision import calculating_in
from shoal.experiment.bench.battery import Case, reason, trainer
from shoal.experiment.bench.networks import Network, RecurrentReader
from shoal.models.mlp import MLP

__all__ = ["COMPARED", "STEPS", "agreement", "deviation"]

STEPS = 10
_MEMBERS, _BATCH, _RATE = 4, 32, 0.1
# At strength 1 the force ratio is negligible, and errors of the push would be invisible.
_STRENGTH = 100.0


@dataclass(frozen=True)
class SmoothCNN:
    """Two convolutions with batch normalisation."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A new network for square images, whose side is a multiple of 4."""
        layers: list[nn.Module] = []
        for before, after in ((input_shape[0], 8), (8, 16)):
            layers += [nn.Conv2d(before, after, 3, 2, padding=1), nn.BatchNorm2d(after), nn.SiLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(input_shape[1] ** 2, outputs))


@dataclass(frozen=True)
class MaskedTransformer:
    """Two blocks on sequences [B, T, D]: attention with a mask, and dropout between layers."""

    width: int = 32
    heads: int = 2

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A new network, the mean over tokens of which gives the class."""
        return _Masked(self.width, self.heads, input_shape[-1], outputs)


class _Masked(nn.Module):
    def __init__(self, width: int, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.heads, self.embed = heads, nn.Linear(inputs, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.Linear(width, 3 * width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [B, C]; the first block sees tokens nearby, the second those before."""
        h = self.embed(x)
        places = torch.arange(h.shape[1], device=h.device)
        near = (places[:, None] - places).abs() <= 3
        first, second, third, fourth = self.norms
        q, k, v = self.qkv(first(h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        h = h + seen.transpose(1, 2).flatten(-2)
        h = h + self.mlps[0](second(h))
        read = third(h)
        later = places[:, None] < places
        h = h + self.attention(read, read, read, attn_mask=later, need_weights=False)[0]
        h = h + self.mlps[1](fourth(h))
        return self.head(h.mean(1))


COMPARED = (
    Network("mlp", MLP((100, 100, 100), activation="silu"), (784,)),
    Network("cnn with batch norm", SmoothCNN(), (1, 16, 16)),
    Network("transformer with masks and dropout", MaskedTransformer(), (16, 24)),
    Network("gru", RecurrentReader(width=32), (12, 8)),
)
"""The networks for the comparison of engines."""


def agreement(
    methods: Sequence[str],
    engines: Sequence[str],
    device: torch.device,
    precisions: Sequence[str] = ("float32", "bfloat16"),
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """One row for each network, method, precision and engine, with its deviation or an error."""
    rows, cpu, points = [], torch.device("cpu"), STEPS * _BATCH
    for network in COMPARED:
        exact = Case(network, _MEMBERS, _BATCH, "float64", "sgd", cpu, points, _RATE)
        for method in methods:
            wanted, _ = _attempt(exact, method, "loop+eager")
            for precision in precisions:
                case = replace(exact, precision=precision, device=device)
                rows += [_row(case, method, engine, wanted) for engine in engines]
            say(f"{network.name}, {method}: compared")
    return rows


def deviation(tensors: Tree, wanted: Tree) -> float:
    """The largest relative difference of any tensor.

    >>> deviation({"w": torch.tensor([1.0, 5.0])}, {"w": torch.tensor([1.0, 4.0])})
    0.25
    """
    worst = 0.0
    for name, tensor in wanted.items():
        if tensor.is_floating_point():
            difference = (tensors[name].double().cpu() - tensor.double()).abs().max()
            worst = max(worst, float(difference / tensor.double().abs().max().clamp(min=1e-300)))
    return worst


def _row(case: Case, method: str, engine: str, wanted: Tree | Exception) -> dict[str, Any]:
    row = {
        "model": case.network.name,
        "method": method,
        "engine": engine,
        "precision": case.precision,
        "device": str(case.device),
    }
    if isinstance(wanted, Exception):
        return row | {"error": reason(wanted)}
    tensors, notes = _attempt(case, method, engine)
    if isinstance(tensors, Exception):
        return row | {"error": reason(tensors)}
    return row | {"deviation": deviation(tensors, wanted), "note": "; ".join(notes) or None}


def _attempt(case: Case, method: str, engine: str) -> tuple[Tree | Exception, list[str]]:
    """The tensors of the ensemble after the steps, or the error; and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ensemble = case.make()
            with calculating_in(case.precision, ensemble):
                steps = trainer(case, ensemble, method, engine, STEPS, strength=_STRENGTH)
                for _ in steps.run():
                    pass
            result: Tree | Exception = {n: t.detach() for n, t in ensemble.state.items()}
        except Exception as error:
            result = error
    notes = (str(w.message) for w in caught if issubclass(w.category, ShoalWarning))
    return result, list(dict.fromkeys(notes))
