"""The last layer of a network: what it multiplies, and that it is what makes the outputs."""

from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError

__all__ = ["features_of", "last_linear"]


def last_linear(module: nn.Module, x: Tensor) -> tuple[str, nn.Linear]:
    """Name and module of the linear layer whose outputs are those of the network."""
    made: dict[str, Any] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, name=name: made.update({name: out}))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        with torch.no_grad():
            outputs = module(x)
    finally:
        for hook in hooks:
            hook.remove()
    for name, out in made.items():
        if out is outputs:
            layer = module.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            return name or "outputs", layer
    raise ConfigError(
        "a prior on the last layer needs a network that ends with a linear layer, "
        "which this one does not; leave such priors out"
    )


def features_of(module: nn.Module, x: Tensor, batch_size: int = 1024) -> tuple[Tensor, Tensor]:
    """Inputs [B, F] of the last layer, and the outputs of the network [B, C]."""
    _, layer = last_linear(module, x[:1])
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        with torch.no_grad():
            outputs = [module(part) for part in x.split(batch_size)]
    finally:
        hook.remove()
    return torch.cat(seen), torch.cat(outputs)
