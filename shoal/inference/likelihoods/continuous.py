"""Likelihoods of real targets beyond one Gaussian: heavy tails and several peaks."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.inference.likelihoods.incomplete_beta import incomplete_beta
from shoal.inference.likelihoods.likelihood import registry
from shoal.inference.likelihoods.real_targets import LEAST, Standardising

__all__ = ["MixtureDensity", "StudentT"]


@registry.register("student-t", cite=("lange1989robust",))
@dataclass(frozen=True)
class StudentT(Standardising):
    """Real targets with outliers: y ~ a + b (mu + sqrt(v) T), T Student's t with `df` degrees.

    The network returns (mu, s) per column, and v = softplus(s) + 1e-6 is the squared scale. a and b
    are mean and standard deviation of the training targets. The variance is b² v df / (df - 2).
    Lange et al. (1989), doi 10.1080/01621459.1989.10478852.

    Attributes:
        df: degrees of freedom, above 2; fewer degrees allow larger outliers.
    """

    df: float = 4.0

    def __post_init__(self) -> None:
        if not self.df > 2:
            raise ConfigError(f"df must be above 2, where the variance is finite, not {self.df}")

    def width(self, targets: int) -> int:
        """A location and a raw squared scale per column."""
        return 2 * targets

    def _located(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        location, raw = outputs.chunk(2, -1)
        return location, F.softplus(raw) + LEAST

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        location, square = self._located(outputs)
        return location, square * (self.df / (self.df - 2))

    def _log_density(self, outputs: Tensor, z: Tensor) -> Tensor:
        df, (location, square) = self.df, self._located(outputs)
        constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
        ratio = (z - location).square() / (df * square)
        return (constant - 0.5 * square.log() - 0.5 * (df + 1) * ratio.log1p()).sum(-1)

    def _standard_cdf(self, outputs: Tensor, z: Tensor) -> Tensor:
        location, square = self._located(outputs)
        t = (z - location) / square.sqrt()
        half = torch.tensor(0.5).to(t)
        tail = 0.5 * incomplete_beta(self.df * half, half, self.df / (self.df + t.square()))
        return torch.where(t > 0, 1 - tail, tail)


@registry.register("mixture-density", cite=("bishop1994mixture",))
@dataclass(frozen=True)
class MixtureDensity(Standardising):
    """Real targets with several peaks: y ~ a + b sum_j pi_j N(mu_j, v_j) in each column.

    The network returns logits, means mu and raw variances s, in this order and each [K, J], for K
    columns and J components. pi = softmax(logits) and v = softplus(s) + 1e-6. a and b are mean and
    standard deviation of the training targets. Bishop (1994), Mixture density networks.

    Attributes:
        components: number of components J.
    """

    components: int = 3
    _PARTS: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if type(self.components) is not int or self.components < 1:
            raise ConfigError(f"components must be a whole number from 1 on, not {self.components}")

    def width(self, targets: int) -> int:
        """A logit, a mean and a raw variance per component and column."""
        return self._PARTS * self.components * targets

    def _components(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log weights, means and variances of the components, each [..., K, J]."""
        parts = outputs.unflatten(-1, (self._PARTS, -1, self.components)).unbind(-3)
        return parts[0].log_softmax(-1), parts[1], F.softplus(parts[2]) + LEAST

    def normal_components(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and variances in the units of the targets, each [..., K, J]."""
        (logs, means, variances), known = self._components(outputs), self.learned
        if known is None:
            return logs.exp(), means, variances
        location, scale = (t.to(means).unsqueeze(-1) for t in (known.location, known.scale))
        return logs.exp(), location + scale * means, scale.square() * variances

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        logs, means, variances = self._components(outputs)
        weights = logs.exp()
        mean = (weights * means).sum(-1)
        around = (means - mean.unsqueeze(-1)).square()
        return mean, (weights * (variances + around)).sum(-1)

    def _log_density(self, outputs: Tensor, z: Tensor) -> Tensor:
        logs, means, variances = self._components(outputs)
        square = (z.unsqueeze(-1) - means).square() / variances
        each = logs - 0.5 * (square + variances.log() + math.log(2 * math.pi))
        return each.logsumexp(-1).sum(-1)

    def _standard_cdf(self, outputs: Tensor, z: Tensor) -> Tensor:
        logs, means, variances = self._components(outputs)
        below = torch.special.ndtr((z.unsqueeze(-1) - means) / variances.sqrt())
        return (logs.exp() * below).sum(-1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean of each member, in standardised units and summed over the columns."""
        return self._standard(outputs)[0].sum(-1)
