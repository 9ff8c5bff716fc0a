"""Embeddings that can be nudged: where whole-number inputs first become real ones.

A token has no gradient, but its embedding has. A probe of zeros is added to the output of the
embedding; the gradient with respect to the probe is the gradient there, and the user's module stays
as it is.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.core.types import Tree

__all__ = ["first_called", "install_embeddings"]

_KINDS = (nn.Embedding, nn.EmbeddingBag)


def install_embeddings(module: nn.Module) -> None:
    """Let the embeddings of `module` take a probe, in place."""
    for layer in module.modules():
        if isinstance(layer, _KINDS):
            layer.register_buffer("probe", torch.zeros(()), persistent=False)
            layer.register_forward_hook(_nudge)


def first_called(module: nn.Module, tensors: Tree, x: Tensor) -> tuple[str, torch.Size] | None:
    """Probe of the embedding that one member calls first on a batch, and the embedding's shape."""
    found: list[tuple[str, torch.Size]] = []

    def note(name: str) -> Any:
        return lambda _, inputs, output: found.append((name, output.shape))

    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, _KINDS)]
    hooks = [layer.register_forward_hook(note(name)) for name, layer in layers]
    training = module.training
    try:
        with torch.no_grad():
            functional_call(module.eval(), tensors, (x,))
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    if not found or found[0][1][0] != len(x):
        return None
    name, shape = found[0]
    return (f"{name}.probe" if name else "probe"), shape


def _nudge(layer: nn.Module, _: tuple, output: Tensor) -> Tensor:
    probe: Any = layer.probe
    return output if probe.ndim == 0 else output + probe
