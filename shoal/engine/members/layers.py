"""Layers that let members run together under `vmap`.

`KeyedDropout` draws masks from keys, one per member. `MemberLinear` batches the members' matrix
products. `MemberRReLU` has operations that `vmap` knows. Embeddings get probes, at which input
gradients of tokens are recorded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.random import chance, hashed, key
from shoal.core.structure import Inputs
from shoal.core.types import Tree
from shoal.engine.derivatives.replicas import first_element
from shoal.engine.functorch import functorch, unwrapped
from shoal.engine.members.network_call import call_network
from shoal.engine.members.stack import evaluation_mode

__all__ = [
    "KeyedDropout",
    "MemberLinear",
    "MemberRReLU",
    "dropout_keys",
    "first_called",
    "install_dropout",
    "install_embeddings",
    "install_layers",
    "member_linear",
    "plus_product",
]


class KeyedDropout(nn.Module):
    """Replaces `nn.Dropout` (and its 1d, 2d and 3d forms) inside an ensemble.

    Attributes:
        p: probability of dropping.
        layer: index of this layer in the network.
        channels: number of leading axes of the mask (None: a mask of every element).
    """

    key: Tensor

    def __init__(self, p: float, layer: int, channels: int | None) -> None:
        super().__init__()
        self.p, self.layer, self.channels = p, layer, channels
        self.calls = 0
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x / (1 - p) for kept elements, else 0; a hash of the element decides."""
        if not self.training or self.p == 0:
            return x
        if self.p >= 1:
            return x * 0
        shape = x.shape if self.channels is None else x.shape[: self.channels]
        place = hashed(self.key + (self.calls << 20) + self.layer)
        self.calls += 1
        keep = chance(place, shape, 1 - self.p, first_element(shape))
        return x * keep.reshape(keep.shape + (1,) * (x.ndim - keep.ndim)) / (1 - self.p)


def install_dropout(module: nn.Module) -> list[str]:
    """Replace the dropout layers of `module` in place; returns the names of their keys."""
    keyed: dict[nn.Module, KeyedDropout] = {}
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, _KINDS):
            channels = None if type(layer) is nn.Dropout else 2
            stand_in = keyed.setdefault(layer, KeyedDropout(layer.p, len(keyed), channels))
            module.set_submodule(name, stand_in)
    keys = [name for name, _ in module.named_buffers() if _is_key(module, name)]
    if keys:
        module.register_forward_pre_hook(_restart)
    return keys


def dropout_keys(seed: int, step: int | Tensor, members: Tensor) -> Tensor:
    """One 64-bit key per member [M] for the masks of one step."""
    return hashed(key(seed, "dropout", step, members.device) + members)


_KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _is_key(module: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last == "key" and isinstance(module.get_submodule(owner), KeyedDropout)


def _restart(module: nn.Module, _: tuple) -> None:
    for layer in module.modules():
        if isinstance(layer, KeyedDropout):
            layer.calls = 0


class MemberLinear(nn.Linear):
    """Replaces `nn.Linear` inside an ensemble; the same outside of `vmap`."""

    def forward(self, input: Tensor) -> Tensor:
        """x W^T + b."""
        return member_linear(input, self.weight, self.bias)


def member_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, as one product for all members under `vmap`."""
    if torch.compiler.is_compiling():  # the compiler sees through `vmap` by itself
        return F.linear(input, weight, bias)
    if input.ndim != 2 or not functorch.is_batchedtensor(weight):
        return F.linear(input, weight, bias)
    level = functorch.maybe_current_level()
    own, at_weight = functorch._unwrap_batched(weight, level)
    if at_weight is None:  # the members belong to an outer `vmap`
        return F.linear(input, weight, bias)
    x, at_x = functorch._unwrap_batched(input, level)
    column = None if bias is None else _column(*functorch._unwrap_batched(bias, level))
    own = own.movedim(at_weight, 0)
    if at_x is None:
        outputs = _shared_inputs(x, own, column)
    else:
        outputs = _own_inputs(x.movedim(at_x, 0), own, column)
    return functorch._add_batch_dim(outputs.mT, 0, level)


def plus_product(sum: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """sum + x W^T for x [..., in], as one pass over the sum of all members under `vmap`."""
    if torch.compiler.is_compiling():
        return sum + F.linear(x, weight)
    level = functorch.maybe_current_level()
    parts = [unwrapped(tensor, level) for tensor in (sum, x, weight)]
    if x.ndim < 2 or any(at is None for _, at in parts):
        return sum + F.linear(x, weight)
    whole, rows, factors = (tensor.movedim(at, 0) for tensor, at in parts)
    flat = whole.reshape(len(whole), -1, whole.shape[-1])
    rows = rows.reshape(len(rows), -1, rows.shape[-1])
    outputs = torch.baddbmm(flat, rows, factors.mT).view(whole.shape)
    return functorch._add_batch_dim(outputs, 0, level)


def _column(bias: Tensor, at: int | None) -> Tensor:
    return bias[None, :, None] if at is None else bias.movedim(at, 0).unsqueeze(-1)


def _shared_inputs(x: Tensor, weight: Tensor, column: Tensor | None) -> Tensor:
    members, out, _ = weight.shape
    flat = weight.reshape(members * out, -1)
    wide = None if column is None else column.expand(members, out, 1).reshape(-1, 1)
    # On a CPU the product takes a fifth longer if it must transpose the few inputs itself.
    columns = x.mT.contiguous() if x.device.type == "cpu" else x.mT
    outputs = flat @ columns if wide is None else torch.addmm(wide, flat, columns)
    return outputs.reshape(members, out, len(x))


def _own_inputs(x: Tensor, weight: Tensor, column: Tensor | None) -> Tensor:
    return weight @ x.mT if column is None else torch.baddbmm(column, weight, x.mT)


class MemberRReLU(nn.RReLU):
    """Replaces `nn.RReLU` inside an ensemble: `vmap` has no rule for the function of torch."""

    def forward(self, input: Tensor) -> Tensor:
        """x, and for negative x a slope times x: drawn in training, else its mean."""
        if not self.training:
            return F.leaky_relu(input, (self.lower + self.upper) / 2, self.inplace)
        slope = torch.empty_like(input).uniform_(self.lower, self.upper)
        outputs = torch.where(input >= 0, input, slope * input)
        return input.copy_(outputs) if self.inplace else outputs


_STAND_INS: dict[type, type[nn.Module]] = {nn.Linear: MemberLinear, nn.RReLU: MemberRReLU}


def install_layers(module: nn.Module) -> None:
    """Replace layers of `module` that members run together in another way, in place."""
    for layer in module.modules():
        layer.__class__ = _STAND_INS.get(type(layer), type(layer))


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def install_embeddings(module: nn.Module) -> None:
    """Add a probe to the embeddings of `module`, in place."""
    for layer in module.modules():
        if isinstance(layer, _EMBEDDINGS):
            layer.register_buffer("probe", torch.zeros(()), persistent=False)
            layer.register_forward_hook(_nudge)


def first_called(module: nn.Module, tensors: Tree, x: Inputs) -> tuple[str, torch.Size] | None:
    """Probe of the first embedding that a member calls on a batch, and the embedding's shape."""
    calls: list[tuple[str, torch.Size]] = []

    def note(name: str) -> Any:
        return lambda _, inputs, output: calls.append((name, output.shape))

    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, _EMBEDDINGS)]
    hooks = [layer.register_forward_hook(note(name)) for name, layer in layers]
    try:
        with torch.no_grad(), evaluation_mode(module):
            call_network(module, tensors, x)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls or calls[0][1][0] != len(x):
        return None
    name, shape = calls[0]
    return (f"{name}.probe" if name else "probe"), shape


def _nudge(layer: nn.Module, _: tuple, output: Tensor) -> Tensor:
    probe: Any = layer.probe
    return output if probe.ndim == 0 else output + probe
