"""Likelihoods: the distribution of the targets, given the outputs of a member."""

from typing import Any, NamedTuple

import torch
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
from shoal.inference.likelihoods.derivatives import WithDerivatives
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
    "Suggestion",
    "Task",
    "WithDerivatives",
    "as_columns",
    "default_for",
    "known_likelihood",
    "registry",
    "suggested",
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


class Suggestion(NamedTuple):
    """A likelihood that targets call for.

    Attributes:
        name: its name, as `fit(likelihood=...)` takes it.
        sentence: what the targets are, and what to type.
    """

    name: str
    sentence: str


def suggested(y: Any) -> Suggestion | None:
    """What real targets look like, if another likelihood than a Gaussian may fit them better.

    Counts are whole numbers from 0 on with at least five values and a tail to the right, which
    codes of classes and ratings hardly have. Positive targets are skewed if the skewness of y is
    above 1, and at least twice that of log y. All columns must agree.

    Args:
        y: targets [N] or [N, K].

    >>> suggested(torch.arange(1, 50).exp2()).name
    'lognormal'
    """
    values = torch.as_tensor(y).detach().double().cpu()
    columns = values.reshape(len(values), -1).T
    if not len(values) or not bool(values.isfinite().all()):
        return None
    if all(_are_counts(column) for column in columns):
        name = "negative-binomial"
        return Suggestion(name, f"y holds counts 0, 1, 2, ...; try likelihood='{name}'")
    if all(_are_skewed(column) for column in columns):
        name = "lognormal"
        return Suggestion(name, f"y is positive and skewed; try likelihood='{name}'")
    return None


def _are_counts(y: Tensor) -> bool:
    whole = bool((y == y.round()).all()) and float(y.min()) == 0
    return whole and len(y.unique()) >= 5 and _skewness(y) > 0.5


def _are_skewed(y: Tensor) -> bool:
    return bool((y > 0).all()) and _skewness(y) > max(1.0, 2 * abs(_skewness(y.log())))


def _skewness(y: Tensor) -> float:
    """The third moment of standardised values; 0 if all are the same."""
    deviation = y - y.mean()
    scale = deviation.square().mean().sqrt()
    return float((deviation / scale).pow(3).mean()) if scale > 0 else 0.0


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
