"""Optimisers of torch that start without torch's compiler.

The methods of `torch.optim` import `torch._dynamo`, only to be left out of compiled code. The
import takes seconds, and a small run trains for less. Nothing here compiles an optimiser.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["kind_of", "uncompiled"]


@functools.cache
def uncompiled(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """The same optimiser; its methods are those beneath the wrappers for the compiler.

    >>> optimizer = uncompiled(torch.optim.SGD)([torch.ones(1, requires_grad=True)], lr=0.1)
    >>> kind_of(optimizer) is torch.optim.SGD
    True
    """
    wrapped = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in wrapped}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {"__module__": __name__, **methods})


def kind_of(optimizer: torch.optim.Optimizer) -> type:
    """The class of torch that the optimiser is made from."""
    kind = type(optimizer)
    return kind.__bases__[0] if kind.__module__ == __name__ else kind
