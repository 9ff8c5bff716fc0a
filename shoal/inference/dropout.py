"""Dropout whose masks are a pure function of seed, step, member, layer and element.

A generator hands out its numbers in the order of the calls, and that order differs between members
run together and one after another, between chunks, and after a resume. Here each mask is hashed
from what it belongs to, so that every way of running the members draws the same masks and no state
is kept.
"""

import torch
from torch import Tensor, nn

from shoal.core.random import chance, hashed, key

__all__ = ["KeyedDropout", "dropout_keys", "install_dropout"]


class KeyedDropout(nn.Module):
    """Stands in for `nn.Dropout` (and its 1d, 2d and 3d forms) inside an ensemble.

    Attributes:
        p: probability of dropping.
        layer: index of this layer in the network.
        channels: leading axes that a mask covers one number at a time (None: every element).
    """

    key: Tensor

    def __init__(self, p: float, layer: int, channels: int | None) -> None:
        super().__init__()
        self.p, self.layer, self.channels = p, layer, channels
        self.calls = 0
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x / (1 - p) where chance, hashed from the element, keeps it, else 0."""
        if not self.training or self.p == 0:
            return x
        if self.p >= 1:
            return x * 0
        shape = x.shape if self.channels is None else x.shape[: self.channels]
        place = hashed(self.key + (self.calls << 20) + self.layer)
        self.calls += 1
        keep = chance(place, shape, 1 - self.p)
        return x * keep.reshape(keep.shape + (1,) * (x.ndim - keep.ndim)) / (1 - self.p)


def install_dropout(module: nn.Module) -> list[str]:
    """Replace the dropout layers of `module` in place; returns the names of their keys."""
    keyed: dict[nn.Module, KeyedDropout] = {}
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, _KINDS):
            channels = None if type(layer) is nn.Dropout else 2
            stand_in = keyed.setdefault(layer, KeyedDropout(layer.p, len(keyed), channels))
            module.set_submodule(name, stand_in)
    if keyed:
        module.register_forward_pre_hook(_restart)
    return [name for name, _ in module.named_buffers() if _is_key(module, name)]


def dropout_keys(seed: int, step: int | Tensor, members: Tensor) -> Tensor:
    """One 64-bit key a member [M] for the masks of one step."""
    return hashed(key(seed, "dropout", step, members.device) + members)


_KINDS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _is_key(module: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last == "key" and isinstance(module.get_submodule(owner), KeyedDropout)


def _restart(module: nn.Module, _: tuple) -> None:
    for layer in module.modules():
        if isinstance(layer, KeyedDropout):
            layer.calls = 0
