"""Standardised numbers, and the way back to the units they were measured in."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Scaling", "standardise"]


@dataclass(frozen=True)
class Scaling:
    """Targets standardised as (y - mean) / std.

    >>> Scaling(mean=20.0, std=4.0).original(Tensor([0.5]))
    tensor([22.])

    Attributes:
        mean: of the targets to train on.
        std: their standard deviation.
    """

    mean: float
    std: float

    def original(self, y: Tensor) -> Tensor:
        """Targets or predictions in their own units."""
        return self.mean + self.std * y


def standardise(x: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of `x` less the mean of `like`, in units of its spread; and the mean and the spread.

    A column that is constant in `like` has nothing to be divided by and is only centred.
    """
    mean, spread = like.mean(0), like.std(0, correction=0)
    # The rounding of a mean leaves a constant column a spread of a few units in the last place.
    constant = spread <= 1e-12 * (1 + mean.abs())
    spread = spread.where(~constant, spread.new_ones(()))
    return (x - mean) / spread, mean, spread
