r"""A normal prior on the weights as the optimiser's weight decay.

Its part of the velocity is $-cθ$ with $c = 1 / (N σ²)$. Optimisers that add weight decay to the
gradient before anything else do just this, and while they have the weights at hand: a pass over all
weights and velocities less.
"""

from dataclasses import replace

import torch

from shoal.inference.posterior import Posterior
from shoal.inference.priors import Flat, Gaussian
from shoal.interaction.flows import Stein
from shoal.interaction.repulsion import Repulsion
from shoal.training.settings import Settings

__all__ = ["hand_over"]

_FIRST_OF_ALL = (torch.optim.Adam, torch.optim.SGD)
"""Optimisers whose weight decay is a part of the gradient."""


def hand_over(
    posterior: Posterior,
    repulsion: Repulsion | None,
    settings: Settings,
    optimizer: torch.optim.Optimizer,
) -> Posterior:
    """Let the optimiser apply the prior, and return the posterior without it.

    Where it cannot, because the prior's part of the velocity changes from step to step or someone
    looks at it, the posterior is returned as it was.
    """
    prior = posterior.prior
    if not isinstance(prior, Gaussian) or _is_needed(repulsion, settings):
        return posterior
    groups = optimizer.param_groups
    decoupled = any(group.get("decoupled_weight_decay") for group in groups)
    if type(optimizer) not in _FIRST_OF_ALL or decoupled:
        return posterior
    for group in groups:
        group["weight_decay"] += 1 / (posterior.n * prior.std**2)
    return replace(posterior, prior=Flat())


def _is_needed(repulsion: Repulsion | None, settings: Settings) -> bool:
    """Annealing and the Stein flow scale it; clipping and repulsion of weights measure it."""
    if settings.annealing is not None or settings.options.clip is not None:
        return True
    if repulsion is None:
        return False
    return repulsion.space.base == "weights" or isinstance(repulsion.flow, Stein)
