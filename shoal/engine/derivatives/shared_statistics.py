"""Some rows of a batch, normalised with the statistics of the whole batch.

The rows run through the network separately. Batch normalisation uses the statistics that the same
layer found in the batch, as functions of the weights, so they are differentiated. The statistics do
not depend on the rows: the output of one row depends on no other row, and input gradients cost only
the rows.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.core.errors import ConfigError
from shoal.core.types import Tree
from shoal.engine.derivatives import affine_formulas
from shoal.engine.derivatives.affine import Channels, affine
from shoal.engine.derivatives.backend import by_kernels
from shoal.engine.derivatives.deferred import Deferred, computed
from shoal.engine.derivatives.layout import all_but_channels, wide
from shoal.engine.derivatives.torch_overrides import BatchNorm, fused_layers

__all__ = ["forward_with_rows"]

Moments = list[Tensor]
"""Mean and 1 / std of each channel; None for a layer without batch statistics."""


def forward_with_rows(
    module: nn.Module, tensors: Tree, x: Tensor, part: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs of a network for a batch, and for some rows with the same statistics.

    Running statistics and other buffers follow the batch, not the rows.

    >>> layer, x = nn.BatchNorm1d(1), torch.tensor([[-3.0], [-1.0], [1.0], [3.0]])
    >>> whole, part = forward_with_rows(layer, {}, x, x[2:])
    >>> torch.allclose(part, whole[2:])
    True

    Args:
        module: the network.
        tensors: replace its parameters and buffers.
        x: the batch [B, ...].
        part: some rows [P, ...].
    """
    noted: list[Moments] = []
    with _Noting(noted):
        outputs = computed(functional_call(module, tensors, (x,)))
    left = iter(noted)
    with _Giving(left), _statistics_still(module):
        more = functional_call(module, tensors | _other_memory(module, tensors), (part,))
    if next(left, None) is not None:
        raise _otherwise()
    return outputs, more


class _Watching(fused_layers):
    """Fused layers, but for batch normalisation where `_met` has something else to offer."""

    def __init__(self, noted: Any) -> None:
        super().__init__()
        self.noted = noted

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        met = None
        if func is F.batch_norm:
            met = self._met(BatchNorm(*computed(args), **computed(kwargs or {})))
        return super().__torch_function__(func, types, args, kwargs) if met is None else met

    def _met(self, called: BatchNorm) -> Tensor | None:
        raise NotImplementedError


class _Noting(_Watching):
    """Notes the statistics of every normalised layer, in the order in which layers are called."""

    noted: list[Moments]

    def _met(self, called: BatchNorm) -> Tensor:
        moments: Moments = []
        self.noted.append(moments)
        x = called.input
        if by_kernels(x) and (called.weight is None) == (called.bias is None):
            # A layer can be computed twice, with and without what follows it.
            return self._batch_norm(called, functools.partial(moments.__setitem__, slice(2)))
        if called.training:
            variance, mean = torch.var_mean(wide(x), all_but_channels(x), correction=0)
            moments += [mean, (variance + called.eps).rsqrt()]
        return F.batch_norm(*called)


class _Giving(_Watching):
    """Gives every normalised layer what has been noted of it."""

    noted: Iterator[Moments]

    def _met(self, called: BatchNorm) -> Tensor | None:
        moments = next(self.noted, None)
        if moments is None:
            raise _otherwise()
        if not moments:
            return None
        x, channels = called.input, Channels(called.weight, called.bias, *moments)
        if by_kernels(x):
            return Deferred.of(x, functools.partial(affine, x, channels))
        return affine_formulas.shift(x, channels, None, rectified=False)


def _otherwise() -> ConfigError:
    return ConfigError(
        "the network calls other normalisation layers for some rows than for the batch; "
        "set fraction=1"
    )


def _other_memory(module: nn.Module, tensors: Tree) -> Tree:
    """Copies of the buffers that are not those of batch normalisation, which stay anyway."""
    still = {b for m in module.modules() if isinstance(m, _BatchNorm) for b in m.buffers()}
    named = ((name, b) for name, b in module.named_buffers() if b not in still)
    return {name: tensors.get(name, buffer).clone() for name, buffer in named}


@contextmanager
def _statistics_still(module: nn.Module) -> Iterator[None]:
    """A block in which layers do not count their batches."""
    layers = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True
