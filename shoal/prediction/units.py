"""Predictions of standardised targets, told in the units the targets were measured in."""

from shoal.data.scaling import Scaling
from shoal.prediction.predictive import Predictive

__all__ = ["in_units"]


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
    return Predictive(pred.members, pred.likelihood.in_units(scaling), pred.weights)
