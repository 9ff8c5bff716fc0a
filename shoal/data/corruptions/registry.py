"""The registry of corruptions: functions with their constants at five severities."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shoal.core import random
from shoal.core.registry import Registry

__all__ = ["SEVERITIES", "Corruption", "Draws", "corruption", "registry"]


@dataclass(frozen=True)
class Draws:
    """Random numbers of each image, hashed from seed, purpose and index.

    >>> one = Draws(0, "fog-3", torch.tensor([7])).uniform("place", 2)
    >>> torch.equal(one[0], Draws(0, "fog-3", torch.arange(9)).uniform("place", 2)[7])
    True

    Attributes:
        seed: fixes all randomness.
        purpose: name and severity of the corruption.
        index: indices of the images [B].
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
    """One image corruption.

    Attributes:
        function: `function(images, draws, *constants)`, from images [B, C, H, W] in [0, 1] to
            images that may leave that range.
        constants: the published ones for 32 x 32 images, a tuple for each severity.
        standard: whether published means include the corruption.
        colour: whether it changes colours only, so that a grey image stays unchanged.
    """

    function: Callable[..., Tensor]
    constants: tuple[Constants, ...]
    standard: bool = True
    colour: bool = False

    def __post_init__(self) -> None:
        vars(self)["__doc__"] = inspect.getdoc(self.function)

    def __call__(self, images: Tensor, draws: Draws, severity: int) -> Tensor:
        return self.function(images, draws, *self.constants[severity - 1]).clamp(0, 1)


def corruption(
    name: str,
    constants: Sequence[float | Constants],
    *,
    standard: bool = True,
    colour: bool = False,
) -> Callable[[F], F]:
    """Decorator that registers a function as a corruption and returns the function."""
    rows = tuple(row if isinstance(row, tuple) else (row,) for row in constants)

    def file(function: F) -> F:
        made = Corruption(function, rows, standard, colour)
        registry.register(name, cite=("hendrycks2019benchmarking",))(made)
        return function

    return file
