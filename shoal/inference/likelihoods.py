"""Likelihoods: the distribution of the targets, given the outputs of a member."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import ConfigError
from shoal.data.arrays import check_labels
from shoal.inference.likelihood import Likelihood, Task, registry, task_of
from shoal.inference.normal import Normal, Standardising

__all__ = [
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "HomoscedasticGaussian",
    "Likelihood",
    "Task",
    "default_for",
    "registry",
    "task_of",
]

LEAST = 1e-6
"""Smallest learned variance, in units of the variance of the targets."""

WINDOW = 10_000
"""Data points in the average of learned noise: enough for a precision of one percent."""


@registry.register("categorical")
@dataclass(frozen=True)
class Categorical(Likelihood):
    """Classes by softmax: log p(y | f) = f_y - log sum_c exp f_c.

    >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """

    about: ClassVar[Task] = Task(
        "classification",
        kinds=("any", "classes"),
        measures=("accuracy", "nll", "brier", "ece", "effective_functions"),
        under_shift=("accuracy", "ece"),
        uncertainty="entropy",
    )

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log probability of the labels y [B] (integers)."""
        # Matrix products put data points next to each other; this layout is fast for few classes.
        labels = y.expand(outputs.shape[:-1]).unsqueeze(-2)
        return F.log_softmax(outputs.mT, -2).gather(-2, labels).squeeze(-2)

    def probs(self, outputs: Tensor) -> Tensor:
        """Class probabilities [..., B, C]."""
        return outputs.softmax(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        """Class probabilities [..., B, C], the mean of the one-hot label."""
        return self.probs(outputs)

    def variance(self, outputs: Tensor) -> Tensor:
        """p (1 - p) of the one-hot label [..., B, C]."""
        probs = self.probs(outputs)
        return probs * (1 - probs)

    def entropy(self, mean: Tensor, variance: Callable[[], Tensor]) -> Tensor:
        """Entropy of the probabilities."""
        return torch.special.entr(mean).sum(-1)

    def affinity(self, outputs: Tensor) -> Tensor:
        """Mean over the inputs of the sum over classes of sqrt(p_i p_j)."""
        root = self.probs(outputs).double().sqrt().flatten(1)
        return root @ root.T / outputs.shape[1]

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The logit of the label."""
        return outputs.gather(-1, y.expand(len(outputs), -1).unsqueeze(-1)).squeeze(-1)

    def check(self, y: Tensor, outputs: int) -> None:
        """Refuse labels that are not integers below the number of outputs."""
        check_labels(y, outputs)

    def prepared(self, y: Tensor, outputs: int) -> Tensor:
        """Labels [B]."""
        check_labels(y, outputs)
        return y


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
class HomoscedasticGaussian(Standardising):
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

    def statistics(self, outputs: Tensor, y: Tensor, alive: Tensor) -> Tensor | None:
        """Mean square of z - f over the finite members and the batch [K]; NaN without any."""
        error = (self._standardised(y, outputs) - outputs).detach().square().mean(-2)
        counts = alive.unsqueeze(-1) & error.isfinite()
        return torch.where(counts, error, 0.0).sum(0) / counts.sum(0)

    def learn(self, statistics: Tensor, points: int, n: int) -> None:
        """Move the variance towards the variance of the batch."""
        if self.learned is None or self.learned.variance is None:
            return
        variance = self.learned.variance
        share = min(1.0, points / min(n, WINDOW))
        moved = variance.lerp(statistics.to(variance), share).clamp(min=LEAST)
        variance.copy_(torch.where(moved.isfinite(), moved, variance))


@registry.register("heteroscedastic", cite=("lakshminarayanan2017simple",))
@dataclass(frozen=True)
class HeteroscedasticGaussian(Standardising):
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


def default_for(y: Tensor, outputs: int | None = None) -> Likelihood:
    """Categorical for integers; a Gaussian with learned noise for real targets.

    The noise is learned per input if the network has two outputs per target column.

    Args:
        y: targets.
        outputs: number of network outputs; None if unknown.
    """
    if not y.is_floating_point():
        return Categorical()
    columns = 1 if y.ndim == 1 else y.shape[-1]
    return HeteroscedasticGaussian() if outputs == 2 * columns else HomoscedasticGaussian()
