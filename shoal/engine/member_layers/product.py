"""x W^T + bias of members' rows [M, N, in] as one batched product, twice differentiable."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal.engine.derivatives.demand import wanted
from shoal.engine.member_layers.activation import add_bias_, column_sums
from shoal.engine.member_layers.backend import by_kernels

__all__ = ["product"]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias [M, N, out] for weights [M, out, in] and a bias [M, out]."""
    return _Product.apply(x, weight, bias)  # pyright: ignore[reportReturnType]


class _Product(Function):
    """The gradient at W has the layout of W, so that no later pass has to turn it."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return torch.bmm(x, weight.mT)
        if by_kernels(x):  # `baddbmm` would write the bias to memory first, row by row
            return add_bias_(torch.bmm(x, weight.mT), bias)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        x, weight, bias = ctx.saved_tensors
        g = gradients[0]
        at_x = torch.bmm(g, weight) if wanted(ctx, 0) else None
        at_weight = torch.bmm(g.mT, x) if wanted(ctx, 1) else None
        at_bias = None
        if bias is not None and wanted(ctx, 2):
            once = by_kernels(g) and not torch.is_grad_enabled()
            at_bias = column_sums(g).to(bias.dtype) if once else g.sum(1)
        return at_x, at_weight, at_bias
