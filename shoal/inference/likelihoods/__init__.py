"""Likelihoods: the distribution of the targets, given the outputs of a member."""

from typing import Any

from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.values import describe_value
from shoal.inference.likelihoods.likelihood import Likelihood, Task, as_columns, registry, task_of

# The order of listings. The task name of an older file means the first likelihood that has it.
# isort: off
from shoal.inference.likelihoods.labels import Bernoulli, Categorical, Ordinal
from shoal.inference.likelihoods.real_targets import (
    Gaussian,
    HeteroscedasticGaussian,
    HomoscedasticGaussian,
    LogNormal,
    MixtureDensity,
    StudentT,
)
from shoal.inference.likelihoods.counts import NegativeBinomial, Poisson
from shoal.inference.likelihoods.custom_loss import Custom
# isort: on

__all__ = [
    "Bernoulli",
    "Categorical",
    "Custom",
    "Gaussian",
    "HeteroscedasticGaussian",
    "HomoscedasticGaussian",
    "Likelihood",
    "LogNormal",
    "MixtureDensity",
    "NegativeBinomial",
    "Ordinal",
    "Poisson",
    "StudentT",
    "Task",
    "as_columns",
    "default_for",
    "known_likelihood",
    "registry",
    "task_of",
]


def known_likelihood(name: str, value: Any) -> Likelihood:
    """The check of an argument that is a likelihood: its name, a table or an object."""
    made = registry.make(value)
    if hasattr(made, "about"):
        return made
    raise ConfigError(
        f"{name} must be a likelihood, such as 'categorical' or shoal.likelihoods.Gaussian(), "
        f"not {describe_value(value)}"
    )


IGNORED = -100
"""Label of tokens and places that do not count, by the convention of torch."""


def default_for(y: Tensor, outputs: int | None = None) -> Likelihood:
    """Categorical for integers; a Gaussian with learned noise for real targets.

    Labels of tokens or places that are -100 are ignored, as torch's cross entropy does. The noise
    is learned per input if the network has two outputs per target column.

    Args:
        y: targets.
        outputs: number of network outputs; None if unknown.
    """
    if not y.is_floating_point():
        ignores = y.ndim > 1 and bool((y == IGNORED).any())
        return Categorical(ignore_index=IGNORED) if ignores else Categorical()
    columns = 1 if y.ndim == 1 else y.shape[-1]
    return HeteroscedasticGaussian() if outputs == 2 * columns else HomoscedasticGaussian()
