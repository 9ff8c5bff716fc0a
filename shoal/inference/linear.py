"""Linear layers of many members at once.

`vmap` turns a linear layer into a batched product after copying the inputs that members share, and
its weight gradients come back transposed. Here the outputs are laid out [M, out, B]: members that
share their inputs need one large product, $[M · out, in] [in, B]$, and every gradient has the
layout of its weight.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

is_batched = getattr(torch._C, "_functorch").is_batchedtensor  # noqa: B009

__all__ = ["MemberLinear", "install"]


class MemberLinear(nn.Linear):
    """Stands in for `nn.Linear` inside an ensemble; outside of `vmap` it is the same."""

    def forward(self, input: Tensor) -> Tensor:
        """x W^T + b."""
        if input.ndim != 2 or not is_batched(self.weight):
            return F.linear(input, self.weight, self.bias)
        return _Linear.apply(input, self.weight, self.bias)  # pyright: ignore[reportReturnType]


def install(module: nn.Module) -> None:
    """Let the linear layers of `module` know of members, in place."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = MemberLinear


class _Linear(torch.autograd.Function):
    """A linear layer with a rule of its own for many members."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.has_bias = inputs[2] is not None

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        return gradient @ weight, gradient.mT @ x, gradient.sum(0) if ctx.has_bias else None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        at_x, at_weight, at_bias = in_dims
        weight = weight.movedim(at_weight, 0)
        column = None if bias is None else _column(bias, at_bias)
        if at_x is not None:
            return _own_inputs(x.movedim(at_x, 0), weight, column).mT, 0
        members, out, _ = weight.shape
        flat = weight.reshape(members * out, -1)
        wide = None if column is None else column.expand(members, out, 1).reshape(-1, 1)
        outputs = flat @ x.mT if wide is None else torch.addmm(wide, flat, x.mT)
        return outputs.reshape(members, out, len(x)).mT, 0


def _column(bias: Tensor, at: int | None) -> Tensor:
    return bias[None, :, None] if at is None else bias.movedim(at, 0).unsqueeze(-1)


def _own_inputs(x: Tensor, weight: Tensor, column: Tensor | None) -> Tensor:
    return weight @ x.mT if column is None else torch.baddbmm(column, weight, x.mT)
