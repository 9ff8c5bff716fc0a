"""Vector-Jacobian products of functions and networks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from shoal.core.errors import DataError
from shoal.core.types import Tree

__all__ = ["pull_back", "refused_twice", "with_pullback"]

Pullback = Callable[[Sequence[Tensor]], Tree]


def with_pullback(
    function: Callable[[Tree], Sequence[Tensor]], at: Tree
) -> tuple[list[Tensor], Pullback]:
    """The values of `function`, and its vector-Jacobian product.

    A compiled region uses `torch.func`, which the compiler understands. Other code uses
    `torch.autograd`, which starts faster.

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
        gradients = _backward(values, list(cotangents), list(live.values()))
        pairs = zip(live.items(), gradients, strict=True)
        return {name: torch.zeros_like(t) if g is None else g for (name, t), g in pairs}

    return [value.detach() for value in values], back


def pull_back(
    outputs: Tensor | Sequence[Tensor],
    cotangents: Tensor | Sequence[Tensor],
    inputs: Tree,
    keep_graph: bool = False,
) -> Tree:
    """J^T cotangent for the input tensors of the outputs: one backward pass.

    The caller may write to the result.
    """
    if isinstance(outputs, Tensor) or isinstance(cotangents, Tensor):
        outputs, cotangents = [outputs], [cotangents]  # pyright: ignore
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    with refused_twice():
        gradients = _backward(
            [output for output, _ in pairs],
            [cotangent.to(output.dtype) for output, cotangent in pairs],
            list(inputs.values()),
            keep_graph,
        )
    named = zip(inputs.items(), gradients, strict=True)
    tree = {name: torch.zeros_like(t) if g is None else g for (name, t), g in named}
    return _unshared(tree, [cotangent for _, cotangent in pairs])


@contextmanager
def refused_twice() -> Iterator[None]:
    """A block in which a layer without a second derivative is refused with one sentence."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        if not any(words in reason for words in _ONCE):
            raise
        raise DataError(
            f"a layer of the network cannot be differentiated twice, as input gradients need: "
            f"{reason}; use a method such as 'f-kde'"
        ) from error


_ONCE = "is not implemented", "don't support automatic differentiation", "once_differentiable"
"""What torch says of a backward pass that has none: native, by hand, or forbidden by its author."""

_engine: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def _backward(
    outputs: list[Tensor], cotangents: list[Tensor], inputs: list[Tensor], keep_graph: bool = False
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` without its check of shapes, which imports sympy for a second."""
    if _engine is None or has_torch_function((*outputs, *inputs)):
        return torch.autograd.grad(
            outputs, inputs, cotangents, retain_graph=keep_graph, allow_unused=True
        )
    ends, places = tuple(outputs), tuple(inputs)
    return _engine(ends, tuple(cotangents), keep_graph, False, places, True, accumulate_grad=False)


def _unshared(tree: Tree, others: Sequence[Tensor]) -> Tree:
    """The tree with copies of tensors that share memory, such as gradients of a sum."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in others}
    own = {}
    for name, tensor in tree.items():
        place = tensor.untyped_storage().data_ptr()
        own[name] = tensor.clone() if place in taken else tensor.contiguous()
        taken.add(place)
    return own
