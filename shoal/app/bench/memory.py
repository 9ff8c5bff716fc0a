"""How much memory of a GPU training takes, and the least it could take one member at a time."""

import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from shoal.app.bench.contestants import ModuleLoop

__all__ = ["Peak", "floor"]

_MIB = 2**20


class Peak:
    """The most memory held above what was held before, in MiB; None where nobody counts it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def forget(self) -> None:
        """What was held for a moment until now does not count."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def mib(self) -> float | None:
        """So far."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - self.before) / _MIB


def floor(loop: ModuleLoop) -> float | None:
    """Activations of one member, and weights, gradients and optimiser states of all, in MiB.

    Args:
        loop: members that have been trained a few steps.
    """
    device = loop.case.device
    if device.type != "cuda":
        return None
    x, y = next(loop.batches)
    before = torch.cuda.memory_allocated(device)
    loss = loop.loss(loop.modules[0], x, y)
    activations = torch.cuda.memory_allocated(device) - before
    del loss
    states = [state for optimizer in loop.optimizers for state in optimizer.state.values()]
    kept = _bytes(value for state in states for value in state.values())
    weights = _bytes(p for module in loop.modules for p in module.parameters())
    return (activations + 2 * weights + kept) / _MIB


def _bytes(values: Iterable[object]) -> int:
    tensors = [value for value in values if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
