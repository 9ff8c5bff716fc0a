"""What each member makes of the data: log likelihood and log prior."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, DataError
from shoal.data.dataset import Split
from shoal.inference import priors
from shoal.inference.ensemble import Ensemble
from shoal.inference.priors import FunctionalPrior, WeightPrior
from shoal.prediction.predict import member_outputs

__all__ = ["log_likelihoods", "log_priors", "log_probs", "modules_of", "prior_of"]


def log_probs(run: Any, data: Split) -> Tensor:
    """log p(y_b | x_b, theta_m) [M, B] in evaluation mode; -inf for members that are dead."""
    outputs = member_outputs(run.ensemble, data).double()
    y = data.y if data.y is None or not data.y.is_floating_point() else data.y.double()
    assert y is not None, "there is no likelihood of data without targets"
    found = run.likelihood.log_prob(outputs, y)
    living = run.ensemble.alive.cpu() & outputs.isfinite().flatten(1).all(1)
    if not bool(living.any()):
        raise DataError("no member of this ensemble is alive, so there is no evidence; train again")
    return torch.where(living[:, None], found, -math.inf)


def log_likelihoods(run: Any, data: Split) -> Tensor:
    """log L_m = sum_b log p(y_b | x_b, theta_m) [M], without augmentation or dropout."""
    return log_probs(run, data).sum(-1)


def prior_of(config: dict[str, Any]) -> WeightPrior | FunctionalPrior | None:
    """The prior that a run was trained with; None when it was the user's own."""
    try:
        return priors.registry.make(config.get("prior", "gaussian"))
    except ConfigError:
        return None


def log_priors(run: Any) -> Tensor | None:
    """log density of the weight prior at each member [M], of one architecture; None without one."""
    prior = prior_of(run.config)
    if prior is None or isinstance(prior, FunctionalPrior) or len(run.ensemble.groups) > 1:
        return None
    weights = {name: t.detach().double().cpu() for name, t in run.ensemble.weights.items()}
    return prior.log_prob(weights)


def modules_of(ensemble: Ensemble, living: Sequence[int]) -> list[nn.Module]:
    """Members as ordinary modules, on the CPU in double precision."""
    return [ensemble.member(index).cpu().double() for index in living]
