"""The names of the figures, and the decorator that gives each of them the common look."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.core.optional import require
from shoal.core.registry import Registry
from shoal.plots.style import rc

__all__ = ["plot", "registry"]

registry = Registry("plot")

F = TypeVar("F", bound=Callable[..., Any])


def plot(name: str, cite: tuple[str, ...] = ()) -> Callable[[F], F]:
    """File a function that takes numbers and returns a figure; it is drawn in the common style."""

    def file(draw: F) -> F:
        @functools.wraps(draw)
        def drawn(*args: Any, **options: Any) -> Any:
            with require("matplotlib", extra="report").rc_context(rc()):
                return draw(*args, **options)

        return registry.register(name, cite)(drawn)  # pyright: ignore[reportReturnType]

    return file
