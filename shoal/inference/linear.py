"""Linear layers of many members at once.

`vmap` turns a linear layer into a batched product after copying the inputs that members share, and
its weight gradients come back transposed. Here the outputs are laid out [M, out, B]: members that
share their inputs need one large product, $[M · out, in] [in, B]$, and every gradient has the
layout of its weight.

The stacked tensors are taken out of `vmap` and the result is put back. An autograd function with a
rule for `vmap` would do the same, but its calls take as long as a small layer's products.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009

__all__ = ["MemberLinear", "install_linear"]


class MemberLinear(nn.Linear):
    """Stands in for `nn.Linear` inside an ensemble; outside of `vmap` it is the same."""

    def forward(self, input: Tensor) -> Tensor:
        """x W^T + b."""
        if input.ndim != 2 or not functorch.is_batchedtensor(self.weight):
            return F.linear(input, self.weight, self.bias)
        level = functorch.maybe_current_level()
        weight, at_weight = functorch._unwrap_batched(self.weight, level)
        if at_weight is None:  # the members belong to a `vmap` further out
            return F.linear(input, self.weight, self.bias)
        x, at_x = functorch._unwrap_batched(input, level)
        column = (
            None if self.bias is None else _column(*functorch._unwrap_batched(self.bias, level))
        )
        weight = weight.movedim(at_weight, 0)
        if at_x is None:
            outputs = _shared_inputs(x, weight, column)
        else:
            outputs = _own_inputs(x.movedim(at_x, 0), weight, column)
        return functorch._add_batch_dim(outputs.mT, 0, level)


def install_linear(module: nn.Module) -> None:
    """Let the linear layers of `module` know of members, in place."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = MemberLinear


def _column(bias: Tensor, at: int | None) -> Tensor:
    return bias[None, :, None] if at is None else bias.movedim(at, 0).unsqueeze(-1)


def _shared_inputs(x: Tensor, weight: Tensor, column: Tensor | None) -> Tensor:
    members, out, _ = weight.shape
    flat = weight.reshape(members * out, -1)
    wide = None if column is None else column.expand(members, out, 1).reshape(-1, 1)
    # On a CPU the product takes a fifth longer when it has to turn the few inputs itself.
    columns = x.mT.contiguous() if x.device.type == "cpu" else x.mT
    outputs = flat @ columns if wide is None else torch.addmm(wide, flat, columns)
    return outputs.reshape(members, out, len(x))


def _own_inputs(x: Tensor, weight: Tensor, column: Tensor | None) -> Tensor:
    return weight @ x.mT if column is None else torch.baddbmm(column, weight, x.mT)
