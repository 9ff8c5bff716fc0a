"""Which gradients the backward pass under way is asked for.

`ctx.needs_input_grad` says which inputs were differentiable when they came in. When gradients with
respect to the data alone are wanted, every weight still is, and an autograd function that believed
it would compute weight gradients that nothing uses.
"""

from typing import Any

import torch

from shoal.core.errors import ConfigError

__all__ = ["refuse_another", "refuse_light", "refuse_third", "wanted"]

_will_execute: Any = getattr(torch._C, "_will_engine_execute_node", None)


def wanted(ctx: Any, index: int, place: int | None = None) -> bool:
    """Whether somebody waits for the gradient of input number `index`.

    Args:
        ctx: of the function.
        index: which input.
        place: its number among the inputs that are tensors, where that is another.
    """
    if not ctx.needs_input_grad[index]:
        return False
    if torch._C._current_graph_task_id() < 0:
        return True
    try:
        node = ctx.next_functions[index if place is None else place][0]
        return node is None or _will_execute(node)
    except (AttributeError, RuntimeError):
        # Within `vmap` the context is a copy without neighbours, and the engine does not answer
        # for a weight whose gradient it hands out itself.
        return True


def refuse_third() -> None:
    """Closed forms end at the second derivative; within it, nothing may ask for a graph."""
    _refuse(
        "a layer within fast_second_order() has two derivatives, and a third was asked for; "
        "leave fast_second_order() out, or create_graph in the second pass"
    )


def refuse_another() -> None:
    """Statistics of a batch have a first derivative in closed form; a graph of it there is not."""
    _refuse("statistics that another batch is normalised by have one derivative, not two")


def refuse_light() -> None:
    """What is computed again in the backward pass has no history."""
    _refuse("layers that are computed again in the backward pass have one derivative, not two")


def _refuse(sentence: str) -> None:
    if torch.is_grad_enabled():
        raise ConfigError(sentence)
