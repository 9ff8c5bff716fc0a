"""Reverse-mode derivatives of pure functions of trees."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.core.types import Tree

__all__ = ["with_pullback"]

Pullback = Callable[[Sequence[Tensor]], Tree]


def with_pullback(
    function: Callable[[Tree], Sequence[Tensor]], at: Tree
) -> tuple[list[Tensor], Pullback]:
    """The values of `function`, and the map from cotangents at them to cotangents at its inputs.

    Inside a compiled region it goes through `torch.func`, which the compiler can see through;
    elsewhere through `torch.autograd`, which starts faster.

    >>> values, pull = with_pullback(lambda t: [t["x"] ** 2], {"x": torch.tensor([3.0])})
    >>> values, pull([torch.ones(1)])
    ([tensor([9.])], {'x': tensor([6.])})
    """
    if torch.compiler.is_compiling():
        values, pull = torch.func.vjp(lambda tree: list(function(tree)), at)  # pyright: ignore
        return values, lambda cotangents: pull(list(cotangents))[0]
    live = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
    with torch.enable_grad():
        values = list(function(live))

    def back(cotangents: Sequence[Tensor]) -> Tree:
        inputs = list(live.values())
        found = torch.autograd.grad(values, inputs, list(cotangents), allow_unused=True)
        pairs = zip(live.items(), found, strict=True)
        return {name: torch.zeros_like(t) if g is None else g for (name, t), g in pairs}

    return [value.detach() for value in values], back
