"""Which gradients the backward pass under way is asked for.

`ctx.needs_input_grad` says which inputs were differentiable when they came in. When gradients with
respect to the data alone are wanted, every weight still is, and an autograd function that believed
it would compute weight gradients for nobody.
"""

from typing import Any

import torch

__all__ = ["wanted"]

_will_execute: Any = getattr(torch._C, "_will_engine_execute_node", None)


def wanted(ctx: Any, index: int) -> bool:
    """Whether somebody waits for the gradient of input number `index`."""
    if not ctx.needs_input_grad[index]:
        return False
    if torch._C._current_graph_task_id() < 0:
        return True
    try:
        node = ctx.next_functions[index][0]
        return node is None or _will_execute(node)
    except (AttributeError, RuntimeError):
        # Within `vmap` the context is a copy without neighbours, and the engine does not answer
        # for a weight whose gradient it hands out itself.
        return True
