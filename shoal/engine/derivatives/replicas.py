r"""One batch, divided between replicas: layers that must know of the rows of the other replicas.

    with divided_batch(Division(rows, add)):
        outputs = module(x[rows])

Dropout masks are those of these rows in the mask of the whole batch. Batch normalisation in
training mode takes mean and variance over the rows of all replicas:

$$ mean = \frac{1}{n} \sum_r \sum_{b \in r} x_b, \quad
   variance = \frac{1}{n} \sum_r \sum_{b \in r} (x_b - mean)^2. $$

The derivative of a sum over replicas is the sum of their cotangents, so the backward pass exchanges
as many sums as the forward pass, in the same order on all replicas, and can be differentiated again
(the first derivative is that of `nn.SyncBatchNorm`). Everything else treats each row by itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.core.errors import DataError
from shoal.engine.derivatives.deferred import computed
from shoal.engine.derivatives.layout import all_but_channels, per_channel, wide
from shoal.engine.functorch import Operation

__all__ = ["Division", "current_division", "divided_batch", "first_element"]

Add = Callable[[Tensor], Tensor]
"""Sum of a tensor over the replicas."""


@dataclass(frozen=True, eq=False)
class Division:
    """The rows of a batch that this replica runs.

    Attributes:
        rows: first row, and the row after the last one.
        add: sum of a tensor over the replicas.
    """

    rows: slice
    add: Add


_division: ContextVar[Division | None] = ContextVar("division", default=None)


def current_division() -> Division | None:
    """How the batch is divided here; None for a whole batch."""
    return _division.get()


@contextmanager
def divided_batch(division: Division) -> Iterator[None]:
    """A block in which networks run the rows of one replica."""
    before = _division.set(division)
    try:
        with _Normalising(division):
            yield
    finally:
        _division.reset(before)


def first_element(shape: torch.Size) -> int:
    """Place of the first element of these rows in the same tensor of the whole batch."""
    division = _division.get()
    if division is None:
        return 0
    rows = division.rows
    count = rows.stop - rows.start
    if shape[0] % count:
        raise DataError(
            f"dropout of shape {tuple(shape)} does not begin with the {count} rows of a replica; "
            f'type mesh="Kx1"'
        )
    return rows.start * (shape.numel() // count)


class _Normalising(TorchFunctionMode):
    """Batch normalisation by the statistics of all replicas."""

    def __init__(self, division: Division) -> None:
        super().__init__()
        self.division = division

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Replace batch normalisation in training mode, and call all other functions."""
        named: dict[str, Any] = kwargs or {}
        if func is F.batch_norm:
            args, named = computed(args), computed(named)
            outputs = _batch_norm(self.division.add, *args, **named)
            if outputs is not None:
                return outputs
        return func(*args, **named)


def _batch_norm(
    add: Add,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """γ (x - mean) / sqrt(variance + eps) + β; None in evaluation mode."""
    if not training:
        return None
    x = wide(input)
    axes = all_but_channels(x)
    here = x.new_full((1,), x.numel() // x.shape[1])
    summed: Any = _Sum.apply(torch.cat([x.sum(axes), here]), add)
    count = summed[-1].detach()
    mean = summed[:-1] / count
    centred = x - per_channel(mean, x)
    squares: Any = _Sum.apply(centred.square().sum(axes), add)
    variance = squares / count
    unbiased = variance * (count / (count - 1))
    for old, new in ((running_mean, mean), (running_var, unbiased)):
        if old is not None:
            old.mul_(1 - momentum).add_(new.detach(), alpha=momentum)
    outputs = centred * per_channel((variance + eps).rsqrt(), x)
    outputs = outputs if weight is None else outputs * per_channel(weight, x)
    outputs = outputs if bias is None else outputs + per_channel(bias, x)
    return outputs.to(input.dtype)


class _Sum(Operation):
    """Sum over the replicas, one message for all members under `vmap`."""

    @staticmethod
    def forward(own: Tensor, add: Add) -> Tensor:
        return add(own)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.add = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple:  # pyright: ignore
        return _Sum.apply(cotangent, ctx.add), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, own: Tensor, add: Add) -> tuple:
        return _Sum.apply(own.movedim(in_dims[0], 0), add), 0
