"""The registry of corruptions: a function, its constants at five severities, and whose it is."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shoal.core import random
from shoal.core.registry import Registry

__all__ = ["SEVERITIES", "Chance", "Corruption", "corruption", "registry"]


@dataclass(frozen=True)
class Chance:
    """Streams of random numbers, one an image, hashed from what they are for.

    >>> one = Chance(0, "fog-3", torch.tensor([7])).uniform("place", 2)
    >>> torch.equal(one[0], Chance(0, "fog-3", torch.arange(9)).uniform("place", 2)[7])
    True

    Attributes:
        seed: chosen by the user.
        purpose: name and severity of the corruption.
        index: which images these are [B].
    """

    seed: int
    purpose: str
    index: Tensor

    def uniform(self, what: str, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers [B, *shape] in [low, high), in double precision."""
        draws = torch.vmap(lambda key: random.uniform(key, shape))(self._keys(what))
        return low + (high - low) * draws

    def normal(self, what: str, *shape: int) -> Tensor:
        """Standard normal numbers [B, *shape], in double precision."""
        keys = self._keys(what)
        return torch.vmap(lambda key: random.normal(key, shape, torch.float64))(keys)

    def _keys(self, what: str) -> Tensor:
        return random.key(self.seed, f"{self.purpose}/{what}", self.index)


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
