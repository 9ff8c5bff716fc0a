"""Recomputed activations: a block keeps its inputs alone, and runs once more in the backward pass.

A network of n blocks then keeps n inputs and the activations of one block, for one more forward
pass (Chen et al. 2016, arXiv 1604.06174). Blocks are the layers with layers of their own in an
`nn.Sequential` or `nn.ModuleList`. Members must run one after another: the second pass of a block
comes after `vmap` has ended.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.engine.members.layers import KeyedDropout
from shoal.engine.saved_bytes import counted

__all__ = ["blocks_of", "recomputed_blocks"]

_LISTS = (nn.Sequential, nn.ModuleList)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of a network, in order; none if its lists hold single layers only.

    >>> stage = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)))
    >>> len(blocks_of(nn.Sequential(nn.Linear(2, 2), stage)))
    3
    """
    blocks = []
    for child in module.children():
        inner = blocks_of(child)
        is_block = isinstance(module, _LISTS) and not inner and any(child.children())
        blocks += [child] if is_block else inner
    return blocks


@contextmanager
def recomputed_blocks(module: nn.Module) -> Iterator[None]:
    """A block of code in which the module's blocks keep no activations for the backward pass."""
    patched = []
    for block in blocks_of(module):
        patched.append((block, block.__dict__.get("forward")))
        block.__dict__["forward"] = _Lightly(block, block.forward)
    try:
        yield
    finally:
        for block, former in patched:
            del block.__dict__["forward"]
            if former is not None:
                block.__dict__["forward"] = former


class _Lightly:
    """The forward pass of a block, without its activations."""

    def __init__(self, block: nn.Module, forward: Callable[..., Any]) -> None:
        self.block, self.forward = block, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        again = _Again(self.block, args, kwargs)
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            return self.forward(*args, **kwargs)


class _Again:
    """One pass of a block: numbers its saved tensors, and finds them by another pass.

    The other pass has the same weights, buffers, inputs and random numbers. It writes to copies of
    the buffers, so that running statistics are updated once.
    """

    def __init__(self, block: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        self.block, self.count = block, 0
        self.weights = dict(block.named_parameters())
        self.buffers = {name: tensor.clone() for name, tensor in block.named_buffers()}
        self.args, self.kwargs = args, kwargs
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        self.count_of_inputs = counted(inputs)
        self.devices = sorted({t.device.index or 0 for t in self.weights.values() if t.is_cuda})
        self.random = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self.devices]
        dropouts = (layer for layer in block.modules() if isinstance(layer, KeyedDropout))
        self.calls = {layer: layer.calls for layer in dropouts}
        self.recomputed: dict[int, tuple[Tensor, list[object]]] = {}

    def pack(self, tensor: Tensor) -> int:
        """The number of a saved tensor, in place of the tensor."""
        self.count += 1
        return self.count - 1

    def unpack(self, number: int) -> Tensor:
        """The saved tensor of this number."""
        if number not in self.recomputed:
            self._run()
        return self.recomputed.pop(number)[0]

    def _run(self) -> None:
        self.recomputed.clear()

        def pack(tensor: Tensor) -> int:
            self.recomputed[len(self.recomputed)] = tensor.detach(), counted([tensor])
            return len(self.recomputed) - 1  # not the tensor: an output in its own graph is a cycle

        args = [_leaf(a) for a in self.args]
        kwargs = {name: _leaf(a) for name, a in self.kwargs.items()}
        state = self.weights | {name: tensor.clone() for name, tensor in self.buffers.items()}
        with torch.random.fork_rng(self.devices), torch.enable_grad():
            torch.set_rng_state(self.random[0])
            for device, known in zip(self.devices, self.random[1], strict=True):
                torch.cuda.set_rng_state(known, device)
            with torch.autograd.graph.saved_tensors_hooks(pack, self.unpack), self._same_masks():
                functional_call(self.block, state, tuple(args), kwargs)

    @contextmanager
    def _same_masks(self) -> Iterator[None]:
        now = {layer: layer.calls for layer in self.calls}
        for layer, calls in self.calls.items():
            layer.calls = calls
        yield
        for layer, calls in now.items():
            layer.calls = calls


def _leaf(argument: Any) -> Any:
    """The argument of the first pass, without what was computed before it."""
    if not isinstance(argument, Tensor):
        return argument
    return argument.detach().requires_grad_(argument.requires_grad)
