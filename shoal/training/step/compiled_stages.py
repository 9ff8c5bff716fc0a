"""The arithmetic stages of a step through `torch.compile`."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from shoal.core.errors import ShoalWarning, first_line
from shoal.training.step.stages import Stages

__all__ = ["compiled_stages"]


def compiled_stages() -> Stages:
    """The stages through `torch.compile`, once for all runs of a process.

    A stage that the compiler rejects runs as it is, for the rest of the run, with a warning.
    """
    return Stages(*map(_compiled_or_plain, Stages(), _compiled_once()))


@functools.cache
def _compiled_once() -> Stages:
    # Every method and shape compiles to its own version, and a grid has many.
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 512)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4096)
    # Inductor of torch 2.11 fails on the weight-space stage when it reorders loops.
    compiled: Any = functools.partial(
        torch.compile, dynamic=False, options={"loop_ordering_after_fusion": False}
    )
    return Stages(*(compiled(stage) for stage in Stages()))


def _compiled_or_plain(plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable:
    from torch._dynamo.exc import TorchDynamoException  # with its compiler, which is slow to import

    chosen = compiled

    @functools.wraps(plain)
    def stage(*args: Any) -> Any:
        nonlocal chosen
        if chosen is plain:
            return plain(*args)
        try:
            return compiled(*args)
        except TorchDynamoException as error:
            result = plain(*args)  # a mistake in the arguments raises its own error here
            chosen = plain
            warnings.warn(
                f"torch.compile rejects '{plain.__name__}', which runs uncompiled: "
                f"{first_line(error)}",
                ShoalWarning,
                stacklevel=2,
            )
            return result

    return stage
