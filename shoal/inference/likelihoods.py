"""Likelihoods: what the outputs of a member say about the targets."""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import Registry

__all__ = ["Categorical", "Gaussian", "HeteroscedasticGaussian", "Likelihood", "registry"]

registry = Registry("likelihood")


class Likelihood(Protocol):
    """log p(y | outputs) of every data point; leading axes of the outputs broadcast."""

    task: ClassVar[str]

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of each target, outputs [..., B, C] and y [B, ...] to [..., B]."""
        ...

    def width(self, targets: int) -> int:
        """How many outputs a member needs for this many classes or target columns."""
        ...


@registry.register("categorical")
@dataclass(frozen=True)
class Categorical:
    """Classes by softmax: log p(y | f) = f_y - log sum_c exp f_c.

    >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """

    task: ClassVar[str] = "classification"

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log probability of the labels y [B] (integers)."""
        # Networks of matrix products hand over the points side by side, and few classes go fast so.
        labels = y.expand(outputs.shape[:-1]).unsqueeze(-2)
        return F.log_softmax(outputs.mT, -2).gather(-2, labels).squeeze(-2)

    def probs(self, outputs: Tensor) -> Tensor:
        """Class probabilities [..., B, C]."""
        return outputs.softmax(-1)

    def width(self, targets: int) -> int:
        """One logit a class."""
        return targets


@registry.register("gaussian")
@dataclass(frozen=True)
class Gaussian:
    """Real targets with known noise: y ~ N(f, noise_std²), independent columns.

    Attributes:
        noise_std: standard deviation of the observation noise, in units of y.
    """

    noise_std: float = 1.0
    task: ClassVar[str] = "regression"

    def __post_init__(self) -> None:
        if not self.noise_std > 0:
            raise ConfigError(f"noise_std must be positive, not {self.noise_std}")

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y under each member, both [..., B, K]."""
        return outputs, torch.full_like(outputs, self.noise_std**2)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of the targets y [B] or [B, K]."""
        return _normal_log_prob(*self.moments(outputs), y)

    def width(self, targets: int) -> int:
        """One mean a column."""
        return targets


@registry.register("heteroscedastic", cite=("lakshminarayanan2017simple",))
@dataclass(frozen=True)
class HeteroscedasticGaussian:
    """Real targets with learned noise: outputs (mu, s), y ~ N(mu, softplus(s) + 1e-6).

    Lakshminarayanan et al. (2017), arXiv 1612.01474.
    """

    task: ClassVar[str] = "regression"

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y under each member, both [..., B, K] from outputs [..., B, 2K]."""
        mean, raw = outputs.chunk(2, -1)
        return mean, F.softplus(raw) + 1e-6

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of the targets y [B] or [B, K]."""
        return _normal_log_prob(*self.moments(outputs), y)

    def width(self, targets: int) -> int:
        """A mean and a raw variance a column."""
        return 2 * targets


def _normal_log_prob(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    y = y.unsqueeze(-1) if y.ndim == 1 else y
    if y.shape[-1] != mean.shape[-1]:
        raise DataError(
            f"targets have {y.shape[-1]} columns but the members predict {mean.shape[-1]}; "
            f"give the network one mean a column"
        )
    square = (y.to(mean.dtype) - mean).square() / variance
    return -0.5 * (square + variance.log() + math.log(2 * math.pi)).sum(-1)
