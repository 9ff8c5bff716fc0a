"""Random numbers that belong to an image, whatever batch it comes in."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core import random

__all__ = ["Chance"]


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
