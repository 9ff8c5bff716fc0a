"""What a space is: the tensors it lives in, and the coordinates it makes of them."""

from typing import Literal, Protocol

from shoal.core.registry import Registry
from shoal.core.types import Leaves, Tree

__all__ = ["Base", "Space", "registry"]

Base = Literal["weights", "outputs", "gradients"]

registry = Registry("space")


class Space(Protocol):
    """Coordinates of the members."""

    @property
    def base(self) -> Base:
        """The tensors the coordinates are made of."""
        ...

    @property
    def isometric(self) -> bool:
        """The coordinates are the numbers of the base, tensor by tensor, at one site."""
        ...

    def __call__(self, base: Tree) -> Leaves:
        """Leaves [M, S, D]."""
        ...
