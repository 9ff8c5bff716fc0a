r"""Perceptrons of all members by formulas: outputs, and gradients at the weights.

With data points as columns, a layer is $z = W h + b$ and $h' = a(z)$. A cotangent δ at z gives

$$ ∂W = δ h^T, \qquad ∂b = \sum_n δ_n, \qquad δ_h = W^T δ, \qquad δ_z = a'(z) δ_{h'}. $$

Autograd under `vmap` makes twice as many calls, which take most of the time of small networks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.types import Tree
from shoal.engine.members.group import Group
from shoal.engine.members.layers import KeyedDropout, MemberLinear

__all__ = ["Passed", "Perceptrons"]

_aten: Any = torch.ops.aten

_SLOPES: dict[type[nn.Module], Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda layer, g, z, h: _aten.threshold_backward(g, h, 0),
    nn.Tanh: lambda layer, g, z, h: _aten.tanh_backward(g, h),
    nn.Sigmoid: lambda layer, g, z, h: _aten.sigmoid_backward(g, h),
    nn.SiLU: lambda layer, g, z, h: _aten.silu_backward(g, z),
    nn.GELU: lambda layer, g, z, h: _aten.gelu_backward(g, z, approximate=layer.approximate),
    nn.ELU: lambda layer, g, z, h: _aten.elu_backward(g, layer.alpha, 1, 1, False, z),
    nn.Softplus: lambda layer, g, z, h: _aten.softplus_backward(g, z, layer.beta, layer.threshold),
}
"""a'(z) δ of each activation, from δ, z and a(z)."""


class Passed(NamedTuple):
    """What a backward pass needs of a forward pass.

    Attributes:
        outputs: of every member [m, B, C]; the data points lie next to each other.
        before: what each layer was given, with data points as columns.
    """

    outputs: Tensor
    before: list[Tensor]


class Perceptrons:
    """The networks of a group that are linear layers and activations in a row.

    Attributes:
        layers: each linear layer by the names of its weight and bias, each activation as it is.
        flattens: whether inputs of any shape become rows.
    """

    def __init__(self, layers: list[tuple[str, str | None] | nn.Module], flattens: bool) -> None:
        self.layers, self.flattens = layers, flattens
        self._first = next(i for i, layer in enumerate(layers) if isinstance(layer, tuple))

    @classmethod
    def of(cls, group: Group) -> "Perceptrons | None":
        """The perceptrons of a group, as they run in evaluation mode; None for other networks."""
        special = group.shared or group.buffers or group.compute or group.shards
        if special or group.derivatives is not None:
            return None
        network = group.skeleton
        row = type(network) is nn.Sequential
        layers: list[tuple[str, str | None] | nn.Module] = []
        flattens = False
        for name, layer in network._modules.items() if row else [("", network)]:
            if layer is None or layer._forward_hooks or (row and layer._forward_pre_hooks):
                return None
            start = f"{name}." if name else ""
            if type(layer) is MemberLinear:
                layers.append((f"{start}weight", None if layer.bias is None else f"{start}bias"))
            elif type(layer) in _SLOPES and (type(layer) is nn.ReLU or not _in_place(layer)):
                layers.append(layer)
            elif type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
                if layers:
                    return None
                flattens = True
            elif type(layer) not in (nn.Identity, KeyedDropout):
                return None
        names = [n for each in layers if isinstance(each, tuple) for n in each if n is not None]
        known = names and sorted(names) == sorted(group.weights)
        return cls(layers, flattens) if known else None

    def takes(self, x: Any) -> bool:
        """Whether the formulas are those of the networks for these inputs."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return False
        return x.ndim == 2 or (self.flattens and x.ndim > 2)

    def forward(self, weights: Tree, x: Tensor) -> Passed:
        """Outputs for inputs [B, ...] that all members share."""
        h, before = x.flatten(1).mT, []
        for place, layer in enumerate(self.layers):
            if isinstance(layer, tuple):
                own, bias = weights[layer[0]], layer[1]
                if h.ndim == 2 and h.shape[-1] == 1:
                    before.append(h.expand(len(own), *h.shape))
                    h = _of_one(x.flatten(1), own, None if bias is None else weights[bias])
                    continue
                before.append(h if h.ndim == 3 else h.expand(len(own), *h.shape))
                product = own, before[-1]
                if bias is None:
                    h = torch.bmm(*product)
                else:
                    h = torch.baddbmm(weights[bias].unsqueeze(-1), *product)
            else:
                before.append(h)
                fresh = place > 0 and isinstance(self.layers[place - 1], tuple)
                h = h.relu_() if fresh and type(layer) is nn.ReLU else layer(h)
        return Passed(h.mT, before)

    def backward(self, weights: Tree, passed: Passed, cotangent: Tensor, into: Tree) -> None:
        """Write the gradients at the weights, given those at the outputs [m, B, C]."""
        # On a CPU a product with a transposed cotangent takes ten times as long.
        g, h = cotangent.mT.contiguous(), passed.outputs.mT
        for place in range(len(self.layers) - 1, self._first - 1, -1):
            layer, z = self.layers[place], passed.before[place]
            if not isinstance(layer, tuple):
                g = _SLOPES[type(layer)](layer, g, z, h)
            else:
                torch.bmm(g, z.mT, out=into[layer[0]])
                if layer[1] is not None:
                    torch.sum(g, -1, out=into[layer[1]])
                if place > self._first:
                    g = torch.bmm(weights[layer[0]].mT, g)
            h = z


def _of_one(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The layer for one point [1, in] that members share: one product, which reads weights once."""
    members, out, _ = weight.shape
    flat = None if bias is None else bias.flatten()
    return torch.nn.functional.linear(x, weight.flatten(0, 1), flat).view(members, out, 1)


def _in_place(layer: nn.Module) -> bool:
    return bool(getattr(layer, "inplace", False))
