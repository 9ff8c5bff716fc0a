"""Standardised numbers, and the way back to the units they were measured in."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Scaling", "standardise"]

_LENGTHS = ("rmse", "crps", "sharpness")


@dataclass(frozen=True)
class Scaling:
    """Targets standardised as (y - mean) / std.

    >>> Scaling(mean=20.0, std=4.0).scores({"rmse": 0.5, "nll": 1.0, "coverage_90": 0.9})
    {'rmse': 2.0, 'nll': 2.386294361119891, 'coverage_90': 0.9}

    Attributes:
        mean: of the targets to train on.
        std: their standard deviation.
    """

    mean: float
    std: float

    def original(self, y: Tensor) -> Tensor:
        """Targets or predictions in their own units."""
        return self.mean + self.std * y

    def scores(self, found: Mapping[str, float]) -> dict[str, float]:
        """Scores of standardised targets as they are in the targets' own units.

        Lengths grow by the factor std. A density of y is that of the standardised y divided by
        std, so nll grows by log(std). Shares such as a coverage stay.
        """
        told = dict(found)
        for name in _LENGTHS:
            if name in told:
                told[name] *= self.std
        if "nll" in told:
            told["nll"] += math.log(self.std)
        return told


def standardise(x: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Columns of `x` less the mean of `like`, in units of its spread; and the mean and the spread.

    A column that is constant in `like` has nothing to be divided by and is only centred.
    """
    mean, spread = like.mean(0), like.std(0, correction=0)
    # The rounding of a mean leaves a constant column a spread of a few units in the last place.
    constant = spread <= 1e-12 * (1 + mean.abs())
    spread = spread.where(~constant, spread.new_ones(()))
    return (x - mean) / spread, mean, spread
