"""Predictions of standardised targets, told in the units the targets were measured in."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from shoal.data.scaling import Scaling
from shoal.inference.likelihoods import Likelihood
from shoal.prediction.predictive import Predictive

__all__ = ["Rescaled", "in_units"]


@dataclass(frozen=True)
class Rescaled:
    r"""The distribution of $y = a + b z$, where z has the distribution that the outputs mean.

    $\log p(y) = \log p_z((y - a) / b) - K \log b$ for K columns.

    Attributes:
        standardised: what the outputs mean for z.
        scaling: a and b.
    """

    standardised: Likelihood
    scaling: Scaling
    task: ClassVar[str] = "regression"

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y under each member, both [..., B, K]."""
        likelihood: Any = self.standardised
        mean, variance = likelihood.moments(outputs)
        return self.scaling.original(mean), self.scaling.std**2 * variance

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of the targets y [B] or [B, K]."""
        columns = 1 if y.ndim == 1 else y.shape[-1]
        z = (y - self.scaling.mean) / self.scaling.std
        return self.standardised.log_prob(outputs, z) - columns * math.log(self.scaling.std)

    def width(self, targets: int) -> int:
        """As many outputs as before."""
        return self.standardised.width(targets)


def in_units(pred: Predictive, scaling: Scaling | None) -> Predictive:
    """The same members' prediction of the targets themselves; nothing changes without a scaling.

    >>> import torch
    >>> from shoal.inference.likelihoods import Gaussian
    >>> pred = Predictive(torch.zeros(3, 1, 1), Gaussian(0.5))
    >>> told = in_units(pred, Scaling(mean=20.0, std=4.0))
    >>> told.mean, told.stddev
    (tensor([[20.]]), tensor([[2.]]))
    """
    if scaling is None:
        return pred
    return Predictive(pred.members, Rescaled(pred.likelihood, scaling), pred.weights)
