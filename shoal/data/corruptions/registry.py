"""The registry of corruptions: a function, its constants at five severities, and whose it is."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from shoal.core.registry import Registry
from shoal.data.corruptions.chance import Chance

__all__ = ["SEVERITIES", "Corruption", "corruption", "registry"]

registry = Registry("corruption")

SEVERITIES = (1, 2, 3, 4, 5)
"""From hardly visible to severe."""

Constants = tuple[float, ...]
F = TypeVar("F", bound=Callable[..., Tensor])


@dataclass(frozen=True)
class Corruption:
    """One way in which images go bad.

    Attributes:
        function: `function(images, chance, *constants)`, from images [B, C, H, W] in [0, 1] to
            images that may leave that range.
        constants: the published ones for 32 x 32 images, a tuple for each severity.
        standard: one of the fifteen that published means are taken over; the others are extra.
        colour: it changes colours alone, so a grey image stays as it is.
    """

    function: Callable[..., Tensor]
    constants: tuple[Constants, ...]
    standard: bool = True
    colour: bool = False

    def __post_init__(self) -> None:
        vars(self)["__doc__"] = inspect.getdoc(self.function)

    def __call__(self, images: Tensor, chance: Chance, severity: int) -> Tensor:
        return self.function(images, chance, *self.constants[severity - 1]).clamp(0, 1)


def corruption(
    name: str,
    constants: Sequence[float | Constants],
    *,
    standard: bool = True,
    colour: bool = False,
) -> Callable[[F], F]:
    """Decorator that files a function as a corruption and leaves the function as it is."""
    rows = tuple(row if isinstance(row, tuple) else (row,) for row in constants)

    def file(function: F) -> F:
        entry = Corruption(function, rows, standard, colour)
        registry.register(name, cite=("hendrycks2019benchmarking",))(entry)
        return function

    return file
