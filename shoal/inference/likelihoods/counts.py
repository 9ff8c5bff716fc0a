"""Likelihoods of counts 0, 1, 2, ...: Poisson, and negative binomial for a larger variance."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import DataError
from shoal.inference.likelihoods.incomplete_beta import incomplete_beta
from shoal.inference.likelihoods.likelihood import Likelihood, Task, as_columns, registry

__all__ = ["Counts", "NegativeBinomial", "Poisson"]

LARGEST_LOG = 20.0
"""Above this log rate, about 5e8 counts, the rate grows linearly and stays finite."""

LEAST_DISPERSION = 1e-6


@dataclass(frozen=True)
class Counts(Likelihood):
    """Independent columns of counts; the first output of a column is its log rate f."""

    discrete: ClassVar[bool] = True
    about: ClassVar[Task] = Task(
        "counts",
        kinds=("any", "numbers", "intervals"),
        measures=("rmse", "nll", "coverage_90", "sharpness", "effective_functions"),
        under_shift=("nll", "rmse"),
    )

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse targets that are negative or not whole."""
        self._check_whole(y)
        super().check(y, outputs, sites)

    def prepared(self, y: Tensor, outputs: int, sites: int = 0) -> Tensor:
        """Counts [B, *S, K]."""
        self._check_whole(y)
        return super().prepared(y, outputs, sites)

    def _check_whole(self, y: Tensor) -> None:
        wrong = ((y < 0) | (y != y.round())).flatten() if y.is_floating_point() else y.flatten() < 0
        if wrong.any():
            first = float(y.flatten()[int(wrong.nonzero()[0])])
            raise DataError(
                f"counts are 0, 1, 2, ... but y holds {first:g}; drop such targets, or type "
                f"likelihood='gaussian' to regress on them"
            )

    def _counts(self, y: Tensor, outputs: Tensor) -> Tensor:
        return as_columns(y, outputs, outputs.shape[-1] // self.width(1)).to(outputs.dtype)


def log_rate(f: Tensor) -> Tensor:
    """The output itself; above `LARGEST_LOG` the logarithm of a linear function."""
    over = (f - LARGEST_LOG).clamp_min(0)
    return f - over + over.log1p()


@registry.register("poisson")
@dataclass(frozen=True)
class Poisson(Counts):
    """Counts y ~ Poisson(exp f): log p(y | f) = y f - exp f - log y!, independent columns.

    The network returns one log rate f per column. Above f = 20 the rate grows linearly.

    >>> Poisson().log_prob(torch.zeros(1, 1), torch.tensor([0]))
    tensor([-1.])
    """

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log probability of the counts y [B, *S] or [B, *S, K]."""
        logs, y = log_rate(outputs), self._counts(y, outputs)
        return (y * logs - logs.exp() - (y + 1).lgamma()).sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        """The rate [..., K]."""
        return log_rate(outputs).exp()

    def variance(self, outputs: Tensor) -> Tensor:
        """The rate [..., K]."""
        return self.mean(outputs)

    def cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """P(Y <= y) of each column [..., K], an incomplete gamma function."""
        outputs = outputs.double()
        y = self._counts(y.double(), outputs).floor()
        below = torch.special.gammaincc((y + 1).clamp_min(1), self.mean(outputs))
        return torch.where(y < 0, 0.0, below)

    def affinity(self, outputs: Tensor) -> Tensor:
        """Mean over the inputs of exp(-(sqrt(rate_i) - sqrt(rate_j))² / 2) over the columns."""
        roots = self.mean(outputs.double()).sqrt().flatten(1, -2)
        rows = [(-0.5 * (roots - row).square().sum(-1)).exp().mean(-1) for row in roots]
        return torch.stack(rows)


@registry.register("negative-binomial", cite=("hilbe2011negative",))
@dataclass(frozen=True)
class NegativeBinomial(Counts):
    r"""Counts with mean mu = exp f and variance mu + alpha mu², independent columns.

    The network returns (f, s) per column, and the dispersion is alpha = softplus(s) + 1e-6.
    With r = 1 / alpha, $p(y) = \frac{Γ(y + r)}{Γ(r)\, y!} (\frac{r}{r + μ})^r (\frac{μ}{r + μ})^y$.
    For alpha to 0 this is the Poisson distribution. Above f = 20 the mean grows linearly.
    Hilbe (2011), Negative Binomial Regression.
    """

    def width(self, targets: int) -> int:
        """A log mean and a raw dispersion per column."""
        return 2 * targets

    def _parameters(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        logs, raw = outputs.chunk(2, -1)
        return log_rate(logs), F.softplus(raw) + LEAST_DISPERSION

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log probability of the counts y [B, *S] or [B, *S, K]."""
        (logs, alpha), y = self._parameters(outputs), self._counts(y, outputs)
        r = alpha.reciprocal()
        # Γ(y + r) / Γ(r) by Stirling's formula: the difference of two lgamma would lose all digits
        # in single precision for a large r.
        ratio = (r + y - 0.5) * (alpha * y).log1p() - y + _stirling_rest(r + y) - _stirling_rest(r)
        value = ratio + y * logs - (r + y) * (alpha * logs.exp()).log1p() - (y + 1).lgamma()
        return value.sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        """exp f [..., K]."""
        return self._parameters(outputs)[0].exp()

    def variance(self, outputs: Tensor) -> Tensor:
        """mu + alpha mu² [..., K]."""
        logs, alpha = self._parameters(outputs)
        mean = logs.exp()
        return mean + alpha * mean.square()

    def cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """P(Y <= y) of each column [..., K], an incomplete beta function."""
        outputs = outputs.double()
        y = self._counts(y.double(), outputs).floor()
        logs, alpha = self._parameters(outputs)
        share = (1 + alpha * logs.exp()).reciprocal()
        below = incomplete_beta(alpha.reciprocal(), (y + 1).clamp_min(1), share)
        return torch.where(y < 0, 0.0, below)


def _stirling_rest(z: Tensor) -> Tensor:
    """log Γ(z) - (z - 1/2) log z + z - log(2 pi) / 2, which falls as 1 / (12 z)."""
    large = z.clamp_min(8.0)
    square = large.square().reciprocal()
    series = (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680))) / large
    small = z.clamp_max(8.0)
    exact = small.lgamma() - (small - 0.5) * small.log() + small - 0.9189385332046727
    return torch.where(z > 8, series, exact)
