"""Gaussian likelihoods of real targets: known noise, learned noise, learned noise per input."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.inference.likelihoods.likelihood import Likelihood, Task, registry
from shoal.inference.likelihoods.real_targets import LEAST, RealTargets, Standardising

__all__ = ["Gaussian", "HeteroscedasticGaussian", "HomoscedasticGaussian", "Normal"]

WINDOW = 10_000
"""Data points in the average of learned noise: enough for a precision of one percent."""


@dataclass(frozen=True)
class Normal(RealTargets):
    """Independent Gaussian target columns in any unit."""

    about: ClassVar[Task] = Task(
        "regression",
        kinds=("any", "numbers", "intervals", "gaussian"),
        measures=("rmse", "nll", "crps", "coverage_90", "sharpness", "effective_functions"),
    )

    def _log_density(self, outputs: Tensor, z: Tensor) -> Tensor:
        mean, variance = self._standard(outputs)
        square = (z - mean).square() / variance
        return -0.5 * (square + variance.log() + math.log(2 * math.pi)).sum(-1)

    cdf = Likelihood.cdf


@registry.register("gaussian")
@dataclass(frozen=True)
class Gaussian(Normal):
    """Real targets with known noise: y ~ N(f, noise_std²), independent columns.

    Attributes:
        noise_std: standard deviation of the observation noise, in units of y.
    """

    noise_std: float = 1.0

    def __post_init__(self) -> None:
        if not self.noise_std > 0:
            raise ConfigError(f"noise_std must be positive, not {self.noise_std}")

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, torch.full_like(outputs, self.noise_std**2)


@registry.register("homoscedastic")
@dataclass(frozen=True, repr=False)
class HomoscedasticGaussian(Normal, Standardising):
    r"""Real targets with one learned noise per column: y ~ N(a + b f, b² s²).

    a and b are mean and standard deviation of the training targets. Expectation maximisation finds
    the noise of largest type II likelihood. With the M members as samples of the posterior, the
    M-step has the closed form $s^2 = \frac{1}{MN} \sum_{m,n} (z_n - f_m(x_n))^2$, z = (y - a) / b.
    Each step updates a moving average over about the last min(N, 10,000) data points. The noise
    belongs to the data, so all members share it.
    """

    learns_noise: ClassVar[bool] = True

    def __repr__(self) -> str:
        noise = ", ".join(f"{value:.3g}" for value in self.noise_std)
        return f"HomoscedasticGaussian({f'noise_std={noise}' if noise else ''})"

    @property
    def noise_std(self) -> list[float]:
        """Learned standard deviation of the noise in each column, in units of y."""
        known = self.learned
        if known is None or known.variance is None:
            return []
        return (known.scale * known.variance.sqrt()).tolist()

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        known = self.learned
        if known is None or known.variance is None:
            return outputs, torch.ones_like(outputs)
        return outputs, known.variance.to(outputs).expand_as(outputs)

    def statistics(
        self, outputs: Tensor, y: Tensor, alive: Tensor, weight: Tensor | None = None
    ) -> Tensor | None:
        """Mean square of z - f over the finite members and the batch [K]; NaN without any."""
        square = (self._standardised(y, outputs) - outputs).detach().square().flatten(1, -2)
        if weight is None:
            error = square.mean(-2)
        else:
            shares = (weight / weight.sum()).flatten().to(square)
            error = (square * shares.unsqueeze(-1)).sum(-2)
        counts = alive.unsqueeze(-1) & error.isfinite()
        return torch.where(counts, error, 0.0).sum(0) / counts.sum(0)

    def learn(self, statistics: Tensor, points: float, n: float) -> None:
        """Move the variance towards the variance of the batch."""
        if self.learned is None or self.learned.variance is None:
            return
        variance = self.learned.variance
        share = min(1.0, points / min(n, WINDOW))
        moved = variance.lerp(statistics.to(variance), share).clamp(min=LEAST)
        variance.copy_(torch.where(moved.isfinite(), moved, variance))


@registry.register("heteroscedastic", cite=("lakshminarayanan2017simple",))
@dataclass(frozen=True)
class HeteroscedasticGaussian(Normal, Standardising):
    """Real targets with learned noise per input: y ~ N(a + b mu, b² (softplus(s) + 1e-6)).

    The network returns (mu, s); a and b are mean and standard deviation of the training targets.
    Lakshminarayanan et al. (2017), arXiv 1612.01474.
    """

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = outputs.chunk(2, -1)
        return mean, F.softplus(raw) + LEAST

    def width(self, targets: int) -> int:
        """A mean and a raw variance per column."""
        return 2 * targets
