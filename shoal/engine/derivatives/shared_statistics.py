"""Some rows of a batch, normalised with the statistics of the whole batch.

The rows run through the network separately. Batch normalisation uses the statistics that the same
layer found in the batch, as functions of the weights, so they are differentiated. The statistics do
not depend on the rows: the output of one row depends on no other row, and input gradients cost only
the rows.

In a whole batch the points act on each other's input gradients through the statistics. Coupled rows
keep these terms, with means over the rows in the place of means over the batch (`normalise`).

Rows that lead their batch read its results (`known_rows`), where layers run by kernels.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

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
from shoal.engine.derivatives.convolution import Geometry, convolve
from shoal.engine.derivatives.deferred import Deferred, Waiting, computed
from shoal.engine.derivatives.known_rows import KnownRows, draws_numbers
from shoal.engine.derivatives.layout import all_but_channels, wide
from shoal.engine.derivatives.normalisation import normalise
from shoal.engine.derivatives.torch_overrides import BatchNorm, fused_layers

__all__ = ["RowRule", "forward_with_rows", "row_rule"]


class RowRule(NamedTuple):
    """How some rows of a batch run beside it.

    Attributes:
        coupled: the rows act on each other's gradients, as points of a batch do that batch
            normalisation couples; otherwise the gradient of a row depends on no other row.
        leading: the rows are the first rows of the batch, so that results of the batch are theirs.
    """

    coupled: bool = False
    leading: bool = False


_APART = RowRule()
_rule: ContextVar[RowRule] = ContextVar("row_rule", default=_APART)


@contextmanager
def row_rule(rule: RowRule) -> Iterator[None]:
    """A block in which `forward_with_rows` follows a rule."""
    before = _rule.set(rule)
    try:
        yield
    finally:
        _rule.reset(before)


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
    known = KnownRows(len(part)) if _rule.get().leading else None
    with _Noting(noted, known):
        outputs = computed(functional_call(module, tensors, (x,)))
    left = iter(noted)
    with _Giving(left, known), _statistics_still(module):
        more = functional_call(module, tensors | _other_memory(module, tensors), (part,))
    if next(left, None) is not None:
        raise _otherwise()
    return outputs, more


class _Watching(fused_layers):
    """Fused layers, but for batch normalisation where `_met` has something else to offer.

    Attributes:
        noted: statistics of the batch, one entry per normalised layer.
        known: results of the batch; None if the rows compute everything.
    """

    def __init__(self, noted: Any, known: KnownRows | None) -> None:
        super().__init__()
        self.noted, self.known = noted, known

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        met = None
        if func is F.batch_norm:
            met = self._met(BatchNorm(*computed(args), **computed(kwargs or {})))
        elif self.known is not None and draws_numbers(func):
            self.known.reliable = False
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

    def _convolved(self, input: Tensor, weight: Tensor, *more: Any) -> Tensor:
        outputs = super()._convolved(input, weight, *more)
        return outputs if self.known is None else self.known.note(weight.shape).add(outputs)

    def _waiting(self, input: Tensor, layer: Waiting) -> Tensor:
        if self.known is None:
            return super()._waiting(input, layer)
        results = self.known.note(input.shape[1:])

        def noted(residual: Tensor | None = None, rectified: bool = False) -> Tensor:
            return results.add(layer(residual, rectified), (residual is not None, rectified))

        return super()._waiting(input, noted)


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
        if _rule.get().coupled:
            mean, rstd = moments
            layer = functools.partial(
                normalise, x, channels.weight, channels.bias, (mean, rstd), still=True
            )
        elif by_kernels(x):
            layer = functools.partial(affine, x, channels)
        else:
            return affine_formulas.shift(x, channels, None, rectified=False)
        return self._waiting(x, layer) if by_kernels(x) else layer()

    def _convolved(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        known = None if self.known is None else self.known.read(weight.shape).get(None)
        return convolve(input, weight, bias, geometry, known)

    def _biased(self, input: Tensor, weight: Tensor, bias: Tensor, geometry: Geometry) -> Tensor:
        shape, channels = geometry.outputs(input, weight), Channels(bias=bias)
        found = {} if self.known is None else self.known.read(shape[1:])
        if not found:
            whole = convolve(input, weight, None, geometry)
            return Deferred.of(whole, functools.partial(affine, whole, channels))

        def layer(residual: Tensor | None = None, rectified: bool = False) -> Tensor:
            known = found.get((residual is not None, rectified))
            # The derivatives of a bias do not depend on the convolution: any value is good enough.
            inner = convolve(input, weight, None, geometry, known)
            return affine(inner, channels, residual, rectified, known)

        return Deferred.of(next(iter(found.values())).value, layer)

    def _waiting(self, input: Tensor, layer: Any) -> Tensor:
        if self.known is None:
            return super()._waiting(input, layer)
        found = self.known.read(input.shape[1:])

        def read(residual: Tensor | None = None, rectified: bool = False) -> Tensor:
            known = found.get((residual is not None, rectified))
            return layer(residual=residual, rectified=rectified, known=known)

        return super()._waiting(input, read)


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
